"""New tokens through a model that keeps what came before, per device.

One `jax.shard_map`, manual over the batch axes, `stage` and `context`, as a training
step's; GSPMD partitions over the other mesh axes. Over the batch axes move parameters
that are stored split; over `context` what `parallel.paged_attention` says; over `stage`
the stream of each microbatch, once a tick, and the last stage's output to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, summed
from meshpar.generation.cache_plan import PAGE_AXES, CachePlan
from meshpar.generation.layer_by_layer import layer_specs, of_place
from meshpar.generation.stacks import stacks_of
from meshpar.generation.texts import (
    batch_of_source,
    batch_of_tokens,
    decoder_at,
    reads_source,
)
from meshpar.model.contract import Stream
from meshpar.model.inputs import Batch
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.parallel.blocks import Stack, where
from meshpar.parallel.paged_cache import PagedCache, Pools, Rows, Source
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.stages import Arrangement, cut, merge, part
from meshpar.parallel.placement import BATCH, Placement, Scopes
from meshpar.parallel.zero import before_loop, gather


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A model's function of new tokens, to be called inside `jax.jit`.

    Args:
        placement: The model on its mesh, arranged for its stages.
        plan: What is kept of its tokens.
        arrangement: Which layers every rank has; None without stages.
        unrolled: Whether there is no loop over layers (`layer_by_layer`).
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
        """Logits after the last new token of each example, and what is kept now.

        Args:
            params: At rest; if unrolled, from `layer_by_layer`.
            state: The model's own.
            pools: What is kept of each group.
            tokens: (batch, new tokens) int32, split over the batch axes.
            rows: Where they belong, alike.

        Returns:
            fp32 (batch, vocab), and the pools.
        """
        placement, pool_specs = self.placement, self._pool_specs

        def local(
            params: Params, state: Params, pools: list[Pools], *of: Any
        ) -> tuple[jax.Array, list[Pools]]:
            pass_ = _Pass.of(self, params, state, *of)
            x, pools = pass_.run(pools)
            return pass_.logits(pass_.last_of(x))[:, 0], pools

        specs = placement.manual_specs
        if self.unrolled:
            specs = layer_specs(placement.model, specs, placement.layout.stage)
        given = specs, placement.manual_model_state_specs
        run = placement.on_shards(
            local, (*given, pool_specs, BATCH, BATCH), (BATCH, pool_specs)
        )
        return run(params, state, pools, tokens, rows)

    @property
    def _pool_specs(self) -> list[dict[str, PartitionSpec]]:
        axes = self.placement.manual_axes
        stage = STAGE if STAGE in axes else None
        pages = tuple(axis for axis in PAGE_AXES if axis in axes)
        spec = PartitionSpec(stage, pages)
        return [{one.name: spec for one in group} for group in self.plan.groups]


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
    def of(
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
        """The last block's output, and what is kept."""
        if self.forward.arrangement is not None:
            return self._ticks(pools)
        x = self._embedded(self.tokens, self.rows)
        return self._through(x, pools, self.tokens, self.rows)

    def last_of(self, x: Stream) -> Stream:
        """Each example's last new token alone."""
        model, num_tokens = self.forward.placement.model, self.tokens.shape[1]

        def last(one: jax.Array) -> jax.Array:
            # A decoder's stream has what it reads too, which no logits are made of.
            if reads_source(model) and one.shape[1] != num_tokens:
                return one
            return _last(one, self.rows.counts)

        return jax.tree.map(last, x)

    def logits(self, x: Stream) -> jax.Array:
        model = self.forward.placement.model
        logits = cast(Callable[..., Any], model.logits)
        return logits(self.weights, x, self._scope(self.tokens, self.rows))

    def _ticks(self, pools: list[Pools]) -> tuple[Stream, list[Pools]]:
        """Microbatches through the ranks, one tick behind one another."""
        layout = self.forward.placement.layout
        num, num_ranks = self._num_microbatches, layout.stage
        rank = lax.axis_index(STAGE)
        tokens, rows = cut((self.tokens, self.rows), num)
        first = jax.eval_shape(self._embedded, *part((tokens, rows), 0))
        x = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), first)
        found = jax.tree.map(lambda one: jnp.zeros((num, *one.shape), one.dtype), first)

        def tick(at: jax.Array, carry: tuple) -> tuple:
            x, found, pools = carry
            own = at - rank
            here = (own >= 0) & (own < num)
            mine, of_rows = part((tokens, rows), jnp.clip(own, 0, num - 1))
            of_rows = of_rows._replace(counts=jnp.where(here, of_rows.counts, 0))
            x = where(rank == 0, self._embedded(mine, of_rows), x)
            x, pools = self._through(x, pools, mine, of_rows)
            last = here & (rank == num_ranks - 1)
            found = _put(found, x, jnp.clip(own, 0, num - 1), last)
            return self._sent(x), found, pools

        ticks = num + num_ranks - 1
        _, found, pools = lax.fori_loop(0, ticks, tick, (x, found, pools))
        return self._to_all(merge(found)), pools

    @property
    def _num_microbatches(self) -> int:
        """As many as the layout asks for, and the examples here divide into."""
        wanted, here = self.forward.placement.layout.microbatches, len(self.tokens)
        return next(num for num in range(min(wanted, here), 0, -1) if here % num == 0)

    def _sent(self, x: Stream) -> Stream:
        size = self.forward.placement.layout.stage
        pairs = [(rank, rank + 1) for rank in range(size - 1)]
        with asked("stage_forward"):
            return jax.tree.map(lambda one: lax.ppermute(one, STAGE, pairs), x)

    def _to_all(self, found: Stream) -> Stream:
        """The last rank's, on every rank: the others have zeros."""
        with asked("last_stage"):
            return summed(found, STAGE, self.forward.placement.platform)

    def _embedded(self, tokens: jax.Array, rows: Rows) -> Stream:
        """The first group's stream."""
        scope = self._scope(tokens, rows)
        if rows.source is not None:
            scope = self._scope_of(batch_of_source(rows.source), self.states[0])
        return self.forward.placement.model.embed(self.weights, scope.batch, scope)

    def _through(
        self, x: Stream, pools: list[Pools], tokens: jax.Array, rows: Rows
    ) -> tuple[Stream, list[Pools]]:
        """`x` after this device's blocks, and what they keep."""
        model = self.forward.placement.model
        batch, kept, first = self._batch(tokens, rows), [], decoder_at(model)
        for at, (group, stack) in enumerate(
            zip(model.groups, self._stacks, strict=True)
        ):
            if group.enter is not None:
                x = group.enter(self.weights, x, self._scope(tokens, rows))
            if at < first:
                x, of_group = self._encoded(stack, x, rows), pools[at]
            else:
                x, of_group = self._through_group(at, stack, x, pools[at], batch, rows)
            kept.append(of_group)
        return x, kept

    def _encoded(self, stack: Stack, x: Stream, rows: Rows) -> Stream:
        """`x` after an encoder's blocks, none of which keeps anything."""
        source = cast(Source, rows.source)
        if not source.tokens.shape[1]:
            return x
        batch = batch_of_source(source)

        def body(x: Stream, xs: tuple) -> tuple[Stream, None]:
            shard, state, layer = xs
            scope = self._scope_of(batch, state, layer)
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
            scope = self._scope_of(batch, state, layer, cache)
            weights = stack.block.gather(shard)
            y, _ = stack.block.group.run(weights, x, scope)
            return (where(layer >= 0, y, x), cache.pools), None

        places = jnp.arange(len(stack.layers), dtype=jnp.int32)
        return self._over_layers(stack, body, (x, pools), places)

    def _over_layers(self, stack: Stack, body: Any, carry: Any, *beside: Any) -> Any:
        """What `body` carries through all layers of a stack.

        Args:
            stack: The layers.
            body: As of `lax.scan`, of a layer's parameters, state and number.
            carry: What it begins with.
            beside: Arrays with a row for each layer, given to `body` too.
        """
        if not self.forward.unrolled:
            xs = (stack.xs, *beside) if beside else stack.xs
            return lax.scan(body, carry, xs)[0]
        for place in range(len(stack.layers)):
            state, layer = part((stack.state, stack.layers), place)
            xs = of_place(stack.shards, place), state, layer
            carry, _ = body(carry, (xs, *part(beside, place)) if beside else xs)
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
        """The scope outside the blocks."""
        batch = self._batch(tokens, rows)
        cache = self._cache(0, {}, jnp.int32(0), rows, batch)
        return self._scope_of(batch, self.states[0], cache=cache)

    def _scope_of(
        self,
        batch: Batch,
        state: Params,
        layer: jax.Array | int = -1,
        cache: PagedCache | None = None,
    ) -> Scope:
        """The scope of a function that is given a batch, outside the blocks or in."""
        known = {"batch": batch, "state": state, "layer": layer, "cache": cache}
        return self._scopes({**known, "examples": None, "random": None})

    def _batch(self, tokens: jax.Array, rows: Rows) -> Batch:
        positions = jnp.maximum(rows.positions(tokens.shape[1]), 0)
        return batch_of_tokens(self.forward.placement.model, tokens, positions)

    @cached_property
    def _scopes(self) -> Scopes:
        return self.forward.placement.scopes(training=False)

    @cached_property
    def _stacks(self) -> list[Stack]:
        """The layers of each group that this device has."""
        placement, arrangement = self.forward.placement, self.forward.arrangement
        return stacks_of(
            placement, arrangement, self.groups, self.states[1], self._scopes
        )


def _last(x: jax.Array, counts: jax.Array) -> jax.Array:
    """(batch, tokens, ...) -> (batch, 1, ...), each example's last new token."""
    at = jnp.maximum(counts - 1, 0).reshape(-1, 1, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, at, axis=1)


def _put(buffer: Stream, x: Stream, at: jax.Array, here: jax.Array) -> Stream:
    """The buffer with `x` in one of its places, if it is to be there."""
    return jax.tree.map(
        lambda all_of, one: all_of.at[jnp.where(here, at, len(all_of))].set(
            one, mode="drop"
        ),
        buffer,
        x,
    )
