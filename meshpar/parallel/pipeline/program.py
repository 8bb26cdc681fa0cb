"""A model's loss and gradients with its blocks cut into stages, per device.

One `jax.shard_map`, manual over the batch axes and `stage`: what crosses them is
written here, in `executor` and in `ends`. GSPMD partitions over the other mesh axes.
With one stage it accumulates gradients over microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from meshpar.errors import InputError
from meshpar.layout import BY_COST, MANUAL_AXES, Layout
from meshpar.model.contract import Model, Params
from meshpar.model.scope import Batch
from meshpar.parallel.pipeline.executor import Executor, Work
from meshpar.parallel.pipeline.layer_costs import layer_costs
from meshpar.parallel.pipeline.microbatches import Microbatches
from meshpar.parallel.pipeline.schedule_choice import OwnSchedule, chosen_schedule
from meshpar.parallel.pipeline.stages import (
    Arrangement,
    arranged,
    arrangement,
    cut,
    merge,
    only_group,
)
from meshpar.parallel.placement import (
    BATCH,
    REPLICATED,
    Placement,
    dropout_key,
    metrics_of,
    safe_inverse,
)
from meshpar.schedules import Schedule, tick_table
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

    def loss_and_gradients(
        self, params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
        """Mean loss, more metrics, and gradients laid out as the states."""
        placement = self.placement

        def local(
            params: Params, batch: Batch, step: jax.Array, seed: jax.Array
        ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
            work = self._microbatches(params, batch, dropout_key(seed, step)).work()
            found = self._run(work).loss_and_gradients()
            (loss_sum, weight_sum), auxiliary = placement.sum_losses(
                (found.loss_sums, found.auxiliary), MANUAL_AXES
            )
            loss_sum += only_group(placement.model).weighted(auxiliary)
            share = safe_inverse(weight_sum)
            blocks = [merge(found.block_gradients)]
            gradients = placement.reduce(
                found.end_gradients, blocks, after=loss_sum, scale=share
            )
            return loss_sum * share, metrics_of(weight_sum, auxiliary), gradients

        specs = placement.manual_specs
        return placement.on_shards(
            local,
            (specs, BATCH, REPLICATED, REPLICATED),
            (REPLICATED, REPLICATED, placement.manual_state_specs),
        )(params, batch, step, seed)

    def loss_sums(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, without dropout."""
        placement = self.placement

        def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            work = self._microbatches(params, batch, None).work()
            return placement.sum_losses(self._run(work).loss_sums(), MANUAL_AXES)

        return placement.on_shards(
            local, (placement.manual_specs, BATCH), (REPLICATED, REPLICATED)
        )(params, batch)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """fp32 logits (batch, seq, vocab), without dropout."""
        placement = self.placement
        one = replace(self, schedule=self.schedule.of_one_microbatch())

        def local(params: Params, batch: Batch) -> jax.Array:
            work = one._microbatches(params, batch, None)
            share = one._run(work.logits_work()).loss_sums()
            return work.shares.whole(share)

        return placement.on_shards(local, (placement.manual_specs, BATCH), BATCH)(
            params, batch
        )

    def _microbatches(
        self, params: Params, batch: Batch, key: jax.Array | None
    ) -> Microbatches:
        schedule = self.schedule
        weights, (blocks,) = self.placement.gather_before_loop(params)
        ends, (shapes,) = self.placement.gradient_shapes(weights, [blocks])
        return Microbatches(
            placement=self.placement,
            arrangement=self.arrangement,
            weights=weights,
            blocks=cut(blocks, schedule.num_chunks),
            end_gradients=ends,
            gradients=jax.eval_shape(
                lambda tree: cut(tree, schedule.num_chunks), shapes
            ),
            batch=cut(batch, schedule.num_microbatches),
            key=key,
        )

    def _run(self, work: Work) -> Executor:
        return Executor(
            table=tick_table(self.schedule),
            num_stages=self.schedule.num_stages,
            work=work,
            in_order=self.placement.in_order,
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
        InputError: More stages than layers, splits that do not fit, a schedule that is
            wrong or cannot have those sizes, or several groups of blocks.
    """
    sizes = layers_of_stages(model, layout)
    chosen = chosen_schedule(
        layout.schedule if schedule is None else schedule,
        num_ranks=layout.stage,
        num_microbatches=layout.microbatches,
        chunks=layout.chunks,
    )
    placed = arrangement(chosen, sizes)
    return Pipeline(
        model=arranged(model, placed.order),
        schedule=chosen,
        arrangement=placed,
        layers_of_stages=sizes,
    )


def layers_of_stages(model: Model, layout: Layout) -> tuple[int, ...]:
    """How many layers each stage of a layout has, first to last.

    Raises:
        InputError: More stages than layers, splits that do not fit, costs that cannot
            be measured, or several groups of blocks.
    """
    group = only_group(model)
    even = stage_sizes(group.num_layers, layout.stage, layout.chunks)
    if layout.splits != BY_COST:
        return stage_sizes(group.num_layers, layout.stage, layout.chunks, layout.splits)
    costs = group.costs or layer_costs(model)
    return split_by_cost(costs, len(even))


def with_costs(model: Model, costs: Sequence[float], layout: Layout) -> Model:
    """The model with what each of its layers costs.

    Raises:
        InputError: The layout does not split by cost, the model has several groups of
            blocks, or there are not as many costs as layers.
    """
    if layout.splits != BY_COST:
        raise InputError(
            f"layer_costs are given, but layout {str(layout)!r} does not split by "
            "them; say splits=cost, or leave them out"
        )
    group = replace(only_group(model), costs=tuple(costs))
    return replace(model, groups=(group,))


def arranged_for(model: Model, layout: Layout) -> Model:
    """The model as a step stores it: its layers in the order of a layout's stages.

    Raises:
        InputError: As for `pipeline_of`.
    """
    return pipeline_of(model, layout).model if layout.is_pipelined else model
