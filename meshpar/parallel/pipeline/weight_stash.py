"""Weights that every stage updates by itself after each microbatch (PipeDream).

A step is a run of PipeDream over its microbatches: each is a minibatch with a mean loss
and an update of its own. The pipeline fills at the start of a step and drains at its
end, so that a state holds nothing in flight. Ranks diverge (`Executor`): in lock step a
microbatch would meet weights that lack twice as many updates.

Blocks belong to the stage that runs them. All ranks compute the ends together; what the
embedding reads is of the first stage and is as late as that, what the head reads is of
the last and never late. Their gradients are summed over `stage`, and all gradients over
`data`, once a tick: two all-reduces a tick, of P values 2 P (n-1)/n bytes each times
the size of a value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives import asked
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing_scope,
)
from meshpar.parallel.pipeline.crossing import STAGE, read, write, zero_arrays
from meshpar.parallel.pipeline.microbatches import Microbatches
from meshpar.parallel.pipeline.stages import cut, merge
from meshpar.parallel.pipeline.work import TickState, Work
from meshpar.parallel.placement import Placement
from meshpar.parallel.reduction import safe_inverse
from meshpar.rules.sharding import path_name
from meshpar.schedules import WeightVersions
from meshpar.trace.dependence import arguments_read

Row = dict[str, jax.Array]


class Part(enum.IntEnum):
    """Which updates a parameter gets: those of its blocks' stage, or of an end."""

    EMBED = 0
    HEAD = 1
    STAGE = 2


def parameter_parts(model: Model) -> tuple[Params, list[str]]:
    """Return the `Part` of every parameter, and the paths that both ends read."""
    ends, groups = one_layer_shapes(model)
    state, _ = one_layer_state(model)
    others = state, traced_batch(model, 1, 1)
    stream = traced_streams(model, 1, 1)[-1]

    def embed(ends: Params, state: Params, batch: Any) -> Any:
        scope = tracing_scope(batch, state)
        return model.embed(ends, scope.batch, scope)

    def head(ends: Params, state: Params, batch: Any, stream: Any) -> Any:
        scope = tracing_scope(batch, state)
        return model.loss_sums(ends, stream, scope.batch, scope)

    paths = [path for path, _ in jax.tree.leaves_with_path(ends)]
    in_embed = arguments_read(embed, ends, *others)[: len(paths)]
    in_head = arguments_read(head, ends, *others, stream)[: len(paths)]
    of_ends = [Part.EMBED if reads else Part.HEAD for reads in in_embed]
    parts = model.join(
        jax.tree.unflatten(jax.tree.structure(ends), of_ends),
        jax.tree.map(lambda _: Part.STAGE, groups),
    )
    both = map(all, zip(in_embed, in_head, strict=True))
    return parts, [
        path_name(path) for path, twice in zip(paths, both, strict=True) if twice
    ]


class Learned(NamedTuple):
    """Parameters, optimizer state and sums that change from tick to tick.

    Args:
        versions: Versions of each parameter, (slots, ...): one slot of the head's.
        opt_state: The optimizer's state.
        squares: Sums of the squares of all gradients: of the ends, and of this stage.
    """

    versions: Params
    opt_state: Any
    squares: tuple[jax.Array, jax.Array]


Update = Callable[[Any, Any, Any, tuple[jax.Array, ...]], tuple[Any, Any]]
"""(gradients, optimizer state, parameters, whether each `Part` is updated) -> new
parameters and new state; those of other parts stay."""


