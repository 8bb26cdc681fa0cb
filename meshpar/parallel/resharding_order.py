"""In which order arrays move, and which by way of the host, for the least memory.

While an array moves, a device has it twice: as it was and as it is to be. First go
those that become smaller, the least of them first, then those that grow, the most of
them first (Johnson 1954: two machines in a row, by time on each, here bytes). One that
even so has no room below

    max(all before, all after) + one layer

is copied into the host's memory, given up, and read from there: then a device never has
it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshpar.parallel.array_move import ArrayMove, DeviceBytes


@dataclass(frozen=True, kw_only=True)
class MovingMemory:
    """Bytes of a device while parameters move.

    Args:
        before: As they lie.
        after: As they are to lie.
        layer: One layer of all of them, in the layout where that is more.
        peak: Most at any time, programs' temporary memory among them.
        by_host: Of what goes by way of the host's memory, as it is to lie.
    """

    before: int
    after: int
    layer: int
    peak: int
    by_host: int

    @property
    def limit(self) -> int:
        """What `peak` is to stay below."""
        return max(self.before, self.after) + self.layer


@dataclass(frozen=True, kw_only=True)
class Order:
    """Arrays as they move, one after another.

    Args:
        steps: Each array, and whether it goes by way of the host.
        memory: What that takes.
    """

    steps: tuple[tuple[ArrayMove, bool], ...]
    memory: MovingMemory


def ordered(moves: Sequence[ArrayMove], *, by_host: bool = True) -> Order:
    """The order of some arrays that are given up as they move.

    Args:
        moves: Of all parameters.
        by_host: Whether what has no room may go by way of the host's memory.
    """
    sizes = [one.bytes for one in moves]
    before = sum(size.before for size in sizes)
    after = sum(size.after for size in sizes)
    memory = MovingMemory(
        before=before,
        after=after,
        layer=_layer_bytes(sizes),
        peak=max(before, after),
        by_host=0,
    )
    if not any(one.meets_itself for one in moves):
        extra = max((one.extra_bytes for one in moves), default=0)
        memory = replace(memory, peak=memory.peak + extra)
        return Order(steps=tuple((one, False) for one in moves), memory=memory)
    held = peak = before
    of_host = 0
    steps = []
    for one in sorted(moves, key=_urgency):
        size = one.bytes
        needed = held + size.after + one.extra_bytes
        parks = by_host and needed > memory.limit and one.can_park
        if parks:
            needed, of_host = held + max(size.growth, 0), of_host + size.after
        steps.append((one, parks))
        held += size.growth
        peak = max(peak, needed)
    memory = replace(memory, peak=peak, by_host=of_host)
    return Order(steps=tuple(steps), memory=memory)


def _layer_bytes(sizes: Sequence[DeviceBytes]) -> int:
    layers = (size.layer_before for size in sizes), (size.layer_after for size in sizes)
    return max(map(sum, layers))


def _urgency(one: ArrayMove) -> tuple[bool, int]:
    size = one.bytes
    grows = size.growth > 0
    return grows, -size.before if grows else size.after
