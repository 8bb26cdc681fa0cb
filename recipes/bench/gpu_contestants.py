"""The programs that `gpu.py` measures: one model, one batch, the same first values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import meshpar
from meshpar.models.gpt2 import GPT2Config, gpt2
from meshpar.models.layers.rope import rope_frequencies
from meshpar.models.llama import LlamaConfig, llama
from meshpar.recipes.bench.plain_step import PlainModel, plain_step

Batch = dict[str, np.ndarray]
LEARNING_RATE, MAX_GRAD_NORM = 1e-4, 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the batch that it trains on.

    Args:
        config: The model.
        batch: Sequences in a step.
        seq: Tokens of a sequence.
        remat: `Layout.remat` of meshpar's step.
    """

    config: GPT2Config | LlamaConfig
    batch: int
    seq: int
    remat: str = "none"

    @property
    def model(self) -> meshpar.Model:
        """Under meshpar's contract."""
        family = gpt2 if isinstance(self.config, GPT2Config) else llama
        return family(self.config)

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.seq

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a step: 6 N + 12 layers embed seq a token.

        N are the parameters in matmuls, the head's table once. Scores count as if
        nothing were masked (Chowdhery et al. 2022, appendix B).
        """
        weights = sum(
            parameter.struct.size
            for path, parameter in self.model.flat_parameters().items()
            if len(parameter.shape) > 1 and not path.endswith(("_embed", "bias"))
        )
        config = self.config
        if "unembed" not in self.model.parameters:
            weights += config.vocab * config.embed
        head_dim = getattr(config, "size_per_head", config.embed // config.heads)
        scores = 12 * config.layers * config.heads * head_dim * self.seq
        return self.tokens * (6 * weights + scores)

    def draw_batch(self) -> Batch:
        """Random tokens."""
        random = np.random.default_rng(0)
        shape = (self.batch, self.seq + 1)
        text = random.integers(0, self.config.vocab, shape, np.int32)
        return {
            "tokens": np.ascontiguousarray(text[:, :-1]),
            "targets": np.ascontiguousarray(text[:, 1:]),
            "weights": np.ones((self.batch, self.seq), np.float32),
        }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times and losses of one program.

    Args:
        losses: Of its first steps.
        step_s: Seconds of a step.
        peak_bytes: The most memory that it held; None where the device does not say.
        compiled_bytes: What the compiler counted for meshpar's step; None for others.
    """

    losses: list[float]
    step_s: float
    peak_bytes: int | None = None
    compiled_bytes: int | None = None


def measure_meshpar(shape: Shape, *, steps: int) -> Measured:
    """meshpar's step, the layout `precision=bf16` on the first device."""
    step = meshpar.make_train_step(
        shape.model,
        optax.adamw(LEARNING_RATE),
        meshpar.Layout(precision="bf16", remat=shape.remat),
        devices=jax.devices()[:1],
        max_grad_norm=MAX_GRAD_NORM,
    )
    state = step.init(seed=0)

    def run(batch: Batch) -> jax.Array:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    batch = shape.draw_batch()
    measured = _measure(run, batch, steps)
    compiled_bytes = meshpar.memory_report(step, batch).peak_bytes
    return dataclasses.replace(measured, compiled_bytes=compiled_bytes)


def measure_plain(shape: Shape, *, steps: int) -> Measured:
    """The hand-written JAX step."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adamw(LEARNING_RATE)
    )
    params = jax.jit(shape.model.init)(0)
    opt_state = jax.jit(optimizer.init)(params)
    step = plain_step(plain_model(shape), optimizer)

    def run(batch: Batch) -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        return loss

    return _measure(run, shape.draw_batch(), steps)


def measure_torch(shape: Shape, *, steps: int) -> Measured:
    """The PyTorch step; JAX makes its first values on the CPU."""
    import torch

    from meshpar.recipes.bench.torch_step import torch_step

    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(jax.jit(shape.model.init)(0))
    paths = jax.tree.leaves_with_path(params)
    run = torch_step(
        plain_model(shape),
        {jax.tree_util.keystr(p, simple=True, separator="."): a for p, a in paths},
        device="cuda" if torch.cuda.is_available() else "cpu",
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
    )
    measured = _measure(run, shape.draw_batch(), steps)
    held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return dataclasses.replace(measured, peak_bytes=held)


MEASURES: dict[str, Callable[..., Measured]] = {
    "meshpar": measure_meshpar,
    "hand-written JAX": measure_plain,
    "torch.compile": measure_torch,
}


def plain_model(shape: Shape) -> PlainModel:
    """The sizes that the hand-written programs need beside the parameters."""
    config = shape.config
    is_gpt2 = isinstance(config, GPT2Config)
    on_gpu = jax.default_backend() == "gpu"
    return PlainModel(
        heads=config.heads,
        kv_heads=config.heads if is_gpt2 else config.kv_heads,
        epsilon=config.norm_epsilon,
        frequencies=None
        if is_gpt2
        else tuple(
            rope_frequencies(
                config.size_per_head, config.rope_theta, config.rope_scaling
            ).tolist()
        ),
        attention="cudnn" if on_gpu else None,
    )


def _measure(run: Callable[[Batch], Any], batch: Batch, steps: int) -> Measured:
    """Three steps that compile and settle, then `steps` queued without a wait."""
    losses = [float(run(batch)) for _ in range(3)]
    start = time.perf_counter()
    for _ in range(steps):
        loss = run(batch)
    final = float(loss)
    seconds = (time.perf_counter() - start) / steps
    if not np.isfinite(final):
        raise FloatingPointError(f"the loss after {steps + 3} steps is {final}")
    stats = jax.devices()[0].memory_stats() or {}
    return Measured(
        losses=losses, step_s=seconds, peak_bytes=stats.get("peak_bytes_in_use")
    )


_LOSS_ROUNDING = 0.005
"""Relative: a bf16 value is off by 1/256 at most, a mean of many tokens by less."""


def bf16_agrees(losses: list[float], others: list[float]) -> bool:
    """Return True if two programs' first losses differ by at most bf16's rounding.

    Losses of a fresh model are all near ln V, so what the steps change is compared too:
    a step that learns nothing, or twice as much, does not agree.
    """
    changes, other_changes = np.diff(losses), np.diff(others)
    return bool(
        np.allclose(losses, others, rtol=_LOSS_ROUNDING)
        and np.allclose(
            changes, other_changes, rtol=0.2, atol=_LOSS_ROUNDING * abs(losses[0]) / 5
        )
    )
