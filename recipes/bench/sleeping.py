"""Steps whose layers sleep instead of computing, to see who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
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


def sleeping_data_step(
    part_s: np.ndarray, *, microbatches: int, data_splits: Sequence[int]
) -> Callable[[], Any]:
    """Compiles a step of parts of `data` that sleep differently, as `sleeping_step`.

    Args:
        part_s: (parts, 3), the seconds that F, I and W of a microbatch sleep.
        microbatches: Microbatches of one example of a part, on average.
        data_splits: Microbatches of each part, as a layout's.
    """

    def block(params: Any, x: jax.Array, scope: meshpar.Scope) -> jax.Array:
        if not scope.batch_axes:  # A trace of the model alone.
            return x @ params["weight"]
        own_s = jnp.asarray(part_s, jnp.float32)[lax.axis_index("data")]
        return _block((params["weight"], own_s), x)

    def head(params: Any, x: jax.Array, batch: Any, scope: meshpar.Scope) -> tuple:
        return jnp.sum((x - batch["x"]) ** 2), jnp.float32(x.size)

    def parameter(*logical_axes: str, num_layers: int | None = None) -> Any:
        shape = (_WIDTH,) * len(logical_axes)
        return meshpar.Parameter(
            shape=shape,
            dtype=jnp.float32,
            logical_axes=logical_axes,
            initial=lambda _: jnp.full(shape, 0.1),
            num_layers=num_layers,
        )

    model = meshpar.Model(
        parameters={
            "scale": parameter("embed"),
            "blocks": {"weight": parameter("embed", "mlp", num_layers=1)},
        },
        embed=lambda params, batch, scope: batch["x"] * params["scale"],
        groups=(meshpar.BlockGroup(name="blocks", num_layers=1, block=block),),
        head=head,
        inputs={"x": meshpar.Input(("batch", "embed"), "float")},
    )
    parts = len(part_s)
    layout = meshpar.Layout(
        data=parts, microbatches=microbatches, data_splits=tuple(data_splits)
    )
    devices = jax.devices()[:parts]
    step = meshpar.make_train_step(model, optax.sgd(1.0), layout, devices=devices)
    state = step.init(0)
    batch = step.place({"x": jnp.ones((parts * microbatches, _WIDTH))})
    jax.block_until_ready(step.loss_and_gradients(state, batch))
    return lambda: step.loss_and_gradients(state, batch)


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begun


def _slept(layer_s: jax.Array, after: jax.Array) -> jax.Array:
    def sleep(layer_s: Any, _: Any) -> np.ndarray:
        time.sleep(float(layer_s))
        return np.zeros((), np.float32)

    def call(layer_s: jax.Array, after: jax.Array) -> jax.Array:
        number = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(sleep, number, layer_s, after)

    # JAX calls back where every mesh axis is manual only.
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = {axis for axis, kind in kinds if kind != AxisType.Manual}
    if left:
        everywhere = jax.P()
        call = jax.shard_map(
            call,
            in_specs=(everywhere, everywhere),
            out_specs=everywhere,
            axis_names=left,
            check_vma=False,
        )
    return call(layer_s, after.ravel()[0])


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
