"""One program of a training step alone, to audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshpar.audit.subject import Subject


@dataclass(frozen=True)
class AuditedProgram:
    """What `meshpar.audit` takes: `audit(step.gradient_program, batch)`.

    Args:
        audit_subject: As of a `TrainStep`.
    """

    audit_subject: Callable[..., Subject]
