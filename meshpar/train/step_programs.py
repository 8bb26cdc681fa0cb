"""The programs of a training step: its functions under `jax.jit`, laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.sharding import NamedSharding

from meshpar.audit.hazards import PlainConvolutions
from meshpar.parallel.placement import Placement
from meshpar.parallel.space import space_axes, space_dims
from meshpar.rules.sharding import born_sharded
from meshpar.train.batch_program import BatchProgram
from meshpar.train.state import TrainState, without_optimizer
from meshpar.train.step_functions import Batch, Metrics, StepFunctions


class Updating(Protocol):
    """What makes and updates a state."""

    @property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""

    def born(self, seed: jax.Array) -> TrainState:
        """The first state."""

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and metrics."""


class Reading(Protocol):
    """What updates nothing."""

    @property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""

    @property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array."""

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Summed loss and weights."""

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """What the model's `logits` gives."""


_Updating = TypeVar("_Updating", bound=Updating)
_Reading = TypeVar("_Reading", bound=Reading)


@dataclass(frozen=True, kw_only=True)
class StepPrograms(Generic[_Updating, _Reading]):
    """One program for each function; none is compiled before its first call.

    Args:
        functions: What makes and updates a state: `StepFunctions`, those of local
            steps, or those of a step with tables.
        reading: What updates nothing: the same ones; of local steps, those of the
            common parameters.
        batch_sharding: How the arrays of a batch lie that have no split space.
        split_space: Where the arrays lie that have; None where there are none.
        compiler_options: XLA's, of every program.
    """

    functions: _Updating
    reading: _Reading
    batch_sharding: NamedSharding
    split_space: Placement | None
    compiler_options: dict[str, Any]

    @cached_property
    def init(self) -> Callable[..., Any]:
        """Seed -> the first state."""
        return born_sharded(
            self.functions.born,
            self.functions.shardings,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def init_from(self) -> Callable[..., Any]:
        """(seed, (parameters, state)) -> the first state; those given are donated."""
        return jax.jit(
            self.functions.born,
            out_shardings=self.functions.shardings,
            donate_argnums=1,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        shardings = self.functions.shardings
        # Metrics lie as `skipped` does, which is one of them.
        return self._of_batch(
            self.functions.update,
            shardings,
            (shardings, shardings.skipped),
            donated=0,
            trains=True,
        )

    @cached_property
    def gradients(self: StepPrograms[_Updating, StepFunctions]) -> Any:
        """(state without the optimizer's, batch) -> loss, metrics, gradients.

        Of a model alone: a step with tables updates their rows in place.
        """
        return self._of_batch(
            self.reading.loss_and_gradients,
            self._lies_to_use,
            (self._whole, self._whole, self.reading.of_states),
            trains=True,
        )

    @cached_property
    def evaluate(self) -> Any:
        """The same -> summed loss and weights."""
        return self._of_batch(self.reading.evaluated, self._lies_to_use, self._whole)

    @cached_property
    def logits(self) -> Any:
        """The same -> logits."""
        # Of volumes the model says how they lie; nothing gathers them.
        lie = self.batch_sharding if self.split_space is None else None
        return self._of_batch(self.reading.logits, self._lies_to_use, lie)

    @property
    def shapes_to_use(self) -> TrainState:
        """Shape and dtype of what the programs take that update nothing."""
        return without_optimizer(self.reading.state_shapes)

    @property
    def _lies_to_use(self) -> TrainState:
        return without_optimizer(self.reading.shardings)

    @property
    def _whole(self) -> NamedSharding:
        """The sharding of what all devices have, such as the number of steps."""
        return self.reading.shardings.step

    def _of_batch(
        self,
        function: Callable[..., Any],
        state: TrainState,
        results: Any,
        *,
        donated: int | tuple[int, ...] = (),
        trains: bool = False,
    ) -> Any:
        """A function of (state, batch), given how the state and its results lie."""

        def program(batch: Any) -> Any:
            return jax.jit(
                function,
                in_shardings=(state, batch),
                out_shardings=results,
                donate_argnums=donated,
                compiler_options=self.compiler_options,
            )

        space = self.split_space
        if space is None:
            return program(self.batch_sharding)
        plain = PlainConvolutions(
            layout=space.layout,
            space_axes=space_axes(space.model, space.rules),
            space_dims=space_dims(space.model),
        )
        check = plain.check if trains else None
        return BatchProgram(program, space.batch_sharding, check)
