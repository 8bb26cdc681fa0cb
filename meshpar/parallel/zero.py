"""ZeRO-3 / FSDP: parameters stored in shards, gathered before use.

Inside `jax.shard_map`, manual over the batch axes. `n` devices of a weight of `P`
values: the gather brings each device the P (n-1)/n values it lacks, in the compute
dtype; the reduce-scatter of its gradient sends as many, in fp32.
Reference: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.layout import BATCH_AXES
from meshpar.model import spec_axes


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How one parameter lies in storage, and what it becomes for use.

    Args:
        spec: Its layout at rest, over manual and automatic mesh axes.
        compute_dtype: Its dtype in use; gradients are reduced and kept in fp32.
    """

    spec: PartitionSpec
    compute_dtype: Any

    @property
    def manual_spec(self) -> PartitionSpec:
        """The part of the layout that `jax.shard_map` over the batch axes splits."""
        return _only(self.spec, lambda axis: axis in BATCH_AXES)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The batch axes that the parameter is split over at rest."""
        return spec_axes(self.manual_spec)

    @property
    def automatic_spec(self) -> PartitionSpec:
        """The part of the layout that GSPMD keeps."""
        return _only(self.spec, lambda axis: axis not in BATCH_AXES)

    def without_layers(self) -> Stored:
        """The same of one layer, its leading dim gone."""
        return Stored(
            spec=PartitionSpec(*self.spec[1:]), compute_dtype=self.compute_dtype
        )


def gather(stored: Any, shards: Any) -> Any:
    """The parameters for use: one all-gather over `fsdp` for each that is split.

    Args:
        stored: Tree of `Stored`.
        shards: The same tree of this device's shards, fp32.
    """
    return jax.tree.map(_gather_one, stored, shards, is_leaf=_is_stored)


def reduce_scatter(stored: Any, gradients: Any) -> Any:
    """Gradients of gathered parameters -> fp32 gradients of the shards.

    One reduce-scatter over `fsdp` for each parameter that is split over it; the others
    are left for `data.reduce_gradients`.
    """
    return jax.tree.map(_scatter_one, stored, gradients, is_leaf=_is_stored)


def _gather_one(stored: Stored, shard: jax.Array) -> jax.Array:
    cast = shard.astype(stored.compute_dtype)
    return _on_every_dim(
        stored, cast, lambda x, axes, dim: lax.all_gather(x, axes, axis=dim, tiled=True)
    )


def _scatter_one(stored: Stored, gradient: jax.Array) -> jax.Array:
    cast = gradient.astype(jnp.float32)
    return _on_every_dim(
        stored,
        cast,
        lambda x, axes, dim: lax.psum_scatter(
            x, axes, scatter_dimension=dim, tiled=True
        ),
    )


def _on_every_dim(
    stored: Stored,
    x: jax.Array,
    collective: Callable[[jax.Array, tuple[str, ...], int], jax.Array],
) -> jax.Array:
    def apply(x: jax.Array) -> jax.Array:
        for dim, entry in enumerate(stored.manual_spec):
            if entry is not None:
                axes = (entry,) if isinstance(entry, str) else entry
                x = collective(x, axes, dim)
        return x

    automatic = spec_axes(stored.automatic_spec)
    if not stored.gathered_axes or not automatic:
        return apply(x)
    # GSPMD replicates the operand of a collective that is manual over other mesh axes;
    # making these manual as well keeps it split over them.
    return jax.shard_map(
        apply,
        in_specs=stored.automatic_spec,
        out_specs=stored.automatic_spec,
        axis_names=set(automatic),
        check_vma=False,
    )(x)


def _only(spec: PartitionSpec, wanted: Callable[[str], bool]) -> PartitionSpec:
    entries = []
    for entry in spec:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        chosen = tuple(axis for axis in axes if wanted(axis))
        entries.append(chosen[0] if len(chosen) == 1 else chosen or None)
    return PartitionSpec(*entries)


def _is_stored(node: object) -> bool:
    return isinstance(node, Stored)
