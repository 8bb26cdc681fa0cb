"""What a model keeps of its tokens under a layout: which arrays, where, how large."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError, whole_number
from meshpar.generation.texts import (
    batch_of_source,
    batch_of_tokens,
    decoder_at,
    reads_source,
)
from meshpar.layout import BATCH_AXES, Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import Batch
from meshpar.model.scope import Scope
from meshpar.model.token_cache import CachedArray, DeclaredCache
from meshpar.model.tracing import one_layer_shapes, one_layer_state, tracing
from meshpar.parallel.paged_cache import Pools, Source
from meshpar.parallel.pipeline.program import Pipeline
from meshpar.parallel.placement import Placement
from meshpar.rules.rules import Rules
from meshpar.train.state_memory import local_bytes

PAGE_AXES = (*BATCH_AXES, "context")
"""Mesh axes that split the pages: each device has those of its examples' tokens."""


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The pools of every group of blocks.

    Args:
        groups: What a layer of each group keeps of a token.
        places: Places for layers in each group's pools, over all stages.
        slots: Examples that may run at once, over all devices.
        max_seq: Tokens that each may have.
        page_size: Tokens of a page.
        num_pages: Pages of a device, for what has no window.
        chunk: Most new tokens of an example in one program.
        max_source: Tokens that the source of each may have; 0 of a model without.
        layout: Which devices there are.
        rules: Logical axis -> mesh axes.
    """

    groups: tuple[tuple[CachedArray, ...], ...]
    places: tuple[int, ...]
    slots: int
    max_seq: int
    page_size: int
    num_pages: int
    chunk: int
    layout: Layout
    rules: Rules
    max_source: int = 0

    @property
    def table_pages(self) -> int:
        """Pages of one example on a device, at most."""
        return -(-self.max_seq // (self.page_size * self.layout.context))

    @property
    def rings(self) -> tuple[dict[str, int], ...]:
        """Of each group: name of what has no table -> pages of an example."""
        return tuple(
            {one.name: self._ring(one) for one in group if self._is_ring(one)}
            for group in self.groups
        )

    def shapes(self, mesh: Mesh | AbstractMesh) -> list[Pools]:
        """Shape, dtype and sharding of every pool."""
        return [
            {one.name: self._pool(one, places, mesh) for one in group}
            for group, places in zip(self.groups, self.places, strict=True)
        ]

    def bytes_per_device(self) -> int:
        """Bytes of all pools on a device.

        layers of a stage x pages x tokens of a page x heads of a device x size x bytes,
        of keys and of values.
        """
        shapes = self.shapes(absent_mesh(self.layout))
        return local_bytes(shapes, jax.tree.map(lambda one: one.sharding, shapes))

    def _pool(
        self, one: CachedArray, places: int, mesh: Mesh | AbstractMesh
    ) -> jax.ShapeDtypeStruct:
        pages = self._pages(one) * math.prod(
            self.layout.mesh_shape[axis] for axis in PAGE_AXES
        )
        stage = "stage" if self.layout.runs_in_ticks else None
        of_token = self.rules.spec(
            one.logical_axes, one.shape, mesh_shape=self.layout.mesh_shape
        )
        return jax.ShapeDtypeStruct(
            (places, pages, self.page_size, math.prod(one.shape)),
            one.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(stage, PAGE_AXES, None, of_token[0])
            ),
        )

    def _pages(self, one: CachedArray) -> int:
        """Of a device."""
        if not self._is_ring(one):
            return self.num_pages
        return self._ring(one) * (self.slots // self.layout.batch_shards)

    def _is_ring(self, one: CachedArray) -> bool:
        if one.of_source:
            return True
        return one.window is not None and self._ring(one) < self.table_pages

    def _ring(self, one: CachedArray) -> int:
        """Pages of an example on a device: its source's.

        Or a window's, and those being written.
        """
        if one.of_source:
            return -(-self.max_source // self.page_size)
        tokens = (one.window or 0) + self.chunk
        return -(-tokens // (self.page_size * self.layout.context)) + 1


def plan_of(
    placement: Placement,
    pipeline: Pipeline | None,
    slots: int,
    max_seq: int,
    page_size: int,
    num_pages: int | None,
    chunk: int,
    max_source: int = 0,
) -> CachePlan:
    """The pools of a model on its mesh.

    Args:
        placement: The model, arranged for its stages.
        pipeline: The stages, if there are any.
        slots: Examples that may run at once, over all devices.
        max_seq: Tokens that each may have.
        page_size: Tokens of a page.
        num_pages: Pages of a device; enough for all slots when absent.
        chunk: Most new tokens of an example in one program.
        max_source: Tokens that the source of each may have.

    Raises:
        InputError: The model keeps nothing, or the sizes do not fit.
    """
    layout = placement.layout
    sizes = {"slots": slots, "max_seq": max_seq, "page_size": page_size, "chunk": chunk}
    for name, value in sizes.items():
        whole_number(name, value)
    check_source(placement.model, layout, max_source)
    if slots % layout.batch_shards:
        raise InputError(
            f"slots={slots} examples do not divide over the {layout.batch_shards} "
            f"devices that share the batch of layout {str(layout)!r}; give a multiple",
            key="generation.indivisible_slots",
        )
    groups = cached_arrays(placement, max_seq, max_source)
    if not any(groups):
        raise InputError(
            "no block of the model attends through meshpar's attention, so there is "
            "nothing to keep of earlier tokens; call "
            "meshpar.models.layers.attention.attend in its blocks",
            key="generation.no_attention",
        )
    if pipeline is None:
        places = [group.num_layers for group in placement.model.groups]
    else:
        places = [table.size for table in pipeline.arrangement.layers]
    plan = CachePlan(
        groups=groups,
        places=tuple(places),
        slots=slots,
        max_seq=max_seq,
        page_size=page_size,
        num_pages=0,
        chunk=min(chunk, max_seq),
        layout=layout,
        rules=placement.rules,
        max_source=max_source,
    )
    enough = plan.table_pages * slots // layout.batch_shards
    pages = enough if num_pages is None else whole_number("num_pages", num_pages)
    return replace(plan, num_pages=pages)


def check_source(model: Model, layout: Layout, max_source: int) -> None:
    """Refuses sizes and layouts that a model with an encoder has not.

    Raises:
        InputError: There is room for sources that no block reads, or none for those
            that are read; or a mesh axis splits layers or sequences of both.
    """
    whole_number("max_source", max_source, least=0)
    if reads_source(model) != bool(max_source):
        which = "reads" if reads_source(model) else "has no encoder to read"
        raise InputError(
            f"max_source={max_source}, but the model {which} a source; give "
            f"{'the tokens of the longest' if reads_source(model) else '0'}",
            key="generation.max_source_mismatch",
        )
    for axis in ("stage", "context") if max_source else ():
        size = layout.mesh_shape[axis]
        if size > 1:
            raise InputError(
                f"{axis}={size}: a model with an encoder and a decoder generates with "
                f"both whole along layers and sequences; set {axis}=1",
                key="generation.split_encoder_decoder",
            )


def cached_arrays(
    placement: Placement, max_seq: int, max_source: int
) -> tuple[tuple[CachedArray, ...], ...]:
    """What one layer of each group keeps, found by tracing its block on no device.

    Args:
        placement: The model, under the rules that split heads.
        max_seq: Tokens that a sequence may have.
        max_source: Tokens that a source may have.

    Raises:
        InputError: A function cannot run token by token, or for so many.
    """
    model, sizes = placement.model, placement.layout.mesh_shape
    shards = math.prod(sizes[axis] for axis in placement.rules.mesh_axes("heads"))
    dtype = jnp.dtype(placement.compute_dtype)
    names = "tokens" if not reads_source(model) else "source_tokens and target_tokens"
    with tracing("the model cannot generate", f"its batch has {names} alone"):
        return _traced(model, shards, max_seq, dtype, max_source)


@functools.lru_cache(maxsize=32)
def _traced(
    model: Model, head_shards: int, max_seq: int, dtype: Any, max_source: int
) -> tuple[tuple[CachedArray, ...], ...]:
    found: list[tuple[CachedArray, ...]] = []

    first = decoder_at(model)

    def forward(params: tuple, state: tuple, tokens: jax.Array) -> Any:
        (ends, layers), (of_ends, states) = params, state
        positions, counts = jnp.zeros(tokens.shape, jnp.int32), tokens[:, 0]
        batch = batch_of_tokens(model, tokens, positions)

        def scope_of(at: int, **known: Any) -> tuple[Scope, DeclaredCache]:
            """Inside group `at`; an encoder's blocks have no cache."""
            cache = DeclaredCache(max_seq, positions, head_shards)
            if at < first:
                read = jnp.zeros((len(tokens), max_source), jnp.int32)
                source = batch_of_source(Source(read, counts, counts))
                return Scope(batch=source, **known), cache
            return Scope(batch=batch, cache=cache, **known), cache

        outside, _ = scope_of(0, state=of_ends)
        x = model.embed(ends, Batch(outside.batch), outside)
        groups = zip(model.groups, layers, states, strict=True)
        for at, (group, layer, of_layer) in enumerate(groups):
            if group.enter is not None:
                x = group.enter(ends, x, scope_of(at, state=of_ends)[0])
            scope, cache = scope_of(at, state=of_layer, layer=0)
            x, _ = group.run(layer, x, scope)
            found.append(tuple(cache.arrays))
        return x

    params, state = one_layer_shapes(model), one_layer_state(model)
    in_use = jax.tree.map(lambda one: _in_dtype(one, dtype), params)
    jax.eval_shape(forward, in_use, state, jax.ShapeDtypeStruct((2, 1), jnp.int32))
    return tuple(found)


def _in_dtype(struct: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    if not jnp.issubdtype(struct.dtype, jnp.floating):
        return struct
    return jax.ShapeDtypeStruct(struct.shape, dtype)
