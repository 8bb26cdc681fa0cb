"""Steps of PipeDream: an update of every stage after each microbatch, not one a batch.

`schedule=pipedream_stash` trains otherwise than every other layout
(`meshpar.schedules.pipedream_stash`). A step takes a batch of `microbatches`
minibatches and makes as many updates; the optimizer's own count of steps grows by as
many. Its loss is the mean over the batch, each minibatch's with the weights that its
forward used. The pipeline drains before a step ends, so that a checkpoint holds
parameters and optimizer state alone, and resumes under any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.parallel.pipeline.program import PipelineProgram
from meshpar.parallel.pipeline.weight_stash import WeightStash, parameter_parts
from meshpar.parallel.placement import BATCH, REPLICATED, Placement
from meshpar.parallel.zero import manual_spec
from meshpar.schedules import WeightVersions
from meshpar.train.optimizer.by_stage import StageOptimizer, by_stage
from meshpar.train.state import TrainState, join_constants, split_constants
from meshpar.train.step_functions import Batch, Metrics, StepFunctions


def stashed_step_functions(
    whole: StepFunctions, optimizer: optax.GradientTransformation, stages: int
) -> StashedStepFunctions:
    """Return the functions of steps in which each stage updates its weights by itself.

    Args:
        whole: Functions of the same model, arranged for its stages.
        optimizer: As for a tree in which every parameter is one layer's.
        stages: Number of stages.

    Raises:
        InputError: The model or the optimizer needs one update a batch.
    """
    model = whole.model
    _check_model(model)
    parts, of_both = parameter_parts(model)
    if of_both:
        raise InputError(
            f"{_ASKED}, but embed and head both read {', '.join(of_both)}, which the "
            "first and the last stage would update at different times; give each its "
            "own, or take schedule=1f1b",
            key="model.parameter_of_two_stages",
        )
    stage_optimizer = by_stage(optimizer, model, parts, stages)
    return StashedStepFunctions(whole=whole, parts=parts, optimizer=stage_optimizer)


def stash_note(layout: Layout) -> str:
    """Return what a layout with stashed weights changes, in a line."""
    return (
        f"schedule={layout.schedule} changes the update: a step makes "
        f"{layout.microbatches} updates, each of one microbatch, with gradients that "
        f"are late by up to {layout.stage - 1} of them; its losses are not those of "
        "other layouts"
    )


_ASKED = "schedule=pipedream_stash updates each stage by itself after every microbatch"


def _check_model(model: Model) -> None:
    for group in model.groups:
        if group.enter is not None:
            raise InputError(
                f"{_ASKED}, but group {group.name!r} has an enter, which reads "
                "parameters of the ends in another stage; take schedule=1f1b",
                key="model.enter_of_other_stage",
            )
    if model.changes_state:
        raise InputError(
            f"{_ASKED}, but the model changes its state once a batch; take "
            "schedule=1f1b",
            key="model.state_of_one_update",
        )
    for name, one in model.known_inputs.items():
        if one.has_gradient:
            raise InputError(
                f"{_ASKED}, but the gradient of input {name!r} is found once a batch; "
                "take schedule=1f1b",
                key="model.input_gradient_of_one_update",
            )


@dataclass(frozen=True, kw_only=True)
class StashedStepFunctions:
    """The functions of steps in which each stage updates its weights by itself.

    Args:
        whole: Functions of the same model that update nothing, and of its state.
        parts: The `Part` of each parameter.
        optimizer: The optimizer of one stage.
    """

    whole: StepFunctions
    parts: Params
    optimizer: StageOptimizer

    @property
    def model(self) -> Model:
        """The model arranged for its stages."""
        return self.whole.model

    @property
    def placement(self) -> Placement:
        """Specs of every parameter, gradient and state."""
        return self.whole.placement

    @property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return self.whole.state_shapes

    @property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        return self.whole.shardings

    @property
    def layer_orders(self) -> TrainState:
        """A `LayerOrder` for every array of the state."""
        return self.whole.layer_orders

    @property
    def initial_state(self) -> Callable[..., TrainState]:
        """Seed -> the first state."""
        return self.whole.initial_state

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the state after the updates of all microbatches, and scalars.

        Where the loss or a gradient is not finite, the whole step changes nothing.
        """
        self.whole.check_examples(batch)
        state = split_constants(self.model, state)
        loss, norm, more, params, opt_state = self._trained(
            state.params,
            state.opt_state,
            state.model_state,
            batch,
            state.step,
            state.seed,
        )
        counts = jnp.isfinite(loss) & jnp.isfinite(norm) & (more["weight_sum"] != 0)
        keep = lambda new, old: jnp.where(counts, new, old)  # noqa: E731
        state = replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + jnp.where(counts, 0, 1),
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        )
        metrics = {"loss": loss, "grad_norm": norm, **more, "skipped": state.skipped}
        return join_constants(self.model, state), metrics

    @cached_property
    def _trained(self) -> Callable[..., tuple]:
        """Parameters, states and a batch -> loss, norm, metrics, and new states."""
        placement = self.placement
        specs = placement.manual_specs
        opt_specs = jax.tree.map(
            lambda one: manual_spec(one.spec),
            split_constants(self.model, self.shardings).opt_state,
            is_leaf=lambda node: isinstance(node, NamedSharding),
        )
        given = specs, opt_specs, placement.manual_model_state_specs
        return placement.on_shards(
            self._trained_here,
            (*given, BATCH, REPLICATED, REPLICATED),
            (REPLICATED, REPLICATED, REPLICATED, specs, opt_specs),
        )

    def _trained_here(
        self, params: Params, opt_state: Any, model_state: Params, *others: Any
    ) -> tuple:
        program: PipelineProgram = self.whole.program
        placement = self.placement
        microbatches = program.microbatches(params, model_state, *others, training=True)
        weight_sums = placement.sum_losses(
            microbatches.weight_sums(), placement.manual_axes
        )
        executor = microbatches.executor(microbatches.work(), weight_sums[0])
        stash = WeightStash(
            placement=placement,
            microbatches=microbatches,
            params=params,
            opt_state=self.optimizer.for_parts(opt_state),
            parts=self.parts,
            slots=WeightVersions(executor.schedule, executor.table),
            weight_sums=weight_sums,
            update=self.optimizer.update,
        )
        last = replace(executor, learning=stash).last_state()
        loss, metrics = program.loss_and_metrics(last.results, jnp.sum(weight_sums))
        learned = last.weights
        opt_state = self.optimizer.whole(learned.opt_state)
        return loss, stash.norm(learned), metrics, stash.last(learned), opt_state
