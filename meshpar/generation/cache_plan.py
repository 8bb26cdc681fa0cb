"""The cache of a model under a layout: its inputs, arrays, pools and their bytes.

A model of one stream goes on with `tokens`. One whose decoder reads an encoder's output
writes `target_tokens` about `source_tokens`, of which `source_mask` says which are
there (Sutskever et al. 2014; Raffel et al. 2020).
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError, whole_number
from meshpar.generation.paged_cache import Pools, Source
from meshpar.layout import BATCH_AXES, Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import Batch
from meshpar.model.scope import Scope
from meshpar.model.token_cache import CachedArray, DeclaredCache
from meshpar.model.tracing import one_layer_shapes, one_layer_state, tracing
from meshpar.parallel.pipeline.stages import Pipeline
from meshpar.parallel.placement import Placement
from meshpar.rules.rules import Rules
from meshpar.train.memory_report import local_bytes

TOKENS, TARGET = "tokens", "target_tokens"
SOURCE, SEEN = "source_tokens", "source_mask"

DECODER_START = 0
"""The token that a decoder begins with, T5's: its padding."""


def decoder_at(model: Model) -> int:
    """Return the index of the first group of a decoder; 0 without an encoder.

    Raises:
        InputError: Streams meet in another way than a decoder reads an encoder.
    """
    found = [at for at, group in enumerate(model.groups) if group.enter is not None]
    if not found:
        return 0
    known = model.known_inputs
    if len(found) > 1 or not {SOURCE, TARGET} <= known.keys():
        name = model.groups[found[-1]].name
        raise InputError(
            f"block group {name!r} makes its stream from another's; generation knows "
            f"one group that does, with inputs {SOURCE!r} and {TARGET!r}, but the "
            f"model's are {', '.join(map(repr, known))}",
            key="generation.unsupported_streams",
        )
    return found[0]


def reads_source(model: Model) -> bool:
    """Return True if a request has a source besides its own tokens."""
    return decoder_at(model) > 0


def tokens_below(model: Model, *, of_source: bool = False) -> int | None:
    """Return the size of the vocabulary; None if the model does not say."""
    name = SOURCE if of_source else TARGET if reads_source(model) else TOKENS
    known = model.known_inputs.get(name)
    return None if known is None else known.below


def token_batch(model: Model, tokens: jax.Array, positions: jax.Array) -> Batch:
    """Return the batch that the functions of new tokens see."""
    name = TARGET if reads_source(model) else TOKENS
    return Batch({name: tokens, "positions": positions})