@dataclass(frozen=True, kw_only=True)
class WeightStash:
    """The weights of one rank's stage and of the ends, as the executor's `Learning`.

    Args:
        placement: The model on its mesh.
        microbatches: Made with the parameters of the step's start.
        params: The parameters of the step's start.
        opt_state: The optimizer's state then.
        parts: The `Part` of each parameter.
        slots: The versions that ranks keep, use and write.
        weight_sums: Weights of each microbatch on all devices, (microbatches,).
        update: The optimizer.
    """

    placement: Placement
    microbatches: Microbatches
    params: Params
    opt_state: Any
    parts: Params
    slots: WeightVersions
    weight_sums: jax.Array
    update: Update

    def first(self) -> Learned:
        """Return the initial weights in every slot, before any update."""

        def repeated(part: Part, value: jax.Array) -> jax.Array:
            num_slots = 1 if part is Part.HEAD else self.slots.num_slots
            return jnp.broadcast_to(value, (num_slots, *value.shape))

        versions = jax.tree.map(repeated, self.parts, self.params)
        return Learned(versions, self.opt_state, (jnp.float32(0), jnp.float32(0)))

    def last(self, learned: Learned) -> Params:
        """Return the parameters after the last update."""

        def newest(part: Part, versions: jax.Array) -> jax.Array:
            return versions[0 if part is Part.HEAD else self.slots.last]

        return jax.tree.map(newest, self.parts, learned.versions)

    def rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the slots of those ticks."""
        slots = self.slots
        named = ("read", slots.read), ("newest", slots.newest), ("fill", slots.written)
        return {f"version_{name}": table[start:stop] for name, table in named}

    def work(self, weights: Learned, row: Row) -> Work:
        """Return the functions of a tick, with the versions that its actions use."""
        params = self._version(weights, self._slots(row, "version_read"))
        ends, groups = self.placement.gather_before_loop(params)
        one = replace(self.microbatches, weights=ends, params=cut(groups, 1))
        ended, own = row["ended"], row["backward_microbatch"][lax.axis_index(STAGE)]
        of_head, of_stage = (
            safe_inverse(self.weight_sums[jnp.maximum(microbatch, 0)])
            for microbatch in (ended, own)
        )
        stage_gradient = one.work(of_loss=of_stage).stage_gradient
        return replace(one.work(of_loss=of_head), stage_gradient=stage_gradient)

    def learned(
        self, state: TickState, row: Row, once_known: Callable[..., Any]
    ) -> TickState:
        """Return the state with each part updated whose backward was in this tick."""
        weights, results = state.weights, state.results
        ends, blocks = results.end_gradients, list(results.block_gradients)
        blocks = once_known(blocks, ends, state.downward)
        gradients = self.placement.reduce(ends, [merge(tree) for tree in blocks])
        filled = self._slots(row, "version_fill", ended=row["ended"])
        own = row["backward_microbatch"][lax.axis_index(STAGE)]
        trained = (row["embedded_back"], row["ended"], own)
        active = tuple(
            (slot >= 0) & (self.weight_sums[jnp.maximum(microbatch, 0)] != 0)
            for slot, microbatch in zip(filled, trained, strict=True)
        )
        newest = self._version(weights, self._slots(row, "version_newest"))
        values, opt_state = self.update(gradients, weights.opt_state, newest, active)
        versions = jax.tree.map(
            lambda part, kept, value: write(kept, filled[part], value),
            self.parts,
            weights.versions,
            values,
        )
        squares = self._squares(weights.squares, gradients)
        upward, downward = once_known((state.upward, state.downward), gradients)
        nothing = zero_arrays((results.end_gradients, results.block_gradients))
        return replace(
            state,
            upward=upward,
            downward=downward,
            results=replace(
                results, end_gradients=nothing[0], block_gradients=nothing[1]
            ),
            weights=Learned(versions, opt_state, squares),
        )

    def norm(self, learned: Learned) -> jax.Array:
        """Return the root mean square of the norms of the microbatches' gradients."""
        of_ends, of_stage = learned.squares
        with asked("gradient_norm"):
            total = of_ends + lax.psum(of_stage, STAGE)
        return jnp.sqrt(total / self.slots.schedule.num_microbatches)

    def _slots(
        self, row: Row, name: str, ended: jax.Array | int = 0
    ) -> tuple[jax.Array, ...]:
        """Return the slot of each part, -1 for none: the embedding's are of rank 0."""
        of_ranks = row[name]
        of_head = jnp.where(jnp.asarray(ended) >= 0, 0, -1)
        return of_ranks[0], of_head, of_ranks[lax.axis_index(STAGE)]

    def _version(self, weights: Learned, slots: tuple[jax.Array, ...]) -> Params:
        return jax.tree.map(
            lambda part, versions: read(versions, slots[part]),
            self.parts,
            weights.versions,
        )

    def _squares(
        self, sums: tuple[jax.Array, jax.Array], gradients: Params
    ) -> tuple[jax.Array, jax.Array]:
        of_ends, of_stage = sums
        pairs = zip(
            jax.tree.leaves(self.parts), jax.tree.leaves(gradients), strict=True
        )
        for part, gradient in pairs:
            squares = jnp.sum(jnp.square(jnp.abs(gradient.astype(jnp.float32))))
            if part is Part.STAGE:
                of_stage += squares
            else:
                of_ends += squares
        return of_ends, of_stage
