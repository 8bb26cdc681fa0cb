"""A model's loss and gradients with its blocks cut into stages, per device.

One `jax.shard_map`, manual over the batch axes and `stage`: what crosses them is
written here, in `executor` and in `ends`. GSPMD partitions over the other mesh axes.
With one stage it accumulates gradients over microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from meshpar.errors import InputError
from meshpar.layout import BY_COST, Layout
from meshpar.model.contract import Model
from meshpar.model.inputs import split_gradient_inputs
from meshpar.model.parameter import Params
from meshpar.parallel.model_state import sum_statistics, updated_state
from meshpar.parallel.pipeline.executor import Executor
from meshpar.parallel.pipeline.layer_costs import layer_costs
from meshpar.parallel.pipeline.microbatches import Microbatches
from meshpar.parallel.pipeline.model_functions import ModelFunctions
from meshpar.parallel.pipeline.reduction import reduce_in_slices, summed_inputs
from meshpar.parallel.pipeline.stages import Arrangement, arrangement, cut, merge
from meshpar.parallel.placement import REPLICATED, Placement
from meshpar.parallel.program import LossAndGradients, sums_by_name
from meshpar.parallel.reduction import loss_metrics, random_key, safe_inverse
from meshpar.parallel.sequence import outputs_in_order, own_tokens
from meshpar.schedules import OwnSchedule, Schedule, chosen_schedule
from meshpar.schedules.stage_splits import split_by_cost, stage_sizes


@dataclass(frozen=True, kw_only=True)
class PipelineProgram:
    """The functions of an arranged model, to be called inside `jax.jit`.

    Args:
        placement: The model on its mesh, its parameters in the arrangement's order.
        schedule: What every rank does.
        arrangement: Which layers every rank has.
    """

    placement: Placement
    schedule: Schedule
    arrangement: Arrangement

    def loss_and_gradients(self, *of: Any) -> LossAndGradients:
        """Mean loss, more metrics, gradients laid out as the states, model state.

        And the gradient of each input that has one. Arguments as for
        `LocalProgram.loss_and_gradients`.
        """
        placement = self.placement
        model = placement.model

        def local(*of: Any) -> LossAndGradients:
            microbatches = self._microbatches(*of, training=True)
            weight_sum = placement.sum_losses(
                microbatches.weight_sum(), placement.manual_axes
            )
            share = safe_inverse(weight_sum)
            work = microbatches.work(of_loss=share)
            found = Executor(schedule=self.schedule, work=work).loss_and_gradients()
            loss_sum, auxiliary = placement.sum_losses(
                (found.loss_sums[0], found.auxiliary), placement.manual_axes
            )
            for group, sums in zip(model.groups, auxiliary, strict=True):
                loss_sum += group.weighted(sums)
            blocks = [merge(of_group) for of_group in found.block_gradients]
            gradients = reduce_in_slices(placement, found.end_gradients, blocks)
            statistics = sum_statistics(
                placement, [merge(of_group) for of_group in found.statistics]
            )
            new_state = updated_state(placement, of[0], of[1], statistics)
            metrics = loss_metrics(weight_sum, sums_by_name(auxiliary))
            names = sorted(split_gradient_inputs(model.inputs, of[2])[1])
            of_inputs = merge(dict(zip(names, found.input_gradients, strict=True)))
            of_inputs = summed_inputs(placement, of_inputs)
            return loss_sum * share, metrics, gradients, new_state, of_inputs

        return placement.on_training_state(local)(*of)

    def loss_sums(self, *of: Any) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, not in training."""
        placement = self.placement

        def local(*of: Any) -> tuple[jax.Array, jax.Array]:
            work = self._microbatches(*of, training=False).work()
            sums = Executor(schedule=self.schedule, work=work).loss_sums()
            return placement.sum_losses(sums, placement.manual_axes)

        return self.placement.on_state(local, (REPLICATED, REPLICATED))(*of)

    def logits(self, *of: Any) -> Any:
        """What the model's `logits` gives, each array with the example first."""
        one = replace(self, schedule=self.schedule.with_one_microbatch())

        def local(*of: Any) -> Any:
            microbatches = one._microbatches(*of, training=False, natural=True)
            functions = cast(ModelFunctions, microbatches.functions)
            work = microbatches.outputs_work(functions.outputs)
            sums = Executor(schedule=one.schedule, work=work).loss_sums()
            return microbatches.head_shares.whole(sums)

        return outputs_in_order(self.placement, local, of)

    def _microbatches(
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
        placement, chunks = self.placement, self.schedule.num_chunks
        own, order = own_tokens(placement, batch, natural=natural)
        scopes = placement.scopes(training=training, order=order)
        weights, groups = placement.gather_before_loop(params)
        ends, shapes = placement.gradient_shapes(weights, groups)
        end_state, states = placement.model.split(state)
        differs = {"batch": own, "examples": scopes.examples(batch)}
        return Microbatches(
            functions=ModelFunctions(
                placement=placement, scopes=scopes, end_state=end_state
            ),
            schedule=self.schedule,
            arrangement=self.arrangement,
            weights=weights,
            params=cut(groups, chunks),
            states=cut(states, chunks),
            end_gradients=ends,
            gradients=jax.eval_shape(lambda tree: cut(tree, chunks), shapes),
            cut=cut(differs, self.schedule.num_microbatches),
            fixed={"random": random_key(seed, step)},
        )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model arranged for the stages of a layout.

    Args:
        model: Its stacked parameters lie rank by rank.
        schedule: What every rank does.
        arrangement: Which layers every rank has.
        layers_of_stages: How many layers each stage has, first to last.
    """

    model: Model
    schedule: Schedule
    arrangement: Arrangement
    layers_of_stages: tuple[int, ...]

    def program(self, placement: Placement) -> PipelineProgram:
        """The functions of the model on its mesh."""
        return PipelineProgram(
            placement=placement, schedule=self.schedule, arrangement=self.arrangement
        )


def pipeline_of(
    model: Model, layout: Layout, schedule: OwnSchedule | None = None
) -> Pipeline:
    """The model arranged for a layout's stages, and its schedule.

    Args:
        model: The model.
        layout: Its stages, microbatches, chunks and splits.
        schedule: Instead of the one that the layout names.

    Raises:
        InputError: More stages than layers, splits that do not fit, or a schedule that
            is wrong or cannot have those sizes.
    """
    sizes = layers_of_stages(model, layout)
    chosen = chosen_schedule(
        layout.schedule if schedule is None else schedule,
        num_ranks=layout.stage,
        num_microbatches=layout.microbatches,
        chunks=layout.chunks,
    )
    placed = arrangement(chosen, sizes, [group.num_layers for group in model.groups])
    orders = {group.name: placed.order(at) for at, group in enumerate(model.groups)}
    return Pipeline(
        model=model.arranged(orders),
        schedule=chosen,
        arrangement=placed,
        layers_of_stages=sizes,
    )


def layers_of_stages(model: Model, layout: Layout) -> tuple[int, ...]:
    """How many layers each stage of a layout has, first to last.

    Raises:
        InputError: More stages than layers, splits that do not fit, or costs that
            cannot be measured.
    """
    even = stage_sizes(model.num_layers, layout.stage, layout.chunks)
    if layout.splits != BY_COST:
        return stage_sizes(model.num_layers, layout.stage, layout.chunks, layout.splits)
    return split_by_cost(_costs(model), len(even))


def with_costs(model: Model, costs: Sequence[float], layout: Layout) -> Model:
    """The model with what each of its layers costs.

    Raises:
        InputError: The layout does not split by cost, or there are not as many costs as
            layers.
    """
    if layout.splits != BY_COST:
        raise InputError(
            f"layer_costs are given, but layout {str(layout)!r} does not split by "
            "them; say splits=cost, or leave them out",
            key="layout.unused_layer_costs",
        )
    if len(costs) != model.num_layers:
        raise InputError(
            f"the model has {model.num_layers} layers, but {len(costs)} costs; give "
            "one a layer",
            key="model.wrong_number_of_costs",
        )
    groups = []
    for group, first in zip(model.groups, model.first_layers, strict=True):
        own = tuple(costs[first : first + group.num_layers])
        groups.append(replace(group, costs=own))
    return replace(model, groups=tuple(groups))


def arranged_for(model: Model, layout: Layout) -> Model:
    """The model as a step stores it: its layers in the order of a layout's stages.

    Raises:
        InputError: As for `pipeline_of`.
    """
    return pipeline_of(model, layout).model if layout.runs_in_ticks else model


def _costs(model: Model) -> tuple[float, ...]:
    if all(group.costs is not None for group in model.groups):
        return tuple(cost for group in model.groups for cost in group.costs or ())
    return _traced_costs(model)


@functools.lru_cache(maxsize=16)
def _traced_costs(model: Model) -> tuple[float, ...]:
    return layer_costs(model)
