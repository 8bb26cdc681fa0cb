"""Ends and stages of a rank for one microbatch at a time: the pipeline's only core.

Embedding, blocks and head are a `Functions`: of a model under the contract
(`program`), or of research code (`user_functions`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.model.block_run import HeadSums
from meshpar.model.contract import Stream
from meshpar.model.parameter import Params
from meshpar.parallel.blocks import Block, ScopeArrays
from meshpar.parallel.pipeline.crossing import (
    Payloads,
    Shares,
    shareable_parts,
    zero_arrays,
)
from meshpar.parallel.pipeline.executor import Executor
from meshpar.parallel.pipeline.last_reduction import LastReduction
from meshpar.parallel.pipeline.paired_stages import PairedStages
from meshpar.parallel.pipeline.rank_layers import RankLayers
from meshpar.parallel.pipeline.rank_stages import RankStages
from meshpar.parallel.pipeline.seams import Enter, GroupSeams
from meshpar.parallel.pipeline.split_stages import SplitStages
from meshpar.parallel.pipeline.stages import Arrangement, part
from meshpar.parallel.pipeline.uneven_shard import UnevenShard
from meshpar.parallel.pipeline.work import At, SplitWork, Work
from meshpar.parallel.remat import keeps_stage_input
from meshpar.schedules import Schedule
from meshpar.trace.dependence import arguments_read, has_gradient, is_read


def differentiable(tree: Any) -> list[jax.Array]:
    """Return the real or complex arrays of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def split_floats(tree: Any) -> tuple[list, Callable[[list], Any]]:
    """Return a tree's real or complex arrays, and a function that replaces them."""
    leaves, treedef = jax.tree.flatten(tree)

    def filled(floats: list) -> Any:
        left = iter(floats)
        return treedef.unflatten(
            [next(left) if is_float(leaf) else leaf for leaf in leaves]
        )

    return differentiable(tree), filled


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


