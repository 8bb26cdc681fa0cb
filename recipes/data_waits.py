"""Report which process waits for its data, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = 0.1
"""Share of a step's time that a wait may take before it is printed."""


@dataclass(kw_only=True)
class DataWaits:
    """Time that the steps since the last printed line waited for their batches.

    A step waits for the slowest process, since all of them compute it together.

    Args:
        hosts: The host of each process.
    """

    hosts: Sequence[str]
    num_steps: int = 0
    num_long: int = 0
    worst: tuple[float, int] = (0.0, 0)

    def note(self, step_s: float, data_s: Sequence[float]) -> float:
        """Takes a step's time and each process's wait before it; returns the longest.

        Example:
            >>> waits = DataWaits(hosts=["a", "b"])
            >>> waits.note(0.5, [0.001, 0.25])
            0.25
            >>> waits.line()
            '1 of 1 steps waited for data, the longest 0.250 s for process 1 on b'
        """
        longest = max(data_s)
        self.num_steps += 1
        if longest > _SHARE * step_s:
            self.num_long += 1
            self.worst = max(self.worst, (longest, data_s.index(longest)))
        return longest

    def line(self) -> str | None:
        """Return a line on the waits since the last one, or None without any."""
        told = None
        if self.num_long:
            longest, process = self.worst
            told = (
                f"{self.num_long} of {self.num_steps} steps waited for data, the "
                f"longest {longest:.3f} s for process {process}"
                + (f" on {self.hosts[process]}" if self.hosts[process] else "")
            )
        self.num_steps = self.num_long = 0
        self.worst = (0.0, 0)
        return told
