"""Train an example under a layout, beside a plain program of JAX and optax."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import optax
from flax import nnx

import meshpar

EXAMPLES = (
    "nanogpt_nnx",
    "gpt2_linen",
    "transformer_scan",
    "mixer_equinox",
    "resnet_nnx",
)
STEPS = 3


def main(arguments: list[str] | None = None) -> None:
    """Print the losses of both programs, and the lines that meshpar needed."""
    parser = argparse.ArgumentParser(prog="python -m recipes.examples")
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("layout", help="layout, such as fsdp=4,tensor=2")
    parser.add_argument("--blocks", action="store_true", help="cut the loss at blocks")
    options = parser.parse_args(arguments)
    meshpar.emulate(8)
    example = importlib.import_module(f"recipes.examples.{options.example}")
    print(f"{added_lines(example, options.blocks)} lines for meshpar")
    for name, losses in (
        (options.layout, layout_losses(example, options.layout, options.blocks)),
        ("plain program", plain_losses(example)),
    ):
        print(f"{name:40}", *(f"{loss:.6f}" for loss in losses))


def added_lines(example: ModuleType, with_blocks: bool) -> int:
    """Return the lines of code of an example that are there for meshpar alone."""
    lines, _ = inspect.getsourcelines(example.model)
    body = [line for line in lines[1:] if line.strip()]
    return len(body) + with_blocks  # BLOCKS


def layout_losses(example: ModuleType, layout: str, with_blocks: bool) -> list[float]:
    """Return the losses of the first steps under a layout."""
    blocks = example.BLOCKS if with_blocks else None
    step = meshpar.make_train_step(example.model(blocks), example.optimizer, layout)
    state, losses = step.init(seed=0), []
    for _ in range(STEPS):
        state, metrics = step(state, example.batch())
        losses.append(float(metrics["loss"]))
    return losses


def plain_losses(example: ModuleType) -> list[float]:
    """Return the losses of the first steps of a plain program, without meshpar."""
    params, join = _split(example.init(jax.random.key(0)))
    optimizer, batch = example.optimizer, example.batch()

    def mean(params: Any) -> jax.Array:
        loss_sum, weight_sum, *_ = example.loss(join(params), batch, None)
        return loss_sum / weight_sum

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def _split(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return what is trained of a model, and a function that joins the rest to it."""
    if isinstance(tree, nnx.Module):
        graph, params, rest = nnx.split(tree, nnx.Param, ...)
        return params, lambda params: nnx.merge(graph, params, rest, copy=True)
    leaves, structure = jax.tree.flatten(tree)
    trained = [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]
    return trained, lambda params: structure.unflatten(
        [old if new is None else new for old, new in zip(leaves, params, strict=True)]
    )


if __name__ == "__main__":
    main()
