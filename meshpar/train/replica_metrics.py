"""One number for each metric of replicas, on this process and over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from meshpar.parallel.reduction import safe_inverse

SUMMED = ("weight_sum", "skipped")
"""Metrics that are added up over replicas. `grad_norm` is averaged; all others, such as
the loss, are averaged with weights `weight_sum`: as in one batch, but for a head's term
that has other weights."""


def local_replica_metrics(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return means and sums (`SUMMED`) of (replicas,) arrays over local replicas.

    Nothing crosses the link between processes; a single process has all replicas.
    """
    parts = [_parts(array) for array in metrics.values()]
    here = next(iter(parts[0][0].devices()))
    found = _combined(tuple(metrics), jax.device_put(parts, here))
    return dict(zip(metrics, found, strict=True))


def num_local_replicas(metric: jax.Array) -> int:
    """Return the number of replicas that this process holds devices of."""
    return len(_parts(metric))


def combined_metrics(
    rows: Sequence[Mapping[str, float]], here: Sequence[int], num_replicas: int
) -> dict[str, float]:
    """Return one row of metrics for the rows of all processes.

    Args:
        rows: The row of each process.
        here: Number of replicas that each holds devices of; several may share one.
        num_replicas: Number of all replicas.

    Example:
        >>> rows = [{"loss": 1.0, "weight_sum": 30}, {"loss": 2.0, "weight_sum": 10}]
        >>> combined_metrics(rows, [1, 1], 2)
        {'loss': 1.25, 'weight_sum': 40.0}
    """
    seen = sum(here)
    found = {}
    for name in rows[0]:
        if name in SUMMED:
            found[name] = sum(row[name] for row in rows) * num_replicas / seen
            continue
        shares: Sequence[float] = here
        if name != "grad_norm":
            shares = [row.get("weight_sum", 1) for row in rows]
        total = sum(shares)
        pairs = zip(rows, shares, strict=True)
        found[name] = (
            sum(row[name] * share for row, share in pairs) / total if total else 0.0
        )
    return found


def _parts(array: jax.Array) -> list[jax.Array]:
    """Return one device's copy for each local replica."""
    of_replica = {
        shard.index[0].start or 0: shard.data for shard in array.addressable_shards
    }
    return [of_replica[start] for start in sorted(of_replica)]


def _combine(names: tuple[str, ...], parts: list[list[jax.Array]]) -> list[jax.Array]:
    wholes = dict(zip(names, map(jnp.concatenate, parts), strict=True))
    weights = wholes.get("weight_sum", jnp.float32(1))
    total = jnp.sum(jnp.broadcast_to(weights, wholes[names[0]].shape))

    def one(name: str) -> jax.Array:
        whole = wholes[name]
        if name in SUMMED:
            return jnp.sum(whole)
        if name == "grad_norm":
            return jnp.mean(whole)
        return jnp.sum(whole * weights) * safe_inverse(total)

    return [one(name) for name in names]


_combined = jax.jit(_combine, static_argnums=0)
