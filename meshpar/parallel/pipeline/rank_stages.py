"""The stages of one rank, for one microbatch at a time, as the executor calls them.

A stage may hold layers of several groups of blocks (`rank_layers`), and `seams`
between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel import prefetch
from meshpar.parallel.blocks import (
    Residuals,
    ScopeArrays,
    Stack,
    check_names,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.pipeline.crossing import (
    Payload,
    Payloads,
    read,
    write,
    zero_arrays,
)
from meshpar.parallel.pipeline.last_reduction import LastReduction
from meshpar.parallel.pipeline.rank_layers import (
    RankLayers,
    Saved,
    backward_layers,
    keep_layers,
    layers_hindrance,
    run_layers,
    warn_idle_ranks,
)
from meshpar.parallel.pipeline.seams import GroupSeams
from meshpar.parallel.pipeline.work import At


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """The blocks of every stage that this rank runs.

    Args:
        seams: The seams between groups.
        scope_arrays: Microbatch -> arrays without gradient that scopes are made of.
        keeps_input: True to keep only a stage's input for its backward.
        skips: True if an idle rank skips its layers (`rank_layers`); else it computes
            them on zeros.
        of_loss: Gradient of the summed loss, including auxiliary losses.
        reduction: How the last backwards reduce gradients; None if they do not.
    """

    seams: GroupSeams
    scope_arrays: Callable[[jax.Array], ScopeArrays]
    keeps_input: bool = False
    skips: bool = False
    of_loss: jax.Array | float = 1.0
    reduction: LastReduction | None = None

    @property
    def layers(self) -> RankLayers:
        """The layers of this rank."""
        return self.seams.layers

    @property
    def payloads(self) -> Payloads:
        """The payloads that pass between stages."""
        return self.seams.payloads

    def may_skip(self) -> bool:
        """Return True if an idle rank may skip its layers; else warn why not."""
        hindrance = self._hindrance()
        if hindrance is None:
            return True
        warn_idle_ranks(*hindrance)
        return False

    def require_skippable(self) -> None:
        """Check that an idle rank may skip its layers.

        Raises:
            InputError: They have a collective that must not run on some ranks alone.
        """
        hindrance = self._hindrance()
        if hindrance is not None:
            group, collective = hindrance
            raise InputError(
                f"execution=divergent: group {group!r} has a {collective}, and ranks "
                "that do something else would not take part; set execution=uniform",
                key="layout.divergent_collective",
            )

    def _hindrance(self) -> tuple[str, str] | None:
        """Return a group, and its collective that idle ranks cannot skip, or None."""
        arrays, first = self.scope_arrays(jnp.int32(0)), jnp.int32(0)
        for group, block in enumerate(self.layers.blocks):
            stream = self.payloads.streams[group]
            stack = self.layers.stack(group, first)
            hindrance = layers_hindrance(stack, stream, arrays)
            if hindrance is not None:
                return block.group.name, hindrance
        return None

    def run(self, at: At, payload: Payload) -> tuple[Payload, tuple]:
        """Run a microbatch through a stage; return the payload and its blocks' sums."""
        arrays = self.scope_arrays(at.microbatch)

        def through(group: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, None]:
            if self.skips:
                num_layers = self.layers.num_layers(group, at)
                return *run_layers(stack, x, arrays, num_layers), None
            return *run_blocks(stack, x, arrays), None

        return self.through(at.chunk, arrays, payload, through)[:2]

    def kept(self, payload: Payload) -> Any:
        """Return the shapes of what `gradient` needs of a run: trees of plain lists."""
        return payload if self.keeps_input else _plain(self._kept(payload))

    def run_keeping(
        self, at: At, payload: Payload, buffers: Any, slot: jax.Array
    ) -> tuple[Payload, tuple, Any]:
        """Run a stage and write what `gradient` needs into a slot of the buffers.

        Args:
            at: The action.
            payload: The stage's input.
            buffers: (slots, ...) for each array of `kept`.
            slot: The slot to write; negative if the rank is idle.
        """
        if self.keeps_input:
            return *self.run(at, payload), write(buffers, slot, payload)
        arrays = self.scope_arrays(at.microbatch)
        if self.skips:
            return self._run_keeping_in(at, arrays, payload, buffers, slot)
        y, sums, kept = self._run_keeping(at.chunk, arrays, payload)
        return y, sums, self.written(buffers, slot, kept)

    def written(self, buffers: Any, slot: jax.Array, kept: Any) -> Any:
        """Return the buffers with the residuals of `through` in a slot."""
        return write(buffers, slot, _plain(kept))

    def gradient(
        self,
        at: At,
        buffers: Any,
        slot: jax.Array,
        of_payload: Payload,
        totals: list[Any],
    ) -> tuple[Payload, list[Any], Any]:
        """Run a stage backward, its parameters' gradients added to the totals.

        Args:
            at: The action.
            buffers: From `run_keeping`.
            slot: The slot that it wrote.
            of_payload: Gradient of the stage's output.
            totals: Gradients of each group so far, (chunks, places, ...).

        Returns:
            Gradient of its input, the totals, and gradients of the ends' parameters in
            `enter`; () if no group has it.
        """
        return self.gradient_by(
            at, buffers, slot, of_payload, totals, backward=self.group_gradient
        )

    def last_gradient(
        self, *given: Any, chunks: tuple[int, ...], overlapped: Any
    ) -> tuple[Payload, list[Any], Any, Any]:
        """Run `gradient`, the last one of these chunks on all ranks, and reduce them.

        Args:
            given: As for `gradient`.
            chunks: Those whose totals this backward completes. The first part of the
                place of each sum has its result (`LastReduction`).
            overlapped: Arrays that are communicated beside the last layer's backward.

        Returns:
            What `gradient` returns, and `overlapped`.
        """
        reduction = self.reduction
        assert reduction is not None

        def backward(
            group: int, at: At, kept: Any, dx: Stream, arrays: ScopeArrays, totals: Any
        ) -> tuple[Stream, Any]:
            nonlocal overlapped
            dx, totals, overlapped = prefetch.run_last_backward(
                self.layers.stack(group, at.chunk),
                kept,
                dx,
                arrays,
                totals,
                self.adder(at),
                reduction.chunk_reduction(group, chunks),
                of_loss=self.of_loss,
                overlapped=overlapped,
            )
            return dx, totals

        return *self.gradient_by(*given, backward=backward), overlapped

    def gradient_by(
        self,
        at: At,
        buffers: Any,
        slot: jax.Array,
        of_payload: Payload,
        totals: list[Any],
        *,
        backward: Callable[..., tuple[Stream, Any]],
    ) -> tuple[Payload, list[Any], Any]:
        """Run `gradient`, each group's layers by `backward`."""
        arrays, totals = self.scope_arrays(at.microbatch), list(totals)
        kept = self._restored(at, arrays, buffers, slot)
        of_input = zero_arrays(self.payloads.shapes)
        of_ends: Any = ()
        of_next: Any = None
        for group in reversed(range(len(self.layers.blocks))):
            entered, residuals = kept[group]
            dy = self.seams.gradient_out(group, at.chunk, of_payload, of_next)
            dx, totals[group] = backward(
                group, at, residuals, dy, arrays, totals[group]
            )
            of_next, of_input, more = self.seams.gradient_in(
                group, at.chunk, dx, of_input, entered, arrays
            )
            if more is not None:
                of_ends = more if not of_ends else jax.tree.map(jnp.add, of_ends, more)
        return of_input, totals, of_ends

    def _run_keeping(
        self, chunk: jax.Array, arrays: ScopeArrays, payload: Payload
    ) -> tuple[Payload, tuple, Any]:
        checked = []

        def through(_: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, Any]:
            checked.append((stack, x))
            return run_keeping(stack, x, arrays)

        results = self.through(chunk, arrays, payload, through)
        check_names(checked, arrays)
        return results

    def _run_keeping_in(
        self,
        at: At,
        arrays: ScopeArrays,
        payload: Payload,
        buffers: Any,
        slot: jax.Array,
    ) -> tuple[Payload, tuple, Any]:
        """Run a stage, each layer's residuals written straight into the buffers."""

        def through(group: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, list]:
            num_layers, (_, saved) = self.layers.num_layers(group, at), buffers[group]
            return keep_layers(
                stack, x, arrays, num_layers, saved, jnp.maximum(slot, 0)
            )

        y, sums, kept = self.through(at.chunk, arrays, payload, through)
        written = [
            [write(of_enter, slot, jax.tree.leaves(entered)), of_layers]
            for (of_enter, _), (entered, of_layers) in zip(buffers, kept, strict=True)
        ]
        return y, sums, written

    def layer_residuals(self) -> list[Any]:
        """Return shapes of the residuals of one layer of each group."""
        return [
            jax.tree.map(
                lambda one: jax.ShapeDtypeStruct(one.shape[1:], one.dtype), of_layers
            )
            for _, of_layers in self._kept(self.payloads.shapes)
        ]

    def _kept(self, payload: Payload) -> list[tuple[Residuals | None, Residuals]]:
        """Return shapes of each group's residuals: of `enter`, and of its layers."""
        first = jnp.int32(0)
        return jax.eval_shape(
            lambda x: self._run_keeping(first, self.scope_arrays(first), x)[2], payload
        )

    def _restored(
        self, at: At, arrays: ScopeArrays, buffers: Any, slot: jax.Array
    ) -> list[tuple[Residuals | None, Any]]:
        """Return each group's residuals of `enter`, and those for `_backward`."""
        payload = self.payloads.shapes
        if self.keeps_input and not self.skips:
            return self._run_keeping(at.chunk, arrays, read(buffers, slot))[2]
        shapes = self._kept(payload)
        if self.keeps_input:
            taken, slot = read(buffers, slot), jnp.int32(0)
            buffers = jax.tree.map(
                lambda one: jnp.zeros((1, *one.shape), one.dtype), _plain(shapes)
            )
            buffers = self._run_keeping_in(at, arrays, taken, buffers, slot)[2]
        if not self.skips:
            kept = jax.tree.leaves(read(buffers, slot))
            return jax.tree.unflatten(jax.tree.structure(shapes), kept)
        return [
            (
                jax.tree.unflatten(jax.tree.structure(entered), read(of_enter, slot)),
                Saved(of_layers, jnp.maximum(slot, 0), jax.tree.structure(residuals)),
            )
            for (entered, residuals), (of_enter, of_layers) in zip(
                shapes, buffers, strict=True
            )
        ]

    def group_gradient(
        self,
        group: int,
        at: At,
        kept: Any,
        dx: Stream,
        arrays: ScopeArrays,
        totals: Any,
    ) -> tuple[Stream, Any]:
        """Run a group's layers backward, their gradients added to the totals."""
        stack, add = self.layers.stack(group, at.chunk), self.adder(at)
        given = (stack, kept, dx, arrays)
        if not self.skips:
            return run_backward(*given, totals, add, of_loss=self.of_loss)
        num_layers = self.layers.num_layers(group, at)
        return backward_layers(*given, num_layers, totals, add, of_loss=self.of_loss)

    def adder(self, at: At) -> Callable[[Any, Any, jax.Array], Any]:
        """Return (totals, gradients of one layer, its place) -> totals."""

        def add(totals: Any, gradients: Any, place: jax.Array) -> Any:
            def one(total: jax.Array, gradient: jax.Array) -> jax.Array:
                gradient = gradient.astype(total.dtype)
                if not self.skips:
                    gradient = jnp.where(at.is_active, gradient, 0)
                return total.at[at.chunk, place].add(gradient)

            return jax.tree.map(one, totals, gradients)

        return add

    def through(
        self,
        chunk: jax.Array,
        arrays: ScopeArrays,
        payload: Payload,
        through: Callable[[int, Stack, Stream], tuple[Stream, Sums, Any]],
    ) -> tuple[Payload, tuple, list]:
        """Run every group in turn, its layers by `through`.

        Returns:
            The payload out, the sums, and each group's residuals, of `enter` and of
            its layers.
        """
        out, y, auxiliary, statistics, kept = None, None, [], [], []
        for group, block in enumerate(self.layers.blocks):
            x = self.payloads.stream(group, payload)
            x, entered = self.seams.entered(group, chunk, x, (payload, y), arrays)
            y, sums, of_layers = through(group, self.layers.stack(group, chunk), x)
            names = block.group.auxiliary
            auxiliary.append({name: sums[name] for name in names})
            statistics.append({k: v for k, v in sums.items() if k not in names})
            kept.append((entered, of_layers))
            if group in self.layers.arrangement.crossing:
                mine = self.seams.left(group, chunk, y)
                out = mine if out is None else jax.tree.map(jnp.add, out, mine)
        return out, (auxiliary, statistics), kept


def _plain(kept: list[tuple[Residuals | None, Residuals]]) -> Any:
    """Return the arrays alone: for each group those of `enter`, and of its layers."""
    return [[jax.tree.leaves(one) for one in of_group] for of_group in kept]
