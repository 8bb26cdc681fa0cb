"""What ends an interval of local steps, as a program to audit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.local_steps.state import outer_of


class _Audited(Protocol):
    layout: Layout

    def audit_subject(
        self, *arguments: Any, platform: str | None, sync_only: bool
    ) -> Subject: ...


@dataclass(frozen=True)
class SyncProgram:
    """The average and the outer optimizer: `audit(step.sync_program, batch)`."""

    step: _Audited

    def audit_subject(self, *arguments: Any, platform: str | None = None) -> Subject:
        """As of a `TrainStep`.

        Raises:
            InputError: The step has no local steps.
        """
        if self.step.layout.sync_every == 1:
            raise InputError(
                f"layout {str(self.step.layout)!r} has sync_every=1 and averages "
                "nothing but gradients; set it to 2 or more"
            )
        return self.step.audit_subject(*arguments, platform=platform, sync_only=True)


def sync_notes(functions: LocalStepFunctions, layout: Layout) -> tuple[str, ...]:
    """What a reader of a local step's audit should know of the average."""
    common = outer_of(functions.state_shapes).start, functions.of_states
    parts = jax.tree.map(
        lambda shape, sharding: math.prod(sharding.shard_shape(shape.shape)), *common
    )
    num_bytes = 4 * sum(jax.tree.leaves(parts))
    return (
        f"sync_every={layout.sync_every}: nothing of this program crosses 'data'; "
        f"after every {layout.sync_every} steps another all-reduces {num_bytes:,} "
        "bytes of each device there (step.sync_program)",
    )
