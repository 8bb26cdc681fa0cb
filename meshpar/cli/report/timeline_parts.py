"""What every picture of a timeline shows, in its unit of time: bars, phases, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshpar.schedules.base import Op
from meshpar.schedules.simulate import Count, Timeline, in_flight, spans

NUM_NAMED_RANKS = 8
"""Ranks that the legend of what is in flight names at most."""

PHASE_ROW = -1
"""The row above rank 0."""

_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input grad", Op.W: "weight grad"}

# Two shades each, by chunk; black is read on all (contrast above 7), and colour-blind
# readers tell them apart (hues of Okabe and Ito, 2008).
_SHADES = {
    Op.F: ("#8ec9f0", "#4fa3dd"),
    Op.B: ("#f7c77a", "#ee9f2d"),
    Op.I: ("#e9b3d3", "#d98abb"),
    Op.W: ("#9fdcc4", "#56bf98"),
}
_PHASE_COLORS = {"warm-up": "#e3e3e3", "steady": "#c4c4c4", "cool-down": "#e3e3e3"}


class Bar(NamedTuple):
    """An action on its rank's row, or a phase on its own, and what is written there.

    Args:
        row: The rank, or `PHASE_ROW`.
        start, length: In time.
        text: Inside of it, where there is room.
        hover: What pointing at it says.
    """

    row: int
    start: float
    length: float
    text: str
    hover: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Bars of one colour, or of one each, as the legend calls them."""

    name: str
    color: str | tuple[str, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class TimelineParts:
    """A timeline in parts, all times in `unit`.

    Args:
        unit: `s`, `ms` or `µs`.
        end: The last end.
        kinds: The actions that take time.
        phases: Warm-up, steady, cool-down, in this order.
        counts: Of each rank, microbatches in flight.
    """

    unit: str
    end: float
    kinds: tuple[Kind, ...]
    phases: Kind
    counts: tuple[tuple[Count, ...], ...]

    @property
    def num_units(self) -> float:
        """How many of the shortest actions the whole is long."""
        lengths = [bar.length for kind in self.kinds for bar in kind.bars]
        return self.end / min(lengths) if lengths else 1.0

    @property
    def changes(self) -> list[float]:
        """When one phase follows another."""
        return [bar.start for bar in self.phases.bars[1:]]

    @property
    def row_names(self) -> dict[int, str]:
        """What the rows are called, from the top down."""
        ranks = range(len(self.counts))
        return {PHASE_ROW: "phase", **{rank: f"rank {rank}" for rank in ranks}}

    @property
    def named_ranks(self) -> range:
        """The ranks that a legend names, where it cannot name all."""
        return range(0, len(self.counts), -(-len(self.counts) // NUM_NAMED_RANKS))

    def shade(self, rank: int) -> float:
        """A rank's place on a colour map; its lightest end is not read on white."""
        return 0.75 * rank / max(1, len(self.counts) - 1)


def timeline_parts(timeline: Timeline) -> TimelineParts:
    """The parts of a timeline."""
    end_s = float(timeline.end_s)
    unit, scale = next(
        (one for one in _UNITS if end_s * one[1] >= 1), _UNITS[-1 if end_s else 1]
    )
    return TimelineParts(
        unit=unit,
        end=end_s * scale,
        kinds=_kinds(timeline, unit, scale),
        phases=_phases(timeline, unit, scale),
        counts=tuple(
            tuple(Count(float(since_s) * scale, number) for since_s, number in of_rank)
            for of_rank in in_flight(timeline)
        ),
    )


def _phases(timeline: Timeline, unit: str, scale: float) -> Kind:
    bars = []
    for name, start_s, end_s in spans(timeline):
        start, end = float(start_s) * scale, float(end_s) * scale
        hover = f"{name}: {start:.4g} to {end:.4g} {unit}"
        bars.append(Bar(PHASE_ROW, start, end - start, name, hover))
    colors = tuple(_PHASE_COLORS[bar.text] for bar in bars)
    return Kind(name="phase", color=colors, bars=tuple(bars))


def _kinds(timeline: Timeline, unit: str, scale: float) -> tuple[Kind, ...]:
    schedule = timeline.schedule
    chunk_of = {
        stage: chunk
        for stages in schedule.stages_of_rank
        for chunk, stage in enumerate(stages)
    }
    names = {
        (op, odd): _NAMES[op] + _of_chunks(odd, schedule.num_chunks)
        for op in Op
        for odd in (0, 1)
    }
    bars: dict[tuple[Op, int], list[Bar]] = {key: [] for key in names}
    for rank, events in enumerate(timeline.events):
        for action, start_s, end_s in events:
            if end_s > start_s:
                key = (action.op, chunk_of[action.stage] % 2)
                start, length = float(start_s) * scale, float(end_s - start_s) * scale
                hover = (
                    f"<b>{action}</b>: {names[key]}<br>rank {rank}, stage "
                    f"{action.stage}, microbatch {action.microbatch}<br>{start:.4g} to "
                    f"{start + length:.4g} {unit}"
                )
                text = str(action.microbatch)
                bars[key].append(Bar(rank, start, length, text, hover))
    return tuple(
        Kind(name=names[op, odd], color=_SHADES[op][odd], bars=tuple(found))
        for (op, odd), found in bars.items()
        if found
    )


def _of_chunks(odd: int, num_chunks: int) -> str:
    if num_chunks == 1:
        return ""
    if num_chunks == 2:
        return f", chunk {odd}"
    return ", odd chunks" if odd else ", even chunks"