class Functions(Protocol):
    """The functions of a pipeline, at its two ends and in between.

    `embed`, `head` and `outputs` take the ends' parameters, the arrays of a
    microbatch's scopes, and how the ranks share that end.
    """

    @property
    def remat(self) -> str:
        """The layout's remat: what the backward recomputes."""

    def embed(
        self, weights: Params, arrays: ScopeArrays, shares: Shares | None
    ) -> Stream:
        """Return the first group's stream, or this rank's share of it."""

    def head(
        self, weights: Params, stream: Stream, arrays: ScopeArrays, shares: Shares
    ) -> HeadSums:
        """Return the sums of this rank's share."""

    @property
    def platform(self) -> str:
        """Kind of device."""

    @property
    def keeps_together(self) -> str | None:
        """Why idle ranks compute on zeros, or None (`mesh_hindrance`)."""

    @property
    def divergent(self) -> bool:
        """True if each rank does an action of its own in a tick."""

    @property
    def paired_group(self) -> int | None:
        """The group whose layers run forward beside others backward; None if none."""

    def blocks(self, arrangement: Arrangement) -> Sequence[Block]:
        """Return a layer of each group."""

    def enters(self) -> Sequence[Enter | None]:
        """Return `enter` of each group, or None."""

    def specs(self, group: int, stream: Stream) -> Any:
        """Return the specs of a group's stream over automatic mesh axes."""

    def shared_dims(self, *, of_embed: bool) -> tuple[int, ...]:
        """Return the dims along which ranks may share an end's stream, best first."""

    def differentiated(self, arrays: ScopeArrays) -> Any:
        """Return the part of a microbatch that gets gradients."""

    def with_differentiated(self, arrays: ScopeArrays, part: Any) -> ScopeArrays:
        """Return a microbatch with other values of that part."""

    def scatter_ends(self, gradients: Params) -> Params:
        """Return the ends' gradients scattered as they are added up."""


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The embedding, stages and head, for one microbatch at a time.

    Args:
        functions: Embedding, blocks and head.
        schedule: The order of every rank's work.
        arrangement: The layers of every rank.
        weights: The ends' parameters for use.
        params: Parameters of each group as the loop takes them, (chunks, places, ...).
        states: State of each group, (chunks, places, ...).
        reduction: How gradients are reduced beside the last backwards; None if after
            all ticks.
        end_gradients: Shapes of the ends' gradients as they are added up.
        gradients: Shapes of each group's gradients, (chunks, places, ...).
        cut: Arrays of scopes that differ by microbatch, (microbatches, ...) each.
        random: Key of the step's randomness, if there is one.
        shard: Which of all microbatches of `cut` this device runs; None for all.
    """

    functions: Functions
    schedule: Schedule
    arrangement: Arrangement
    weights: Params
    params: Sequence[Any]
    states: Sequence[Any]
    reduction: LastReduction | None
    end_gradients: Any
    gradients: Any
    cut: ScopeArrays
    random: jax.Array | None
    shard: UnevenShard | None = None

    def executor(self, work: Work, *first: jax.Array) -> Executor:
        """Return what runs these functions once `first` is known."""
        is_host = platform_named(self.functions.platform).is_host
        return Executor(
            self.schedule,
            work,
            divergent=self.functions.divergent,
            first=first,
            ordered_by_data=is_host,
            shard=self.shard,
        )

    def work(self, of_loss: jax.Array | float = 1.0) -> Work:
        """Return the executor's functions for the loss and its gradients.

        Args:
            of_loss: Gradient of the summed loss, from which the backward starts.
        """
        stages, shares = replace(self._stages, of_loss=of_loss), self.head_shares
        arrays = self._scope_arrays(0)
        sums = jax.eval_shape(
            lambda share: self.functions.head(self.weights, share, arrays, shares),
            jax.tree.map(shares.share_shape, self._streams[-1]),
        )
        work = self._work(partial(self._loss, of_loss), sums, stages)
        split = SplitStages.of(stages) if self.schedule.splits_backward else None
        return replace(
            work, split=self._split_work(split), pair=self._pair(stages, split)
        )

    def weight_sum(self) -> jax.Array:
        """Sum this device's weights of all microbatches, before any of them has run.

        The backward of the first microbatch starts from the gradient of the mean loss,
        1 / the sum of all weights, as it does where the batch is not cut.

        Raises:
            InputError: The weights of the loss have a gradient.
        """
        share, own_weight_sum = self._head_share_shape, self._own_weight_sum
        if has_gradient(own_weight_sum, self.weights, share):
            raise InputError(
                "weight_sum depends on parameters, so that the mean loss is known, and "
                "has a gradient, only after the last microbatch; lax.stop_gradient the "
                "weights, or set stage=1 and microbatches=1",
                key="model.weight_sum_has_gradient",
            )
        if is_read(own_weight_sum, self.weights, share):
            warnings.warn(
                "weight_sum depends on parameters, so that every forward runs twice, "
                "the first time for the weights: compute them from the batch alone",
                stacklevel=2,
            )
            return self.executor(self.work()).loss_sums().weight

        def add(total: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, None]:
            weight = self._counted_weight_sum(microbatch)
            if self.shard is not None:
                weight = jnp.where(microbatch < self.shard.count, weight, 0)
            return total + weight, None

        numbers = jnp.arange(self.schedule.num_microbatches)
        return lax.scan(add, jnp.float32(0), numbers)[0]

    def weight_sums(self) -> jax.Array:
        """Return this device's sum of weights of each microbatch, (microbatches,).

        Raises:
            InputError: The weights of the loss depend on parameters.
        """
        if is_read(self._own_weight_sum, self.weights, self._head_share_shape):
            raise InputError(
                f"schedule={self.schedule.name} updates the weights after each "
                "microbatch by its own mean loss, but weight_sum depends on "
                "parameters; compute it from the batch alone, or take schedule=1f1b",
                key="model.weight_sum_of_each_microbatch",
            )
        numbers = jnp.arange(self.schedule.num_microbatches)
        return lax.map(self._counted_weight_sum, numbers)

    def outputs_work(self, outputs: Callable[..., Any]) -> Work:
        """Return the executor's functions for the outputs of a single microbatch.

        Args:
            outputs: (ends' parameters, stream's share, scope arrays, shares) -> arrays.
        """
        last, shares = len(self._streams) - 1, self.head_shares

        def made(microbatch: Any, share: Stream) -> Any:
            return outputs(self.weights, share, self._scope_arrays(microbatch), shares)

        def head(microbatch: jax.Array, payload: Any) -> tuple:
            share = self._head_share(payload)
            return made(microbatch, share), payload, None

        share = jax.tree.map(shares.share_shape, self._streams[last])
        sums = jax.eval_shape(lambda x: made(0, x), share)
        return self._work(head, sums, self._stages)

    @cached_property
    def embed_shares(self) -> Shares:
        """How the ranks share the embedding."""
        return self._shares(0, stage=0, of_embed=True)

    @cached_property
    def head_shares(self) -> Shares:
        """How the ranks share the head."""
        last = self.schedule.num_stages - 1
        return self._shares(len(self._streams) - 1, stage=last, of_embed=False)

    @cached_property
    def late_ends(self) -> list[bool]:
        """Return for each of the ends' parameters whether it is reduced ahead.

        True for those that only the head uses, if gradients are reduced beside the last
        backwards.
        """
        if self.reduction is None or any(self.functions.enters()):
            return [False] * len(jax.tree.leaves(self.weights))
        arrays = self._scope_arrays(0)
        read = arguments_read(
            lambda weights: self.functions.embed(weights, arrays, None), self.weights
        )
        return [not one for one in read]

    def _work(self, head: Callable[..., tuple], sums: Any, stages: RankStages) -> Work:
        payload, chunks = self._payloads.shapes, self.schedule.num_chunks
        idle = At(jnp.int32(0), jnp.int32(0), jnp.bool_(False))
        _, (auxiliary, statistics) = jax.eval_shape(
            lambda x: stages.run(idle, x), payload
        )
        return Work(
            stage=stages.run,
            stage_keeping=stages.run_keeping,
            stage_gradient=partial(self._stage_gradient, stages.gradient),
            embed=self._embed,
            embed_gradient=self._embed_gradient,
            head=head,
            payload=payload,
            kept=stages.kept(payload),
            specs=self._payloads.places(self._specs),
            gradients=self.gradients,
            end_gradients=self.end_gradients,
            loss_sums=sums,
            auxiliary=auxiliary,
            statistics=jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((chunks, *one.shape), one.dtype),
                statistics,
            ),
            inputs=split_floats(self.functions.differentiated(self.cut))[0],
            last_gradient=partial(self._stage_gradient, stages.last_gradient)
            if self.reduction
            else None,
            reduce_ends=self._reduce_ends if self.reduction else None,
        )

    def _shares(self, group: int, *, stage: int, of_embed: bool) -> Shares:
        """Share along the first dim that divides; else `stage`'s rank has the end."""
        stream, specs = self._streams[group], self._specs[group]
        shape, num_ranks = jax.tree.leaves(stream)[0].shape, self.schedule.num_ranks
        parts = shareable_parts(stream, specs)
        wanted = self.functions.shared_dims(of_embed=of_embed)
        divided = (
            dim
            for dim in wanted
            if dim in parts and shape[dim] and not shape[dim] % (num_ranks * parts[dim])
        )
        dim = next(divided, None)
        return Shares(
            num_ranks=num_ranks,
            rank=self.schedule.rank_of_stage[stage],
            dim=dim,
            size=1 if dim is None else shape[dim],
            specs=specs,
            parts=1 if dim is None else parts[dim],
            platform=self.functions.platform,
        )

    @cached_property
    def _stages(self) -> RankStages:
        layers = RankLayers(
            blocks=self.functions.blocks(self.arrangement),
            params=self.params,
            states=self.states,
            arrangement=self.arrangement,
        )
        seams = GroupSeams(
            enters=self.functions.enters(),
            weights=self.weights,
            payloads=self._payloads,
            layers=layers,
        )
        stages = RankStages(
            seams=seams,
            scope_arrays=self._scope_arrays,
            keeps_input=keeps_stage_input(self.functions.remat),
            reduction=self.reduction,
        )
        if self.functions.divergent:
            stages.require_skippable()
            return replace(stages, skips=True)
        if self.schedule.num_ranks == 1 or self.functions.keeps_together is not None:
            return stages
        return replace(stages, skips=stages.may_skip())

    @cached_property
    def _payloads(self) -> Payloads:
        return Payloads(streams=self._streams, crossing=self.arrangement.crossing)

    @cached_property
    def _streams(self) -> list[Any]:
        """Shapes of each group's stream of one microbatch."""
        arrays, enters = self._scope_arrays(0), self.functions.enters()

        def streams() -> list[Stream]:
            streams = [self.functions.embed(self.weights, arrays, None)]
            for enter in enters[1:]:
                before = streams[-1]
                streams.append(enter(self.weights, before, arrays) if enter else before)
            return streams

        return jax.eval_shape(streams)

    @cached_property
    def _specs(self) -> list[Any]:
        return [
            self.functions.specs(group, stream)
            for group, stream in enumerate(self._streams)
        ]

    def _scope_arrays(self, microbatch: jax.Array | int) -> ScopeArrays:
        at = microbatch if self.shard is None else self.shard.first + microbatch
        arrays = part(self.cut, at)
        return arrays._replace(microbatch=jnp.asarray(microbatch), random=self.random)

    def _split_work(self, split: SplitStages | None) -> SplitWork | None:
        if split is None:
            return None
        return SplitWork(
            input_gradient=partial(self._stage_gradient, split.input_gradient),
            weight_gradient=split.weight_gradient,
            stash=split.stash(),
        )

    def _pair(
        self, stages: RankStages, split: SplitStages | None
    ) -> Callable[..., tuple[tuple, tuple]] | None:
        """Return what runs a forward beside a backward (`Work.pair`), if it is used."""
        group = self.functions.paired_group
        if group is None:
            return None
        paired = PairedStages(stages=stages, group=group, split=split)

        def pair(*given: Any) -> tuple[tuple, tuple]:
            of_forward, of_backward = paired.run(*given)
            return of_forward, self._with_ends(of_backward)

        return pair

    def _stage_gradient(
        self, gradient: Callable[..., tuple], *given: Any, **more: Any
    ) -> tuple:
        """Return results of `gradient` with the ends' gradients scattered."""
        return self._with_ends(gradient(*given, **more))

    def _with_ends(self, results: tuple) -> tuple:
        dx, totals, of_ends, *others = results
        if of_ends:
            of_ends = self.functions.scatter_ends(of_ends)
        return dx, totals, of_ends, *others

    def _embed(self, microbatch: jax.Array) -> Any:
        shares, arrays = self.embed_shares, self._scope_arrays(microbatch)
        share = self.functions.embed(self.weights, arrays, shares)
        return self._payloads.holding(0, shares.gather(share, "embed_gather"))

    def _embed_gradient(
        self, microbatch: jax.Array, of_payload: Any
    ) -> tuple[Params, Any]:
        shares, arrays = self.embed_shares, self._scope_arrays(microbatch)
        dx = self._payloads.stream(0, of_payload)
        dx = shares.scatter(dx, "embed_scatter")
        floats, filled = split_floats(self.functions.differentiated(arrays))

        def embed(weights: Params, floats: list) -> Stream:
            given = self.functions.with_differentiated(arrays, filled(floats))
            return self.functions.embed(weights, given, shares)

        _, vjp = jax.vjp(embed, self.weights, floats)
        gradients, of_inputs = shares.counted(vjp(dx))
        leaves, treedef = jax.tree.flatten(self.functions.scatter_ends(gradients))
        early = [
            None if late else leaf
            for leaf, late in zip(leaves, self.late_ends, strict=True)
        ]
        return treedef.unflatten(early), of_inputs

    def _reduce_ends(self, gradients: Params) -> Params:
        """Reduce the ends' gradients that no later backward adds to."""
        assert self.reduction is not None
        return self.reduction.reduce_ends(gradients, self.late_ends)

    @property
    def _head_share_shape(self) -> Any:
        return jax.tree.map(self.head_shares.share_shape, self._streams[-1])

    def _own_weight_sum(
        self, weights: Params, share: Stream, microbatch: jax.Array | int = 0
    ) -> jax.Array:
        arrays = self._scope_arrays(microbatch)
        return self.functions.head(weights, share, arrays, self.head_shares).weight

    def _counted_weight_sum(self, microbatch: jax.Array) -> jax.Array:
        unread = zero_arrays(self._head_share_shape)
        weight = self._own_weight_sum(self.weights, unread, microbatch)
        return self.head_shares.counted(weight)

    def _head_share(self, payload: Any) -> Stream:
        """Return this rank's share of the last group's stream."""
        stream = self._payloads.stream(len(self._streams) - 1, payload)
        return self.head_shares.scatter(stream, "head_scatter")

    def _loss(
        self, of_loss: jax.Array | float, microbatch: jax.Array, payload: Any
    ) -> tuple:
        last, shares = len(self._streams) - 1, self.head_shares
        share, arrays = self._head_share(payload), self._scope_arrays(microbatch)

        def head(weights: Params, share: Stream) -> Any:
            sums = self.functions.head(weights, share, arrays, shares)
            return sums.differentiated()

        pair, vjp, others = jax.vjp(head, self.weights, share, has_aux=True)
        gradients, dy = vjp((jnp.float32(of_loss), jnp.zeros(())))
        sums = HeadSums(pair[0], pair[1], *others)
        sums, gradients = shares.counted((sums, gradients))
        dy = self._payloads.holding(last, shares.gather(dy, "head_gather"))
        return sums, dy, self.functions.scatter_ends(gradients)
