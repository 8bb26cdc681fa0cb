"""New tokens through a model that keeps a cache of the earlier ones, per device.

One `jax.shard_map`, manual over the batch axes, `stage` and `context`, as a training
step's; GSPMD partitions over the other mesh axes. Over the batch axes move parameters
that are stored split; over `context` the softmaxes of `paged_cache`; over `stage` the
stream of each microbatch, once a tick, and the last stage's output to all.

Programs have no loop over layers, and parameters one array a layer: a matmul reads
weights where they lie, but from a stack it reads a copy of one layer's, which a step
that multiplies each weight once cannot afford.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked, summed
from meshpar.generation.cache_plan import (
    PAGE_AXES,
    CachePlan,
    decoder_at,
    reads_source,
    source_batch,
    token_batch,
)
from meshpar.generation.paged_cache import PagedCache, Pools, Rows, Source
from meshpar.model.contract import Model, Stream
from meshpar.model.inputs import Batch
from meshpar.model.parameter import Parameter, Params
from meshpar.model.scope import Scope
from meshpar.parallel.blocks import Block, ScopeArrays, Stack, one_layer, where
from meshpar.parallel.pipeline.crossing import STAGE, write, zero_arrays
from meshpar.parallel.pipeline.rank_layers import layers_here
from meshpar.parallel.pipeline.stages import Arrangement, cut, merge, part
from meshpar.parallel.placement import BATCH, Placement, Scopes
from meshpar.parallel.zero import before_loop, gather


def layer_by_layer(model: Model, params: Params, num_ranks: int) -> Params:
    """Cut the groups' stacked parameters into an array for each place of a rank.

    Args:
        model: The model.
        params: Arrays (ranks x places, ...), or their shapes' arrays.
        num_ranks: Ranks of the pipeline; 1 without stages.

    Returns:
        The same tree, each array of a group a tuple of arrays (ranks, ...).
    """
    ends, groups = model.split(params)
    return model.join(ends, jax.tree.map(lambda x: split_layers(x, num_ranks), groups))


def split_layers(stack: jax.Array, num_ranks: int) -> tuple[jax.Array, ...]:
    """Cut (ranks x places, ...) into an array (ranks, ...) for each place."""
    of_ranks = stack.reshape(num_ranks, -1, *stack.shape[1:])
    return tuple(of_ranks[:, place] for place in range(of_ranks.shape[1]))


def layer_specs(model: Model, specs: Any, num_ranks: int) -> Any:
    """Return the specs of `layer_by_layer`, from those of the stacked parameters."""

    def layer_spec(
        spec: PartitionSpec, parameter: Parameter
    ) -> tuple[PartitionSpec, ...]:
        stage = spec[0] if num_ranks > 1 and len(spec) else None
        one = PartitionSpec(stage, *spec[1:])
        return (one,) * (len(parameter.places) // num_ranks)

    (ends, groups), (_, declared) = model.split(specs), model.split(model.parameters)
    return model.join(ends, jax.tree.map(layer_spec, groups, declared))


def unstack(model: Model, params: Params, shardings: Any, num_ranks: int) -> Params:
    """Return `layer_by_layer`, deleting each stack: two are never whole at once.

    `shardings` has one for each layer's array.
    """

    def split(
        stack: jax.Array, own: tuple[NamedSharding, ...]
    ) -> tuple[jax.Array, ...]:
        program = jax.jit(lambda x: split_layers(x, num_ranks), out_shardings=own)
        layers = jax.block_until_ready(program(stack))
        stack.delete()
        return layers

    (ends, groups), (_, of_layers) = model.split(params), model.split(shardings)
    return model.join(ends, jax.tree.map(split, groups, of_layers))


def layer_at(tree: Any, place: int) -> Any:
    """Return this rank's layer at a place, inside `jax.shard_map`."""
    return jax.tree.map(
        lambda arrays: arrays[place][0], tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def layer_stacks(
    placement: Placement,
    arrangement: Arrangement | None,
    groups: Sequence[Params],
    states: Sequence[Params],
    scopes: Scopes,
) -> list[Stack]:
    """Return a stack of this device's layers for each group, in `jax.shard_map`.

    Args:
        placement: The model on its mesh.
        arrangement: The layers of every rank; None without stages.
        groups: This device's parameters of each group; stacked, or `layer_by_layer`.
        states: The model's own state of each group.
        scopes: Makes the scopes of its functions.
    """
    model = placement.model
    _, stored = model.split(placement.stored)
    blocks = [
        Block(group, stored=one_layer(stored[at]), remat="none", make_scope=scopes)
        for at, group in enumerate(model.groups)
    ]
    if arrangement is None:
        layers = [
            first + jnp.arange(group.num_layers, dtype=jnp.int32)
            for group, first in zip(model.groups, model.first_layers, strict=True)
        ]
    else:
        layers = [
            layers_here(arrangement, at, jnp.int32(0), first=first)
            for at, first in enumerate(model.first_layers)
        ]
    return [
        Stack(block=block, shards=shards, state=state, layers=of_stack)
        for block, shards, state, of_stack in zip(
            blocks, groups, states, layers, strict=True
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A model's function of new tokens, to be called inside `jax.jit`.

    Args:
        placement: The model on its mesh, arranged for its stages.
        plan: Its cache.
        arrangement: The layers of every rank; None without stages.
        unrolled: True for no loop over layers (`layer_by_layer`).
    """

    placement: Placement
    plan: CachePlan
    arrangement: Arrangement | None = None
    unrolled: bool = True

    def __call__(
        self,
        params: Params,
        state: Params,
        pools: list[Pools],
        tokens: jax.Array,
        rows: Rows,
    ) -> tuple[jax.Array, list[Pools]]:
        """Return the logits after each example's last new token, and the new pools.

        Args:
            params: Parameters at rest; if unrolled, from `layer_by_layer`.
            state: The model's own state.
            pools: The cache of each group.
            tokens: (batch, new tokens) int32, split over the batch axes.
            rows: Where the tokens belong, split alike.

        Returns:
            fp32 (batch, vocab), and the pools.
        """
        placement = self.placement
        axes = placement.manual_axes
        pages = tuple(axis for axis in PAGE_AXES if axis in axes)
        pool_spec = PartitionSpec(STAGE if STAGE in axes else None, pages)
        pool_specs = [
            {one.name: pool_spec for one in group} for group in self.plan.groups
        ]

        def local(
            params: Params, state: Params, pools: list[Pools], *of: Any
        ) -> tuple[jax.Array, list[Pools]]:
            pass_ = _Pass.from_shards(self, params, state, *of)
            x, pools = pass_.run(pools)
            return pass_.logits(pass_.last_token(x))[:, 0], pools

        specs = placement.manual_specs
        if self.unrolled:
            specs = layer_specs(placement.model, specs, placement.layout.stage)
        given = specs, placement.manual_model_state_specs
        run = placement.on_shards(
            local, (*given, pool_specs, BATCH, BATCH), (BATCH, pool_specs)
        )
        return run(params, state, pools, tokens, rows)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """This device's part of one pass."""

    forward: Forward
    weights: Params
    groups: list[Params]
    states: tuple[Params, list[Params]]
    tokens: jax.Array
    rows: Rows

    @classmethod
    def from_shards(
        cls,
        forward: Forward,
        params: Params,
        state: Params,
        tokens: jax.Array,
        rows: Rows,
    ) -> _Pass:
        placement = forward.placement
        ends, groups = placement.model.split(params)
        stored, _ = placement.model.split(placement.stored)
        return cls(
            forward=forward,
            weights=gather(stored, ends, before_loop),
            groups=groups,
            states=placement.model.split(state),
            tokens=tokens,
            rows=rows,
        )

    def run(self, pools: list[Pools]) -> tuple[Stream, list[Pools]]:
        """Return the last block's output, and the new pools."""
        if self.forward.arrangement is not None:
            return self._ticks(pools)
        x = self._embedded(self.tokens, self.rows)
        return self._through(x, pools, self.tokens, self.rows)

    def last_token(self, x: Stream) -> Stream:
        """Return each example's last new token alone: (batch, 1, ...)."""
        model, num_tokens = self.forward.placement.model, self.tokens.shape[1]

        def last(one: jax.Array) -> jax.Array:
            # A decoder's stream has what it reads too, which no logits are made of.
            if reads_source(model) and one.shape[1] != num_tokens:
                return one
            at = jnp.maximum(self.rows.counts - 1, 0)
            at = at.reshape(-1, 1, *(1,) * (one.ndim - 2))
            return jnp.take_along_axis(one, at, axis=1)

        return jax.tree.map(last, x)

    def logits(self, x: Stream) -> jax.Array:
        model = self.forward.placement.model
        logits = cast(Callable[..., Any], model.logits)
        return logits(self.weights, x, self._scope(self.tokens, self.rows))

    def _ticks(self, pools: list[Pools]) -> tuple[Stream, list[Pools]]:
        """Run microbatches through the ranks, one tick behind one another.

        As many as the layout asks for and this device's examples divide into. A rank
        computes on zeros while it has none, and writes nothing to the cache.
        """
        placement = self.forward.placement
        most = min(placement.layout.microbatches, len(self.tokens))
        num = next(n for n in range(most, 0, -1) if len(self.tokens) % n == 0)
        rank, num_ranks = lax.axis_index(STAGE), placement.layout.stage
        pairs = [(source, source + 1) for source in range(num_ranks - 1)]
        tokens, rows = cut((self.tokens, self.rows), num)
        stream = jax.eval_shape(self._embedded, *part((tokens, rows), 0))
        outputs = jax.tree.map(
            lambda one: jnp.zeros((num, *one.shape), one.dtype), stream
        )

        def tick(at: jax.Array, carry: tuple) -> tuple:
            x, outputs, pools = carry
            microbatch = at - rank
            is_active = (microbatch >= 0) & (microbatch < num)
            mine, of_rows = part((tokens, rows), jnp.clip(microbatch, 0, num - 1))
            of_rows = of_rows._replace(counts=jnp.where(is_active, of_rows.counts, 0))
            x = where(rank == 0, self._embedded(mine, of_rows), x)
            x, pools = self._through(x, pools, mine, of_rows)
            ends_here = is_active & (rank == num_ranks - 1)
            outputs = write(outputs, jnp.where(ends_here, microbatch, -1), x)
            with asked("stage_forward"):
                x = jax.tree.map(lambda one: lax.ppermute(one, STAGE, pairs), x)
            return x, outputs, pools

        ticks, first = num + num_ranks - 1, zero_arrays(stream)
        _, outputs, pools = lax.fori_loop(0, ticks, tick, (first, outputs, pools))
        with asked("last_stage"):  # The other ranks have zeros.
            return summed(merge(outputs), STAGE, placement.platform), pools

    def _embedded(self, tokens: jax.Array, rows: Rows) -> Stream:
        """Return the first group's stream."""
        scope = self._scope(tokens, rows)
        if rows.source is not None:
            scope = self._make_scope(source_batch(rows.source), self.states[0])
        return self.forward.placement.model.embed(self.weights, scope.batch, scope)

    def _through(
        self, x: Stream, pools: list[Pools], tokens: jax.Array, rows: Rows
    ) -> tuple[Stream, list[Pools]]:
        """Return `x` after this device's blocks, and the new pools."""
        model = self.forward.placement.model
        stacks = layer_stacks(
            self.forward.placement,
            self.forward.arrangement,
            self.groups,
            self.states[1],
            self._scopes,
        )
        batch, kept, first = self._batch(tokens, rows), [], decoder_at(model)
        for at, (group, stack) in enumerate(zip(model.groups, stacks, strict=True)):
            if group.enter is not None:
                x = group.enter(self.weights, x, self._scope(tokens, rows))
            if at < first:
                x, of_group = self._encoded(stack, x, rows), pools[at]
            else:
                x, of_group = self._through_group(at, stack, x, pools[at], batch, rows)
            kept.append(of_group)
        return x, kept

    def _encoded(self, stack: Stack, x: Stream, rows: Rows) -> Stream:
        """Return `x` after an encoder's blocks, which have no cache."""
        source = cast(Source, rows.source)
        if not source.tokens.shape[1]:
            return x
        batch = source_batch(source)

        def body(x: Stream, xs: tuple) -> tuple[Stream, None]:
            shard, state, layer = xs
            scope = self._make_scope(batch, state, layer)
            weights = stack.block.gather(shard)
            return stack.block.group.run(weights, x, scope)[0], None

        return self._over_layers(stack, body, x)

    def _through_group(
        self,
        at: int,
        stack: Stack,
        x: Stream,
        pools: Pools,
        batch: Batch,
        rows: Rows,
    ) -> tuple[Stream, Pools]:
        def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            x, pools = carry
            (shard, state, layer), place = xs
            here = rows._replace(counts=jnp.where(layer >= 0, rows.counts, 0))
            cache = self._cache(at, pools, place, here, batch)
            scope = self._make_scope(batch, state, layer, cache)
            weights = stack.block.gather(shard)
            y, _ = stack.block.group.run(weights, x, scope)
            return (where(layer >= 0, y, x), cache.pools), None

        places = jnp.arange(len(stack.layers), dtype=jnp.int32)
        return self._over_layers(stack, body, (x, pools), places)

    def _over_layers(self, stack: Stack, body: Any, carry: Any, *more: Any) -> Any:
        """Carry `carry` through all layers of a stack, in a loop or unrolled.

        Args:
            stack: The layers.
            body: As of `lax.scan`, on a layer's parameters, state and number.
            carry: The first carry.
            more: Arrays with a row for each layer, given to `body` too.
        """
        if not self.forward.unrolled:
            xs = (stack.xs, *more) if more else stack.xs
            return lax.scan(body, carry, xs)[0]
        for place in range(len(stack.layers)):
            state, layer = part((stack.state, stack.layers), place)
            xs = layer_at(stack.shards, place), state, layer
            carry, _ = body(carry, (xs, *part(more, place)) if more else xs)
        return carry

    def _cache(
        self, at: int, pools: Pools, place: jax.Array, rows: Rows, batch: Batch
    ) -> PagedCache:
        plan = self.forward.plan
        return PagedCache(
            pools=dict(pools),
            place=place,
            rows=rows,
            positions=rows.positions(batch["positions"].shape[1]),
            max_seq=plan.max_seq,
            page_size=plan.page_size,
            rings=plan.rings[at],
            num_ranks=plan.layout.context,
        )

    def _scope(self, tokens: jax.Array, rows: Rows) -> Scope:
        """Return the scope outside the blocks."""
        batch = self._batch(tokens, rows)
        cache = self._cache(0, {}, jnp.int32(0), rows, batch)
        return self._make_scope(batch, self.states[0], cache=cache)

    def _make_scope(
        self,
        batch: Batch,
        state: Params,
        layer: jax.Array | int = -1,
        cache: PagedCache | None = None,
    ) -> Scope:
        """Return the scope of a function of a batch, outside the blocks or inside."""
        arrays = ScopeArrays(batch=batch, state=state, layer=layer, cache=cache)
        return self._scopes(arrays)

    def _batch(self, tokens: jax.Array, rows: Rows) -> Batch:
        positions = jnp.maximum(rows.positions(tokens.shape[1]), 0)
        return token_batch(self.forward.placement.model, tokens, positions)

    @cached_property
    def _scopes(self) -> Scopes:
        return self.forward.placement.scopes(training=False)
