"""The programs of local steps: each replica's own step, and their average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.rules.sharding import born_sharded
from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.local_steps.state import REPLICA_AXES
from meshpar.train.state import TrainState, check_state, without_optimizer
from meshpar.train.step_programs import StepPrograms


@dataclass(frozen=True, kw_only=True)
class LocalStepPrograms:
    """One program for each function; none is compiled before its first call.

    What updates nothing is of the common parameters, under plain data parallel.

    Args:
        functions: What they compute.
        batch_sharding: How the arrays of a batch lie.
        compiler_options: XLA's, of every program.
    """

    functions: LocalStepFunctions
    batch_sharding: NamedSharding
    compiler_options: Mapping[str, Any]

    @cached_property
    def init(self) -> Callable[..., Any]:
        """Seed -> the first state."""
        functions, options = self.functions, self._options
        return born_sharded(
            functions.born, functions.shardings, compiler_options=options
        )

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        functions = self.functions
        each = NamedSharding(functions.placement.mesh, PartitionSpec(REPLICA_AXES))
        return jax.jit(
            functions.update,
            in_shardings=(functions.shardings, self.batch_sharding),
            out_shardings=(functions.shardings, each),
            donate_argnums=0,
            compiler_options=self._options,
        )

    @cached_property
    def sync(self) -> Any:
        """State -> the state after the outer optimizer's step; it is donated."""
        shardings = self.functions.shardings
        return jax.jit(
            self.functions.sync,
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
            compiler_options=self._options,
        )

    @cached_property
    def agreed(self) -> Any:
        """State -> what the programs that update nothing take."""
        return jax.jit(
            self.functions.agreed,
            in_shardings=(self.functions.shardings,),
            out_shardings=without_optimizer(self.functions.whole.shardings),
            compiler_options=self._options,
        )

    @property
    def gradients(self) -> Any:
        """(common parameters, batch) -> loss, metrics, gradients."""
        return self._whole.gradients

    @property
    def evaluate(self) -> Any:
        """The same -> summed loss and weights."""
        return self._whole.evaluate

    @property
    def logits(self) -> Any:
        """The same -> logits."""
        return self._whole.logits

    def to_use(self, state: TrainState) -> TrainState:
        """What the programs that update nothing take: the common parameters."""
        check_state(state, self.functions.state_shapes, self.functions.placement.mesh)
        return self.agreed(state)

    @property
    def shapes_to_use(self) -> TrainState:
        """Shape and dtype of that."""
        return self._whole.shapes_to_use

    @cached_property
    def _whole(self) -> StepPrograms:
        return StepPrograms(
            functions=self.functions.whole,
            batch_sharding=self.batch_sharding,
            compiler_options=self.compiler_options,
        )

    @property
    def _options(self) -> dict[str, Any] | None:
        return dict(self.compiler_options) or None
