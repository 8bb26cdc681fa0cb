"""Hops: payloads from every rank to another at once, laid out as their streams are.

One collective-permute over `stage` for each array and hop: of a payload's bytes every
rank sends all. Other mesh axes move their own parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked, on_parts
from meshpar.parallel.pipeline.ends import STAGE, is_spec
from meshpar.parallel.pipeline.work import Payload
from meshpar.rules.rules import spec_axes


@dataclass(frozen=True, kw_only=True)
class Hops:
    """What payloads travel by.

    Args:
        num_ranks: Of the pipeline.
        specs: How each array of a payload lies over automatic mesh axes.
    """

    num_ranks: int
    specs: Any

    def sent(
        self, payload: Payload, before: Any, hops: tuple[int, ...], reason: str
    ) -> list[Payload]:
        """What arrives of a payload by each hop, once `before` is there."""
        payload = after(payload, before)
        return [self._permute(payload, hop, reason) for hop in hops]

    def laid_out(self, payload: Payload) -> Payload:
        """A payload, or buffers of payloads, constrained to its specs."""

        def constrained(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            if not spec_axes(spec):
                return x
            leading = (None,) * (x.ndim - len(spec))
            mesh = jax.sharding.get_abstract_mesh()
            sharding = NamedSharding(mesh, PartitionSpec(*leading, *spec))
            return lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrained, self.specs, payload, is_leaf=is_spec)

    def _permute(self, payload: Payload, hop: int, reason: str) -> Payload:
        pairs = [
            (rank, (rank + hop) % self.num_ranks) for rank in range(self.num_ranks)
        ]

        def local(x: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.ppermute(x, STAGE, pairs)

        def permute(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            axes = set(spec_axes(spec))
            return on_parts(local, x, specs=(spec,), out_specs=spec, mesh_axes=axes)

        return jax.tree.map(permute, self.specs, payload, is_leaf=is_spec)


def after(payload: Any, before: Any) -> Any:
    """The payload, for use once `before` is there too."""
    return payload if before is None else lax.optimization_barrier((payload, before))[0]
