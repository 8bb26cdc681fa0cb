"""A trial: one kernel or collective, run over and over on all devices at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("group", "member")
"""The mesh of a trial: groups of devices, which work at the same time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One thing to time.

    Args:
        name: What reports call it.
        run: Does it `repeats` times and waits for the end.
        repeats: How often.
    """

    name: str
    run: Callable[[], object]
    repeats: int


def mesh_of(devices: Sequence[jax.Device], members: int) -> Mesh:
    """Groups of `members` devices each, neighbours together."""
    groups = len(devices) // members
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((groups, members), AXES, axis_types=kinds, devices=devices)


def trial(
    name: str,
    mesh: Mesh,
    body: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    repeats: int,
) -> Trial:
    """A trial of `body`, whose result is its next first argument.

    Args:
        name: What reports call it.
        mesh: From `mesh_of`.
        body: Of one device's arrays.
        arrays: Those, the same on every device.
        repeats: Times that one run does it; each needs the one before.
    """
    spec = PartitionSpec(AXES)
    lying = NamedSharding(mesh, spec)

    def on_device(first: jax.Array, *others: jax.Array) -> jax.Array:
        own = [other[0] for other in others]
        step = lambda _, value: body(value, *own)  # noqa: E731
        return lax.fori_loop(0, repeats, step, first[0])[None]

    specs = (spec,) * len(arrays)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec)
    whole = [jax.device_put(_on_each(array, mesh), lying) for array in arrays]
    compiled = jax.jit(program).lower(*whole).compile()
    return Trial(
        name=name,
        run=lambda: jax.block_until_ready(compiled(*whole)),
        repeats=repeats,
    )


def seconds(trials: Sequence[Trial], rounds: int) -> list[float]:
    """The median time of doing each once; rounds interleave all of them."""
    for each in trials:
        each.run()
    taken: list[list[float]] = [[] for _ in trials]
    for _ in range(rounds):
        for each, times in zip(trials, taken, strict=True):
            start = time.perf_counter()
            each.run()
            times.append((time.perf_counter() - start) / each.repeats)
    return [statistics.median(times) for times in taken]


def _on_each(array: jax.Array, mesh: Mesh) -> jax.Array:
    return jax.numpy.broadcast_to(array, (mesh.size, *array.shape))
