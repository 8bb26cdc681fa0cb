"""Many processes as one job: found, joined, watched, and ended together."""

from __future__ import annotations

from meshpar.distributed.cluster import Place, find_place
from meshpar.distributed.errors import LOST, DistributedError, status_of
from meshpar.distributed.leave import leave
from meshpar.distributed.processes import Processes
from meshpar.distributed.start import start

__all__ = [
    "LOST",
    "DistributedError",
    "Place",
    "Processes",
    "find_place",
    "leave",
    "start",
    "status_of",
]
