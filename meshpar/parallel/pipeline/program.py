"""A model's loss and gradients with its blocks cut into stages, per device.

One `jax.shard_map`, manual over the batch axes and `stage`: what crosses them is
written here, in `executor` and in `crossing`. GSPMD partitions over the other mesh
axes. With one stage it accumulates gradients over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from meshpar.machine.mesh import device_kinds
from meshpar.model.block_run import HeadSums
from meshpar.model.contract import BlockGroup, Stream
from meshpar.model.inputs import split_gradient_inputs
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.blocks import Block, ScopeArrays, one_layer, sums_by_name
from meshpar.parallel.model_state import updated_state
from meshpar.parallel.pipeline.crossing import STAGE, Shares, stream_specs
from meshpar.parallel.pipeline.last_reduction import LastReduction, in_own_layout
from meshpar.parallel.pipeline.microbatches import Microbatches
from meshpar.parallel.pipeline.rank_layers import mesh_hindrance
from meshpar.parallel.pipeline.reduction import reduce_in_slices, summed_inputs
from meshpar.parallel.pipeline.seams import Enter
from meshpar.parallel.pipeline.stages import Arrangement, Pipeline, cut, merge
from meshpar.parallel.pipeline.uneven_shard import UnevenShard
from meshpar.parallel.pipeline.work import Results
from meshpar.parallel.placement import REPLICATED, Placement, Scopes
from meshpar.parallel.program import LossAndGradients
from meshpar.parallel.reduction import loss_metrics, random_key, safe_inverse
from meshpar.parallel.remat import run_head
from meshpar.parallel.sequence import outputs_in_order, own_tokens


@dataclass(frozen=True, kw_only=True)
class ModelFunctions:
    """`Functions` of a model.

    Args:
        placement: The model on its mesh.
        scopes: What makes scopes.
        end_state: State of the ends.
    """

    placement: Placement
    scopes: Scopes
    end_state: Params

    @property
    def remat(self) -> str:
        """The layout's remat: what the backward recomputes."""
        return self.placement.layout.remat

    @property
    def platform(self) -> str:
        """Kind of device of the mesh."""
        return self.placement.platform

    @property
    def keeps_together(self) -> str | None:
        """Why idle ranks compute on zeros, or None (`mesh_hindrance`)."""
        layout = self.placement.layout
        if self.placement.reduces_in_last_tick:
            return "they reduce gradients beside the last backward"
        if self.paired_group is not None:
            return "forwards run beside backwards"
        if layout.attention_method.permutes:
            return "keys and values are permuted over 'context'"
        mesh = self.placement.mesh
        return mesh_hindrance(mesh.shape, self.platform, device_kinds(mesh))

    @property
    def divergent(self) -> bool:
        """True if each rank does an action of its own in a tick."""
        return self.placement.layout.execution == "divergent"

    @property
    def paired_group(self) -> int | None:
        """The group whose layers run forward beside others backward; None if none.

        The largest one with routed experts, if `Placement.pairs_ticks`.
        """
        placement = self.placement
        if not placement.pairs_ticks:
            return None
        groups = placement.model.groups
        _, parameters = placement.model.split(placement.model.parameters)
        routed = [
            at
            for at in range(len(groups))
            if any(
                "experts" in one.logical_axes for one in jax.tree.leaves(parameters[at])
            )
        ]
        return max(routed, key=lambda at: groups[at].num_layers, default=None)

    def embed(
        self, weights: Params, arrays: ScopeArrays, shares: Shares | None
    ) -> Stream:
        """Return `Model.embed` of a share."""
        scope = self._scope(arrays, shares)
        return self.placement.model.embed(weights, scope.batch, scope)

    def head(
        self, weights: Params, stream: Stream, arrays: ScopeArrays, shares: Shares
    ) -> HeadSums:
        """Return the sums of `Model.head` of a share."""
        scope = self._scope(self._without_inputs(arrays), shares)
        placement = self.placement
        remat = placement.layout.remat
        return run_head(placement.model, remat, weights, stream, scope)

    def outputs(
        self, weights: Params, stream: Stream, arrays: ScopeArrays, shares: Shares
    ) -> Any:
        """Return `Model.logits` of a share."""
        # `TrainStep.logits` refuses a model without.
        logits = cast(Callable[..., Any], self.placement.model.logits)
        arrays = self._without_inputs(arrays)
        return logits(weights, stream, self._scope(arrays, shares))

    def blocks(self, arrangement: Arrangement) -> Sequence[Block]:
        """Return a layer of each group, under the layout's remat."""
        model = self.placement.model
        _, stored = model.split(self.placement.stored)
        return [
            Block(
                group,
                stored=one_layer(stored[at]),
                remat=self.remat,
                make_scope=lambda arrays: self.scopes(self._without_inputs(arrays)),
                padded=arrangement.padded(at),
            )
            for at, group in enumerate(model.groups)
        ]

    def enters(self) -> Sequence[Enter | None]:
        """Return `BlockGroup.enter` of each group, with its scope."""
        return [self._enter(group) for group in self.placement.model.groups]

    def specs(self, group: int, stream: Stream) -> Any:
        """Return the specs of a group's stream over automatic mesh axes."""
        axes = self.placement.model.groups[group].stream
        return stream_specs(axes, stream, self.placement.rules)

    def shared_dims(self, *, of_embed: bool) -> tuple[int, ...]:
        """Return dims to share: tokens if the model allows it, then examples.

        None for a single rank. A head sums over examples, so any rank can have any.
        """
        if self.placement.layout.stage == 1:
            return ()
        return (1, 0) if self.placement.model.per_token else (0,)

    def differentiated(self, arrays: ScopeArrays) -> Any:
        """Return the inputs that have a gradient."""
        return split_gradient_inputs(self.placement.model.inputs, arrays.batch)[1]

    def with_differentiated(self, arrays: ScopeArrays, part: Any) -> ScopeArrays:
        """Return a microbatch with other values of them."""
        return arrays._replace(batch={**arrays.batch, **part})

    def scatter_ends(self, gradients: Params) -> Params:
        """Return the ends' gradients scattered as ZeRO adds them up."""
        return self.placement.scatter_ends(gradients)

    def _enter(self, group: BlockGroup) -> Enter | None:
        enter = group.enter
        if enter is None:
            return None
        return lambda weights, stream, arrays: enter(
            weights, stream, self._scope(self._without_inputs(arrays), None)
        )

    def _without_inputs(self, arrays: ScopeArrays) -> ScopeArrays:
        """Return the microbatch as all functions but `embed` see it."""
        batch, _ = split_gradient_inputs(self.placement.model.inputs, arrays.batch)
        return arrays._replace(batch=batch)

    def _scope(self, arrays: ScopeArrays, shares: Shares | None) -> Scope:
        """Return the scope outside the blocks, of this rank's share."""
        arrays = arrays._replace(state=self.end_state)
        if shares is None or shares.dim is None:
            return self.scopes(arrays)
        batch, model = arrays.batch, self.placement.model
        if shares.dim == 0:
            share = {
                name: shares.own_part(array, 0, f"batch[{name!r}]")
                for name, array in batch.items()
            }
            known = cast(jax.Array, arrays.examples)
            examples = shares.own_part(known, 0, "examples")
            axes = (*self.scopes.batch_axes, STAGE)
            own = arrays._replace(batch=share, examples=examples)
            return self.scopes(own, batch_axes=axes)
        outside, share = self.scopes(arrays), {}
        for name, array in batch.items():
            dim = model.seq_dim(name) if array.ndim > 1 else None
            if dim is not None:
                array = shares.own_part(array, dim, f"batch[{name!r}]")
            share[name] = array
        return self.scopes(
            arrays._replace(batch=share),
            token_positions=outside.positions(shares.size)[shares.positions()],
            full_seq=outside.seq_length(shares.size),
        )


