"""ZeRO-3 / FSDP: parameters stored in shards, gathered before use.

Inside `jax.shard_map`, manual over the batch axes. `n` devices of a weight of `P`
values: the gather brings each device the P (n-1)/n values it lacks, in the compute
dtype; the reduce-scatter of its gradient sends as many, in fp32 by default.
Reference: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import (
    Zero,
    asked,
    follow,
    on_parts,
    zero_from,
    zero_on_parts,
)
from meshpar.layout import BATCH_AXES, MANUAL_AXES
from meshpar.model import spec_axes


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How one parameter lies in storage, and what it becomes for use.

    Args:
        spec: Its layout at rest, over manual and automatic mesh axes.
        compute_dtype: Its dtype in use.
        gradient_dtype: In which its gradient is reduced and kept.
    """

    spec: PartitionSpec
    compute_dtype: Any
    gradient_dtype: Any = jnp.float32

    @property
    def manual_spec(self) -> PartitionSpec:
        """The part of the layout that `jax.shard_map` over the manual axes splits."""
        return _only(self.spec, lambda axis: axis in MANUAL_AXES)

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The manual mesh axes that the parameter is split over."""
        return spec_axes(self.manual_spec)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The batch axes that the parameter is split over at rest."""
        return tuple(axis for axis in self.manual_axes if axis in BATCH_AXES)

    @property
    def automatic_spec(self) -> PartitionSpec:
        """The part of the layout that GSPMD keeps."""
        return _only(self.spec, lambda axis: axis not in MANUAL_AXES)

    @property
    def automatic_axes(self) -> set[str]:
        """The mesh axes of `automatic_spec`."""
        return set(spec_axes(self.automatic_spec))

    @property
    def gathered_dims(self) -> list[tuple[int, tuple[str, ...]]]:
        """Each dim that is split over batch axes, and those axes."""
        return [
            (dim, (entry,) if isinstance(entry, str) else entry)
            for dim, entry in enumerate(_only(self.spec, BATCH_AXES.__contains__))
            if entry is not None
        ]

    def without_layers(self) -> Stored:
        """The same of one layer, its leading dim gone."""
        return replace(self, spec=PartitionSpec(*self.spec[1:]))


def gather(
    stored: Any, shards: Any, *, earlier: Zero | None = None, in_order: bool = False
) -> tuple[Any, Zero | None]:
    """The parameters for use: one all-gather over `fsdp` for each that is split.

    Args:
        stored: Tree of `Stored`.
        shards: The same tree of this device's shards, fp32.
        earlier: What the first gather must wait for.
        in_order: Whether each gather waits for the one before (`collectives`).

    Returns:
        The parameters, and what is to wait for the last gather; None if nothing is.
    """
    return _one_by_one(_gather_one, stored, shards, earlier, in_order)


def reduce_scatter(
    stored: Any, gradients: Any, *, earlier: Zero | None = None, in_order: bool = False
) -> tuple[Any, Zero | None]:
    """Gradients of gathered parameters -> gradients of the shards.

    One reduce-scatter over `fsdp` for each parameter that is split over it; the others
    are left for `data.reduce_gradients`. Arguments and result as for `gather`.
    """
    return _one_by_one(_scatter_one, stored, gradients, earlier, in_order)


def zero_from_all(stored: Any, tree: Any) -> Zero:
    """0, as soon as every array of a tree laid out as `stored` says is there."""
    layouts, treedef = jax.tree.flatten(stored, is_leaf=is_stored)
    total = jnp.zeros(())
    for layout, x in zip(layouts, treedef.flatten_up_to(tree), strict=True):
        total += zero_on_parts(x, layout.automatic_spec)
    return total


def _one_by_one(
    collective: Callable[[Stored, jax.Array], jax.Array],
    stored: Any,
    tree: Any,
    earlier: Zero | None,
    in_order: bool,
) -> tuple[Any, Zero | None]:
    layouts, treedef = jax.tree.flatten(stored, is_leaf=is_stored)
    results = []
    for layout, x in zip(layouts, treedef.flatten_up_to(tree), strict=True):
        moves = bool(layout.gathered_axes)
        result, done = _apply(collective, layout, x, earlier if moves else None)
        results.append(result)
        earlier = done if moves and in_order else earlier
    return treedef.unflatten(results), earlier if in_order else None


def _apply(
    collective: Callable[[Stored, jax.Array], jax.Array],
    layout: Stored,
    x: jax.Array,
    earlier: Zero | None,
) -> tuple[jax.Array, Zero]:
    def local(x: jax.Array, earlier: Zero) -> tuple[jax.Array, Zero]:
        result = collective(layout, follow(x, earlier) if waits else x)
        return result, zero_from(result)

    waits, replicated = earlier is not None, PartitionSpec()
    return on_parts(
        local,
        x,
        earlier if waits else jnp.zeros(()),
        specs=(layout.automatic_spec, replicated),
        out_specs=(layout.automatic_spec, replicated),
        mesh_axes=layout.automatic_axes if layout.gathered_axes else set(),
    )


def _gather_one(layout: Stored, shard: jax.Array) -> jax.Array:
    x = shard.astype(layout.compute_dtype)
    for dim, mesh_axes in layout.gathered_dims:
        with asked("parameter_gather"):
            x = lax.all_gather(x, mesh_axes, axis=dim, tiled=True)
    return x


def _scatter_one(layout: Stored, gradient: jax.Array) -> jax.Array:
    x = gradient.astype(layout.gradient_dtype)
    for dim, mesh_axes in layout.gathered_dims:
        with asked("gradient_scatter"):
            x = lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True)
    return x


def is_stored(node: object) -> bool:
    """Whether a node of a tree is a `Stored`."""
    return isinstance(node, Stored)


def _only(spec: PartitionSpec, wanted: Callable[[str], bool]) -> PartitionSpec:
    entries = []
    for entry in spec:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        chosen = tuple(axis for axis in axes if wanted(axis))
        entries.append(chosen[0] if len(chosen) == 1 else chosen or None)
    return PartitionSpec(*entries)
