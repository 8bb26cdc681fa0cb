"""What ends an interval of local steps, as a program to audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.layout import Layout


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