@dataclass(frozen=True, kw_only=True)
class PipelineProgram:
    """The functions of an arranged model, to be called inside `jax.jit`.

    Args:
        placement: The model on its mesh, its parameters in the arrangement's order.
        pipeline: Its stages.
    """

    placement: Placement
    pipeline: Pipeline

    def loss_and_gradients(self, *of: Any) -> LossAndGradients:
        """Return mean loss, metrics, gradients, model state, gradients of inputs.

        Gradients are laid out as the states. Arguments as for
        `LocalProgram.loss_and_gradients`.
        """
        placement, model = self.placement, self.placement.model

        def local(*of: Any) -> LossAndGradients:
            microbatches = self.microbatches(*of, training=True)
            weight_sum = placement.sum_losses(
                microbatches.weight_sum(), placement.manual_axes
            )
            share = safe_inverse(weight_sum)
            work = microbatches.work(of_loss=share)
            results = microbatches.executor(work, share).loss_and_gradients()
            loss, metrics = self.loss_and_metrics(results, weight_sum)
            blocks, statistics = (
                [merge(tree) for tree in trees]
                for trees in (results.block_gradients, results.statistics)
            )
            of_ends, reduction = results.end_gradients, microbatches.reduction
            if reduction is None:
                gradients = reduce_in_slices(placement, of_ends, blocks)
            else:
                gradients = reduction.reduce_rest(
                    of_ends, blocks, microbatches.late_ends
                )
            new_state = of[1]
            if model.changes_state:
                new_state = updated_state(placement, of[0], of[1], statistics)
            names = sorted(split_gradient_inputs(model.inputs, of[2])[1])
            of_inputs = merge(dict(zip(names, results.input_gradients, strict=True)))
            of_inputs = summed_inputs(placement, of_inputs)
            return loss, metrics, gradients, new_state, of_inputs

        return placement.on_training_state(local)(*of)

    def loss_and_metrics(
        self, results: Results, weight_sum: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return mean loss and metrics of all devices, from this device's results.

        Args:
            results: Of the executor.
            weight_sum: Sum of the weights of all devices.
        """
        sums = results.loss_sums
        loss_sum, auxiliary, terms = self.placement.sum_losses(
            (sums.loss, results.auxiliary, sums.terms), self.placement.manual_axes
        )
        for group, losses in zip(self.placement.model.groups, auxiliary, strict=True):
            loss_sum += group.weighted(losses)
        metrics = loss_metrics(weight_sum, sums_by_name(auxiliary), terms)
        return loss_sum * safe_inverse(weight_sum), metrics

    def loss_sums(self, *of: Any) -> HeadSums:
        """Return the head's sums over the global batch, not in training."""
        placement = self.placement

        def local(*of: Any) -> HeadSums:
            microbatches = self.microbatches(*of, training=False)
            sums = microbatches.executor(microbatches.work()).loss_sums()
            return placement.sum_losses(sums, placement.manual_axes)

        return placement.on_state(local, REPLICATED)(*of)

    def logits(self, *of: Any) -> Any:
        """Return the outputs of the model's `logits`, each with the example first."""
        schedule = self.pipeline.schedule.with_one_microbatch()
        pipeline = replace(self.pipeline, schedule=schedule, data_counts=())
        one = replace(self, pipeline=pipeline)

        def local(*of: Any) -> Any:
            microbatches = one.microbatches(*of, training=False, natural=True)
            functions = cast(ModelFunctions, microbatches.functions)
            work = microbatches.outputs_work(functions.outputs)
            sums = microbatches.executor(work).loss_sums()
            return microbatches.head_shares.whole(sums)

        return outputs_in_order(self.placement, local, of)

    def microbatches(
        self,
        params: Params,
        state: Params,
        batch: Any,
        step: jax.Array,
        seed: jax.Array,
        *,
        training: bool,
        natural: bool = False,
    ) -> Microbatches:
        """Return the microbatches of this device, with these parameters."""
        placement, schedule = self.placement, self.pipeline.schedule
        chunks = schedule.num_chunks
        order: TokenOrder | None = None
        own = dict(batch)
        if placement.splits_tokens:
            own, order = own_tokens(placement, batch, natural=natural)
        scopes = placement.scopes(training=training, order=order)
        weights, groups = placement.gather_before_loop(params)
        ends, shapes = placement.gradient_shapes(weights, groups)
        reduces = placement.reduces_in_last_tick and not schedule.splits_backward
        if reduces:
            stored = placement.model.split(placement.stored)[1]
            groups = jax.tree.map(in_own_layout, stored, groups)
        end_state, states = placement.model.split(state)
        arrays = ScopeArrays(batch=own, examples=scopes.examples(batch))
        shard = None
        if self.pipeline.data_counts:
            shard = UnevenShard(self.pipeline.data_counts)
            arrays = shard.whole(arrays)
        return Microbatches(
            functions=ModelFunctions(
                placement=placement, scopes=scopes, end_state=end_state
            ),
            schedule=schedule,
            arrangement=self.pipeline.arrangement,
            weights=weights,
            params=cut(groups, chunks),
            states=cut(states, chunks),
            reduction=LastReduction(placement) if reduces else None,
            end_gradients=ends,
            gradients=jax.eval_shape(lambda tree: cut(tree, chunks), shapes),
            cut=cut(arrays, shard.total if shard else schedule.num_microbatches),
            shard=shard,
            random=random_key(seed, step),
        )
