"""A pipelined Llama step as it is usually written in JAX; no meshpar.

A `lax.scan` over ticks in which every rank runs its stage and a `ppermute` hands the
result on, and `jax.grad` through all of it. What the backward needs of every tick is
kept until the loop has ended, so memory grows with the number of microbatches. The
embedding and the head run once, outside the loop, on all microbatches. `pipeline.py`
measures meshpar against it, so it is written with care:

* every rank embeds, and computes the loss of, its share of the microbatches;
* the loss is mapped over microbatches and rematerialised: one has its logits at a time;
* microbatches enter the loop as the scan's inputs and leave it as its outputs. Read out
  of an array in the loop, the gradient of all of them would be added up every tick.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.recipes.bench.hand_written import (
    block,
    cross_entropy,
    rms_norm,
    rope_tables,
)
from meshpar.recipes.bench.plain_optimizer import state_shardings, updated

_STAGE = "stage"


@dataclass(frozen=True, kw_only=True)
class ScanPipeline:
    """The jitted step and what places its arguments.

    Args:
        step: (params, opt_state, batch) -> (params, opt_state, metrics); the first two
            are donated.
        params, opt_state, batch: Shardings.
    """

    step: Callable[..., tuple[Any, Any, dict[str, jax.Array]]]
    params: Any
    opt_state: Any
    batch: NamedSharding


def scan_pipeline(
    optimizer: optax.GradientTransformation,
    params: Any,
    devices: Sequence[jax.Device],
    *,
    num_microbatches: int,
    checkpoint: bool,
) -> ScanPipeline:
    """The step for `params` (arrays or shapes), one device a stage.

    Args:
        optimizer: What updates them.
        params: The blocks' are stacked over layers, which divide over the devices.
        devices: One a stage.
        num_microbatches: Of one step; they divide over the devices.
        checkpoint: Whether a stage keeps its input only (`jax.checkpoint`).
    """
    mesh = Mesh(np.array(devices), (_STAGE,))
    specs = {name: P(_STAGE) if name == "blocks" else P() for name in params}
    on_mesh = functools.partial(NamedSharding, mesh)
    param_shardings = {
        name: jax.tree.map(lambda _, at=spec: on_mesh(at), params[name])
        for name, spec in specs.items()
    }
    opt_shardings = state_shardings(optimizer, params, param_shardings, on_mesh(P()))
    loss = jax.shard_map(
        functools.partial(
            _loss, num_microbatches=num_microbatches, checkpoint=checkpoint
        ),
        mesh=mesh,
        in_specs=(specs, P()),
        out_specs=P(),
    )
    step = jax.jit(
        functools.partial(_step, optimizer, loss),
        in_shardings=(param_shardings, opt_shardings, on_mesh(P())),
        out_shardings=(param_shardings, opt_shardings, on_mesh(P())),
        donate_argnums=(0, 1),
    )
    return ScanPipeline(
        step=step,
        params=param_shardings,
        opt_state=opt_shardings,
        batch=on_mesh(P()),
    )


def _step(
    optimizer: optax.GradientTransformation,
    loss: Callable[..., jax.Array],
    params: Any,
    opt_state: Any,
    batch: dict[str, jax.Array],
) -> tuple[Any, Any, dict[str, jax.Array]]:
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return updated(optimizer, params, opt_state, value, gradients)


def _loss(
    params: Any, batch: dict[str, jax.Array], *, num_microbatches: int, checkpoint: bool
) -> jax.Array:
    own = {
        name: _share(array.reshape(num_microbatches, -1, array.shape[1]))
        for name, array in batch.items()
    }
    embedded = params["token_embed"][own["tokens"]]
    entering = lax.all_gather(embedded, _STAGE, tiled=True)
    leaving = _through_stages(params["blocks"], entering, checkpoint)
    loss_sums = lax.map(
        lambda one: jax.checkpoint(_head)(params, *one),
        (leaving, own["targets"], own["weights"]),
    )
    loss_sum = lax.psum(jnp.sum(loss_sums), _STAGE)
    return loss_sum / jnp.sum(batch["weights"])


def _through_stages(blocks: Any, entering: jax.Array, checkpoint: bool) -> jax.Array:
    """(microbatches, ...) of all -> this rank's share of what the last stage made."""
    num_ranks, rank = lax.axis_size(_STAGE), lax.axis_index(_STAGE)
    head_dim = blocks["attention"]["qkv"].shape[-1]
    rope = rope_tables(entering.shape[2], head_dim)
    stage = functools.partial(_stage, rope=rope)
    if checkpoint:
        stage = jax.checkpoint(stage)
    up = [(rank, rank + 1) for rank in range(num_ranks - 1)]

    def tick(arrived: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = stage(blocks, jnp.where(rank == 0, new, arrived))
        return lax.ppermute(y, _STAGE, up), y

    # Ticks after the last microbatch has entered: stages run on, on zeros.
    drain = jnp.zeros_like(entering[: num_ranks - 1])
    _, made = lax.scan(
        tick, jnp.zeros_like(entering[0]), jnp.concatenate([entering, drain])
    )
    last = jnp.where(rank == num_ranks - 1, made[num_ranks - 1 :], 0)
    return lax.psum_scatter(last, _STAGE, scatter_dimension=0, tiled=True)


def _stage(
    blocks: Any, x: jax.Array, *, rope: tuple[jax.Array, jax.Array]
) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return block(layer, x, rope, lambda x, *spec: x), None

    return lax.scan(body, x, blocks)[0]


def _head(
    params: Any, x: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    normed = rms_norm(x, params["final_norm"]["scale"])
    logits = jnp.einsum("BTD,VD->BTV", normed, params["unembed"])
    return jnp.sum(cross_entropy(logits, targets) * weights)


def _share(array: jax.Array) -> jax.Array:
    """This rank's of the microbatches."""
    size = array.shape[0] // lax.axis_size(_STAGE)
    return lax.dynamic_slice_in_dim(array, lax.axis_index(_STAGE) * size, size)
