"""The programs of a training step: its functions under `jax.jit`, laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.audit.plain_convolutions import PlainConvolutions
from meshpar.parallel.space import space_axes, space_dims
from meshpar.rules.sharding import born_sharded
from meshpar.train.batch_program import BatchProgram
from meshpar.train.state import TrainState, check_to_use, without_optimizer
from meshpar.train.step_functions import StepFunctions


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """One program for each function; none is compiled before its first call.

    Args:
        functions: What they compute.
        batch_sharding: How the arrays of a batch lie that have no split space.
        compiler_options: XLA's, of every program.
    """

    functions: StepFunctions
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
    def init_from(self) -> Callable[..., Any]:
        """(seed, parameters, state) -> the first state; those given are donated."""
        return jax.jit(
            self.functions.born_from,
            out_shardings=self.functions.shardings,
            donate_argnums=(1, 2),
            compiler_options=self._options,
        )

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        shardings = self.functions.shardings

        def program(batch: Any) -> Any:
            return jax.jit(
                self.functions.update,
                in_shardings=(shardings, batch),
                out_shardings=(shardings, self._replicated),
                donate_argnums=0,
                compiler_options=self._options,
            )

        return self._of_batch(program, trains=True)

    @cached_property
    def gradients(self) -> Any:
        """(state without the optimizer's, batch) -> loss, metrics, gradients."""
        replicated = self._replicated
        return self._of_parameters(
            self.functions.loss_and_gradients,
            (replicated, replicated, self.functions.of_states),
            trains=True,
        )

    @cached_property
    def evaluate(self) -> Any:
        """The same -> summed loss and weights."""
        return self._of_parameters(self.functions.evaluated, self._replicated)

    @cached_property
    def logits(self) -> Any:
        """The same -> logits."""
        # Of volumes the model says how they lie; nothing gathers them.
        split = self.functions.placement.splits_space
        return self._of_parameters(
            self.functions.logits, None if split else self.batch_sharding
        )

    def to_use(self, state: TrainState) -> TrainState:
        """What the programs that update nothing take."""
        check_to_use(state, self.functions.state_shapes, self.functions.placement.mesh)
        return without_optimizer(state)

    @property
    def shapes_to_use(self) -> TrainState:
        """Shape and dtype of that."""
        return without_optimizer(self.functions.state_shapes)

    def _of_parameters(
        self,
        function: Callable[..., Any],
        out_shardings: Any,
        trains: bool = False,
    ) -> Any:
        state = without_optimizer(self.functions.shardings)

        def program(batch: Any) -> Any:
            return jax.jit(
                function,
                in_shardings=(state, batch),
                out_shardings=out_shardings,
                compiler_options=self._options,
            )

        return self._of_batch(program, trains)

    def _of_batch(self, program: Callable[[Any], Any], trains: bool) -> Any:
        placement = self.functions.placement
        if not placement.splits_space:
            return program(self.batch_sharding)
        plain = PlainConvolutions(
            layout=placement.layout,
            space_axes=space_axes(placement.model, placement.rules),
            space_dims=space_dims(placement.model),
        )
        check = plain.check if trains else None
        return BatchProgram(program, placement.batch_sharding, check)

    @property
    def _options(self) -> dict[str, Any] | None:
        return dict(self.compiler_options) or None

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.functions.placement.mesh, PartitionSpec())