def source_batch(source: Source) -> Batch:
    """Return the batch that the encoder's functions see."""
    return Batch({SOURCE: source.tokens, SEEN: source.positions >= 0})


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
        prefill_tokens: Most tokens of one prefill for each shard of the batch, all
            examples together.
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
    prefill_tokens: int
    layout: Layout
    rules: Rules
    max_source: int = 0

    @property
    def table_pages(self) -> int:
        """Most pages of one example on a device."""
        return -(-self.max_seq // self.tokens_per_page)

    @property
    def tokens_per_page(self) -> int:
        """Tokens of an example in a page of each of its devices."""
        return self.page_size * self.layout.context

    @property
    def rings(self) -> tuple[dict[str, int], ...]:
        """For each group, pages of an example by name, of arrays without a table."""
        return tuple(
            {one.name: self._ring(one) for one in group if self._is_ring(one)}
            for group in self.groups
        )

    def shapes(self, mesh: Mesh | AbstractMesh) -> list[Pools]:
        """Return shape, dtype and sharding of every pool."""
        return [
            {one.name: self._pool(one, places, mesh) for one in group}
            for group, places in zip(self.groups, self.places, strict=True)
        ]

    def bytes_per_device(self) -> int:
        """Return the bytes of all pools on a device.

        layers of a stage x pages x tokens of a page x heads of a device x size x bytes,
        of keys and of values.
        """
        shapes = self.shapes(absent_mesh(self.layout))
        return local_bytes(shapes, jax.tree.map(lambda one: one.sharding, shapes))

    def _pool(
        self, one: CachedArray, places: int, mesh: Mesh | AbstractMesh
    ) -> jax.ShapeDtypeStruct:
        pages = self.num_pages
        if self._is_ring(one):
            pages = self._ring(one) * (self.slots // self.layout.batch_shards)
        pages *= math.prod(self.layout.mesh_shape[axis] for axis in PAGE_AXES)
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

    def _is_ring(self, one: CachedArray) -> bool:
        if one.of_source:
            return True
        return one.window is not None and self._ring(one) < self.table_pages

    def _ring(self, one: CachedArray) -> int:
        """Return the pages of an example: its source's; or a window's and new ones."""
        if one.of_source:
            return -(-self.max_source // self.page_size)
        tokens = (one.window or 0) + self.chunk
        return -(-tokens // self.tokens_per_page) + 1


CHUNK, CHUNK_BESIDE_WINDOWS = 512, 128
"""Default `chunk`, and where a layer with a sliding window keeps that many tokens."""


def plan_cache(
    placement: Placement,
    pipeline: Pipeline | None,
    slots: int,
    max_seq: int,
    page_size: int,
    num_pages: int | None,
    chunk: int | None,
    max_source: int = 0,
) -> CachePlan:
    """Return the pools of a model on its mesh.

    Args:
        placement: The model, arranged for its stages.
        pipeline: The stages, if there are any.
        slots: Examples that may run at once, over all devices.
        max_seq: Tokens that each may have.
        page_size: Tokens of a page.
        num_pages: Pages of a device; enough for all slots when absent.
        chunk: Most prompt tokens of one program for each shard of the batch; `CHUNK`
            when absent, `CHUNK_BESIDE_WINDOWS` if a layer has a window.
        max_source: Tokens that the source of each may have.

    Raises:
        InputError: The model keeps nothing, or the sizes do not fit.
    """
    layout = placement.layout
    sizes = {"slots": slots, "max_seq": max_seq, "page_size": page_size, "chunk": chunk}
    for name, value in sizes.items():
        if value is not None:
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
    if chunk is None:
        windows = [one.window for group in groups for one in group if one.window]
        chunk = CHUNK_BESIDE_WINDOWS if windows else CHUNK
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
        prefill_tokens=chunk,
        layout=layout,
        rules=placement.rules,
        max_source=max_source,
    )
    enough = plan.table_pages * slots // layout.batch_shards
    pages = enough if num_pages is None else whole_number("num_pages", num_pages)
    return replace(plan, num_pages=pages)


def check_source(model: Model, layout: Layout, max_source: int) -> None:
    """Refuse room for sources that no block reads, or none for those that are read.

    And a layout that splits layers or sequences of a model with an encoder.
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
    """Return what one layer of each group keeps, by tracing its block on no device.

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
        batch = token_batch(model, tokens, positions)

        def make_scope(at: int, **known: Any) -> tuple[Scope, DeclaredCache]:
            """Return the scope in group `at`; an encoder's blocks have no cache."""
            cache = DeclaredCache(max_seq, positions, head_shards)
            if at < first:
                read = jnp.zeros((len(tokens), max_source), jnp.int32)
                source = source_batch(Source(read, counts, counts))
                return Scope(batch=source, **known), cache
            return Scope(batch=batch, cache=cache, **known), cache

        outside, _ = make_scope(0, state=of_ends)
        x = model.embed(ends, Batch(outside.batch), outside)
        groups = zip(model.groups, layers, states, strict=True)
        for at, (group, layer, of_layer) in enumerate(groups):
            if group.enter is not None:
                x = group.enter(ends, x, make_scope(at, state=of_ends)[0])
            scope, cache = make_scope(at, state=of_layer, layer=0)
            x, _ = group.run(layer, x, scope)
            found.append(tuple(cache.arrays))
        return x

    params, state = one_layer_shapes(model), one_layer_state(model)
    in_use = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(
            one.shape, dtype if jnp.issubdtype(one.dtype, jnp.floating) else one.dtype
        ),
        params,
    )
    jax.eval_shape(forward, in_use, state, jax.ShapeDtypeStruct((2, 1), jnp.int32))
    return tuple(found)


_PAGE_NUMBER_BYTES = 4


def check_memory(plan: CachePlan, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a cache that is larger than all memory of a device.

    A smaller one may not fit either, beside what else is there: JAX says so.

    Args:
        plan: Sizes of the cache.
        mesh: The devices; of an abstract mesh nothing is known.

    Raises:
        InputError: It is larger; names both, in bytes.
    """
    here = [] if isinstance(mesh, AbstractMesh) else mesh.local_devices
    if not here:
        return
    table_bytes = plan.slots * plan.table_pages * _PAGE_NUMBER_BYTES
    needed, there = plan.bytes_per_device() + table_bytes, _memory_bytes(here[0])
    if needed > there:
        raise InputError(
            f"{plan.slots} examples at once of up to {plan.max_seq} tokens need a "
            f"cache of {needed:,} bytes on a device that has {there:,}; give fewer "
            "tokens, or fewer slots",
            key="generation.cache_too_large",
        )


def _memory_bytes(device: jax.Device) -> int:
    """Return a device's memory in bytes; of a virtual CPU device its host's share."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_bytes // len(device.client.local_devices())
