"""A pipeline whose layers sleep instead of computing, to see its ranks wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import meshpar

_WIDTH = 16


def sleeping_step(
    layer_s: np.ndarray,
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    splits: Sequence[int] = (),
    execution: str = "uniform",
) -> Callable[[], Any]:
    """Compiles loss and gradients, and runs them once; the result runs them again.

    Args:
        layer_s: (layers, 3), the seconds that F, I and W of a microbatch sleep.
        stages: Ranks, on a device each.
        microbatches: Microbatches of one example a rank.
        schedule: Its name.
        chunks: Stages of a rank.
        splits: Layers of each stage; as even as possible when absent.
        execution: `uniform` or `divergent`.
    """
    mesh = Mesh(
        np.array(jax.devices()[:stages]), ("stage",), axis_types=(AxisType.Auto,)
    )
    value_and_grad = meshpar.pipeline_value_and_grad(
        _block,
        lambda scale, x, y: jnp.mean((scale * x - y) ** 2),
        mesh=mesh,
        num_microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        splits=splits,
        execution=execution,
    )
    weights = jnp.full((len(layer_s), _WIDTH, _WIDTH), 0.1)
    x = jnp.ones((stages * microbatches, _WIDTH))
    given = (weights, jnp.asarray(layer_s, jnp.float32)), jnp.ones(()), x, x
    compiled = jax.jit(value_and_grad).lower(*given).compile()
    jax.block_until_ready(compiled(*given))
    return lambda: compiled(*given)


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begun


def _slept(layer_s: jax.Array, after: jax.Array) -> jax.Array:
    def sleep(layer_s: Any, _: Any) -> np.ndarray:
        time.sleep(float(layer_s))
        return np.zeros((), np.float32)

    number = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(sleep, number, layer_s, after.ravel()[0])


@jax.custom_vjp
def _block(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """A matmul whose forward and whose two gradients sleep."""
    weight, layer_s = params
    return x @ weight + _slept(layer_s[0], x)


def _backward(kept: tuple, dy: jax.Array) -> tuple[tuple, jax.Array]:
    (weight, layer_s), x = kept
    of_weight = x.T @ dy + _slept(layer_s[2], dy)
    of_x = dy @ weight.T + _slept(layer_s[1], dy)
    return (of_weight, jnp.zeros_like(layer_s)), of_x


_block.defvjp(lambda params, x: (_block(params, x), (params, x)), _backward)
