"""Time of a piece of work: what computes, and what waits for each mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST = "host"
"""Key of `Cost.exposed_s` for waits on the host's memory, which is no mesh axis."""


@dataclass(frozen=True)
class Cost:
    """Seconds of work on one device.

    Args:
        compute_s: Computing.
        exposed_s: Waiting for a collective that nothing hides, by mesh axis; for the
            host's memory as `HOST`.
        hidden_s: Of that computing, what already runs beside collectives.

    Example:
        >>> (Cost(1.0, {"tensor": 0.5}) * 2 + Cost(1.0)).total_s
        4.0
    """

    compute_s: float = 0.0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.compute_s + sum(self.exposed_s.values())

    def __add__(self, other: Cost) -> Cost:
        exposed_s = dict(self.exposed_s)
        for mesh_axis, seconds in other.exposed_s.items():
            exposed_s[mesh_axis] = exposed_s.get(mesh_axis, 0.0) + seconds
        return Cost(
            self.compute_s + other.compute_s, exposed_s, self.hidden_s + other.hidden_s
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.compute_s * times,
            {mesh_axis: s * times for mesh_axis, s in self.exposed_s.items()},
            self.hidden_s * times,
        )
