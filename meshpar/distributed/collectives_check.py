"""Each kind of collective once, on whole numbers whose results are known.

Wrong values of a reduce-scatter of 4 MiB over gloo are reported as jax issue 40830; so
4 MiB is what each device gives, or gets.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_BYTES = 4 << 20
_AXIS = "all"
_PRIME = 7919


def check_collectives() -> str | None:
    """Run every kind of collective; return what is wrong with one, or None."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    number = len(devices)
    length = _BYTES // 4 // number * number
    for kind, (collective, expected) in _KINDS.items():
        # A row of whole numbers below 1000 for each device, all different.
        device = np.arange(1, number + 1, dtype=np.int32)[:, None]
        places = length // number if kind == "all-gather" else length
        given = (device * np.arange(places, dtype=np.int32) + device * _PRIME) % 997
        found = _run(mesh, collective, given)
        wanted = expected(given)
        for shard in found.addressable_shards:
            wrong = np.asarray(shard.data) != wanted[shard.index]
            if wrong.any():
                return (
                    f"{kind} of {_BYTES:,} bytes between {jax.process_count()} "
                    f"processes returns {int(wrong.sum()):,} wrong numbers of "
                    f"{wrong.size:,} on {shard.device}; use another version of jaxlib, "
                    "or jax_cpu_collectives_implementation=mpi"
                )
    return None


def _run(
    mesh: Mesh, collective: Callable[[jax.Array], jax.Array], given: np.ndarray
) -> jax.Array:
    spec = PartitionSpec(_AXIS)
    rows = jax.make_array_from_callback(
        given.shape, NamedSharding(mesh, spec), lambda index: given[index]
    )
    mapped = jax.shard_map(
        lambda row: collective(row[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    return jax.jit(mapped)(rows)


def _next(row: jax.Array) -> jax.Array:
    number = lax.axis_size(_AXIS)
    return lax.ppermute(
        row, _AXIS, [(one, (one + 1) % number) for one in range(number)]
    )


_KINDS: dict[
    str,
    tuple[Callable[[jax.Array], jax.Array], Callable[[np.ndarray], np.ndarray]],
] = {
    "all-reduce": (
        lambda row: lax.pcast(lax.psum(row, _AXIS), _AXIS, to="varying"),
        lambda given: np.broadcast_to(given.sum(0, dtype=np.int32), given.shape),
    ),
    "reduce-scatter": (
        lambda row: lax.psum_scatter(row, _AXIS, tiled=True),
        lambda given: given.sum(0, dtype=np.int32).reshape(len(given), -1),
    ),
    "all-gather": (
        lambda row: lax.all_gather(row, _AXIS, tiled=True),
        lambda given: np.broadcast_to(given.ravel(), (len(given), given.size)),
    ),
    "all-to-all": (
        lambda row: lax.all_to_all(row, _AXIS, 0, 0, tiled=True),
        lambda given: np.reshape(np.split(given, len(given), axis=1), given.shape),
    ),
    "collective-permute": (_next, lambda given: np.roll(given, 1, axis=0)),
}
"""Kind -> what each device does with its row, and what all rows are then."""
