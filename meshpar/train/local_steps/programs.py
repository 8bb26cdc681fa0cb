"""The programs of local steps beside each replica's own step: of what is in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.state import without_optimizer


@dataclass(frozen=True, kw_only=True)
class SyncPrograms:
    """The average of replicas; nothing is compiled before its first call.

    Args:
        functions: What they compute.
        compiler_options: XLA's, of every program.
    """

    functions: LocalStepFunctions
    compiler_options: dict[str, Any]

    @cached_property
    def sync(self) -> Any:
        """State -> the state after the outer optimizer's step; it is donated."""
        shardings = self.functions.shardings
        return jax.jit(
            self.functions.sync,
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def agreed(self) -> Any:
        """State -> what the programs that update nothing take."""
        return jax.jit(
            self.functions.agreed,
            in_shardings=(self.functions.shardings,),
            out_shardings=without_optimizer(self.functions.whole.shardings),
            compiler_options=self.compiler_options,
        )
