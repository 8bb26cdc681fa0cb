"""One number for each metric of replicas: of those here, and of all processes'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

SUMMED = ("weight_sum", "skipped")
"""What is added up over replicas; of all else they have a mean."""


def of_replicas_here(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Scalars of (replicas,) arrays: means, of `SUMMED` sums, over replicas here.

    Nothing crosses the link between processes; of one process they are of all replicas.
    """
    parts = [_parts(array) for array in metrics.values()]
    here = next(iter(parts[0][0].devices()))
    found = _combined(tuple(metrics), jax.device_put(parts, here))
    return dict(zip(metrics, found, strict=True))


def num_replicas_here(metric: jax.Array) -> int:
    """Replicas that this process holds devices of, by a (replicas,) array."""
    return len(_parts(metric))


def of_processes(
    rows: Sequence[Mapping[str, float]], here: Sequence[int], num_replicas: int
) -> dict[str, float]:
    """One row of metrics of those of all processes.

    Args:
        rows: Of each process.
        here: How many replicas each holds devices of; several may share one.
        num_replicas: Of all.

    Example:
        >>> rows = [{"loss": 1.0, "skipped": 0}, {"loss": 2.0, "skipped": 1}]
        >>> of_processes(rows, [1, 1], 2)
        {'loss': 1.5, 'skipped': 1.0}
    """
    seen = sum(here)
    found = {}
    for name in rows[0]:
        if name in SUMMED:
            found[name] = sum(row[name] for row in rows) * num_replicas / seen
        else:
            pairs = zip(rows, here, strict=True)
            found[name] = sum(row[name] * number for row, number in pairs) / seen
    return found


def _parts(array: jax.Array) -> list[jax.Array]:
    """Of each replica here one device's copy."""
    of_replica = {
        shard.index[0].start or 0: shard.data for shard in array.addressable_shards
    }
    return [of_replica[start] for start in sorted(of_replica)]


def _combine(names: tuple[str, ...], parts: list[list[jax.Array]]) -> list[jax.Array]:
    wholes = map(jnp.concatenate, parts)
    return [
        jnp.sum(whole) if name in SUMMED else jnp.mean(whole)
        for name, whole in zip(names, wholes, strict=True)
    ]


_combined = jax.jit(_combine, static_argnums=0)
