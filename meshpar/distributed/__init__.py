"""Many processes as one job: they find and join each other, and end together.

`start.start` joins the processes that options or a scheduler name (`cluster`),
`processes.Processes` exchanges values between them, `roll_call` waits for all, and
`endings` gives exit statuses. No mesh and no layout is known here.
"""

from __future__ import annotations

from meshpar.distributed.cluster import Place, find_place
from meshpar.distributed.endings import LOST, DistributedError, exit_status, leave
from meshpar.distributed.processes import Processes
from meshpar.distributed.start import start

status_of = exit_status
"""Deprecated name of `exit_status`; goes with the next release."""

__all__ = [
    "LOST",
    "DistributedError",
    "Place",
    "Processes",
    "exit_status",
    "find_place",
    "leave",
    "start",
    "status_of",
]
