"""The programs that the options of a step ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding

from meshpar.parallel.pipeline.program import Pipeline
from meshpar.parallel.placement import Placement
from meshpar.parallel.program import LocalProgram
from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.local_steps.state import REPLICA_AXES
from meshpar.train.optimizer.by_layer import by_layer
from meshpar.train.step_functions import StepFunctions
from meshpar.train.step_options import StepOptions
from meshpar.train.step_programs import StepPrograms


def chosen_programs(
    options: StepOptions,
    placement: Placement,
    pipeline: Pipeline | None,
    *,
    batch_sharding: NamedSharding,
    compiler_options: dict[str, Any],
) -> StepPrograms[StepFunctions | LocalStepFunctions, StepFunctions]:
    """A step's programs: of one state, or of replicas that train by themselves.

    Args:
        options: Of the step.
        placement: Where parameters, gradients and states lie.
        pipeline: The model arranged for its stages; None without microbatches.
        batch_sharding: How the arrays of a batch lie.
        compiler_options: XLA's, of every program.
    """
    model, layout = placement.model, placement.layout
    optimizer = by_layer(options.optimizer, model, layout)

    def functions_of(placement: Placement) -> StepFunctions:
        return StepFunctions(
            model_as_given=options.model,
            placement=placement,
            program=pipeline.program(placement)
            if pipeline
            else LocalProgram(placement=placement),
            optimizer=optimizer,
            max_grad_norm=options.max_grad_norm,
            check=options.check,
        )

    functions: StepFunctions | LocalStepFunctions
    functions = whole = functions_of(placement)
    if options.outer_optimizer is not None:
        functions = LocalStepFunctions(
            replica=functions_of(replace(placement, apart=REPLICA_AXES)),
            whole=whole,
            outer_optimizer=by_layer(options.outer_optimizer, model, layout),
        )
    return StepPrograms(
        functions=functions,
        reading=whole,
        batch_sharding=batch_sharding,
        split_space=placement if placement.splits_space else None,
        compiler_options=compiler_options,
    )
