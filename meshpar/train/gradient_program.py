"""Loss and gradients of a training step alone, as a program to audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from meshpar.audit.subject import Subject


class _Audited(Protocol):
    def audit_subject(
        self, *arguments: Any, platform: str | None, gradients_only: bool
    ) -> Subject: ...


@dataclass(frozen=True)
class GradientProgram:
    """A training step without its optimizer: `audit(step.gradient_program, batch)`.

    Gradients are what the program returns, so that they are no temporary memory.
    """

    step: _Audited

    def audit_subject(self, *arguments: Any, platform: str | None = None) -> Subject:
        """As of a `TrainStep`."""
        return self.step.audit_subject(
            *arguments, platform=platform, gradients_only=True
        )
