"""What is said, and with which status, when processes do not come together."""

from __future__ import annotations

from meshpar.errors import InputError

LOST = 75
"""Exit status of a process that ends because another one has: a scheduler may start all
of them again (EX_TEMPFAIL of sysexits.h)."""


class DistributedError(InputError, RuntimeError):
    """Processes that could not come together, or not stay so."""
