"""A link: how fast the devices of a mesh axis communicate, and over what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """What a group of devices covers of one dim of a torus.

    Args:
        size: Devices along it.
        links: Those of each device that its ring uses: two where its ends are joined,
            otherwise one, since the way back takes the other directions.
    """

    size: int
    links: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a mesh axis of a layout communicates over.

    Args:
        name: `none`, `host`, `torus` or `network`, as reports say it.
        bytes_per_s: Achieved by one device in one direction in a ring.
        hop_s: Latency of one step.
        port_bytes_per_s: What one device sends to one other: through its own port, or
            over one link of a torus; `bytes_per_s` when 0.
        inner: Members of a group that one host holds; the ring steps that stay inside.
        inner_hop_s: Latency of those.
        spans: How a group lies on a torus; () elsewhere.
        scatters_whole: Whether a reduce-scatter is run as an all-reduce, of which each
            device keeps its part.
    """

    name: str
    bytes_per_s: float
    hop_s: float
    port_bytes_per_s: float = 0.0
    inner: int = 1
    inner_hop_s: float = 0.0
    spans: tuple[Span, ...] = ()
    scatters_whole: bool = False

    def __post_init__(self) -> None:
        if not self.port_bytes_per_s:
            object.__setattr__(self, "port_bytes_per_s", self.bytes_per_s)
