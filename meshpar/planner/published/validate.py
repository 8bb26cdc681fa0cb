"""Errors of the planner against published runs: every row, their mean and maximum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from meshpar.planner.known_errors import ErrorRange
from meshpar.planner.published import compiled, others, tables
from meshpar.planner.published.megatron import Measured


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of the counted rows of one group.

    Args:
        group: Name of the group.
        count: Counted rows.
        mean_error, max_error: Mean and maximum of the absolute relative errors.
        target_mean, target_max: Largest accepted values; None for no target.
    """

    group: str
    count: int
    mean_error: float
    max_error: float
    target_mean: float | None = None
    target_max: float | None = None

    @property
    def met(self) -> bool:
        """True if both targets are met."""
        return (self.target_mean is None or self.mean_error <= self.target_mean) and (
            self.target_max is None or self.max_error <= self.target_max
        )


class _Goal(NamedTuple):
    """A group of sources of step times, with the largest accepted errors."""

    group: str
    sources: tuple[str, ...]
    mean: float | None
    max: float | None = None


# Of Korthikanti et al. 2022 what Calculon achieves there (Isaev et al. 2023): mean
# 3.65 %, max 8.87 %. The other goals are this project's own, set below the means that
# earlier formulas missed rows by which they had not seen: 3.0 % (A100), 15.9 % (H100),
# 45 % (ZeRO-3), 7.6 % (memory).
_GOALS = (
    _Goal(
        "step time, A100 (Korthikanti et al. 2022)",
        ("Korthikanti et al. 2022",),
        0.0365,
        0.0887,
    ),
    _Goal("step time, A100 (Narayanan et al. 2021)", ("Narayanan et al. 2021",), 0.02),
    _Goal(
        "step time, H100 (nanotron, Megatron-Core)",
        ("Tazi et al. 2025", "Megatron-LM README"),
        0.08,
    ),
    _Goal(
        "step time, A100 (DeepSpeed ZeRO-3)", ("Narayanan et al. 2021, ZeRO-3",), 0.15
    ),
    _Goal("step time, TPU (MaxText)", ("MaxText README",), 0.10, 0.20),
    _Goal(
        "step time, TPU, 64K to 2M tokens (MaxText)",
        ("MaxText long context",),
        0.10,
        0.20,
    ),
    _Goal(
        "step time, experts on GB200 and H100 (Megatron Bridge)",
        ("Megatron Bridge 25.11",),
        0.10,
        0.20,
    ),
    _Goal(
        "step time, A100 (forks of Megatron-LM), no target",
        ("Qi et al. 2024", "Yeung et al. 2024"),
        None,
    ),
    _Goal(
        "step time, public tables, dense on H100",
        ("NeMo dense H100", "MaxText (XLA) H100"),
        0.05,
        0.10,
    ),
    _Goal(
        "step time, public tables, dense on GB200",
        ("NeMo dense GB200",),
        0.10,
        0.20,
    ),
    # Without a largest error: one row is 33 % off, whose time leaves no room for the
    # bubble of its pipeline (docs/guides/planner.md).
    _Goal(
        "step time, public tables, dense in fp8 on H100 and Blackwell",
        ("NeMo dense fp8", "Bridge dense fp8"),
        0.10,
    ),
    _Goal(
        "step time, public tables, TPU",
        (
            "MaxText TPU v6e",
            "Long context TPU v5p",
            "MaxText TPU v5p",
            "MaxText TPU v7x",
            "Long context TPU v7x",
        ),
        0.10,
        0.20,
    ),
    # Means and largest errors without targets are missed: docs/guides/planner.md.
    _Goal(
        "step time, public tables, experts on TPU v7x, no target",
        ("MaxText experts TPU v7x",),
        None,
    ),
    _Goal(
        "step time, public tables, experts on H100 (NeMo)",
        ("NeMo experts H100",),
        0.10,
        0.20,
    ),
    # Without a largest error: one layout is 51 % off, two are 28 %.
    _Goal(
        "step time, public tables, experts on H100 and Blackwell (Megatron Bridge)",
        ("Bridge experts", "Bridge experts fp8"),
        0.10,
    ),
    # Three rows of one run miss by 65 %: docs/guides/planner.md.
    _Goal(
        "step time, public tables, experts on GB200 (NeMo), no target",
        ("NeMo experts GB200",),
        None,
    ),
    _Goal("step time, A100 (PyTorch FSDP)", ("PyTorch FSDP A100",), 0.10, 0.20),
    _Goal("step time, H100 (PyTorch FSDP)", ("PyTorch FSDP H100",), 0.10, 0.20),
    _Goal(
        "step time, H100 (PyTorch FSDP in fp8)",
        ("PyTorch FSDP H100 fp8", "LLM Foundry H100 fp8"),
        0.10,
        0.20,
    ),
    # Both have runs, three in a hundred, that take a fourth longer than their neighbors
    # in the table: without a largest error.
    _Goal("step time, A100 (LLM Foundry)", ("LLM Foundry A100",), 0.10),
    _Goal("step time, H100 (LLM Foundry)", ("LLM Foundry H100",), 0.10),
    _Goal(
        "step time, MI300X and MI325X (Primus)",
        ("Primus MI300X", "Primus MI325X"),
        0.10,
        0.20,
    ),
)
_MEMORY_MEAN = 0.06
_COMPILED_MEAN, _COMPILED_MAX = 0.04, 0.12
_QUANTITIES = ("layer", "step", "memory", "compiled memory")


def rows() -> list[Measured]:
    """Return every published number that the planner is compared with."""
    return list(_rows())


@cache
def _rows() -> tuple[Measured, ...]:
    sources = (*others.SOURCES, *tables.SOURCES, compiled.compiled_memory)
    return tuple(row for source in sources for row in source())


def summaries(measured: Iterable[Measured]) -> list[Summary]:
    """Summarize the errors of each group; rows that calibrate are not counted."""
    measured = list(measured)
    memory = [row for row in measured if row.quantity == "memory"]
    programs = [row for row in measured if row.quantity == "compiled memory"]
    return [
        *_by_source(measured),
        *(
            _summary(
                goal.group,
                [
                    row
                    for row in measured
                    if row.quantity == "step" and row.source in goal.sources
                ],
                goal.mean,
                goal.max,
            )
            for goal in _GOALS
        ),
        _summary("memory", memory, _MEMORY_MEAN, None),
        _summary("memory, compiled programs", programs, _COMPILED_MEAN, _COMPILED_MAX),
    ]


def _by_source(measured: list[Measured]) -> Iterator[Summary]:
    """Yield a summary without target of every quantity of every source."""
    for quantity in _QUANTITIES:
        for source in dict.fromkeys(row.source for row in measured):
            of_it = (quantity, source)
            own = [row for row in measured if (row.quantity, row.source) == of_it]
            if any(row.counts for row in own):
                yield _summary(f"{quantity}, {source}", own, None, None)


def _summary(
    group: str,
    measured: list[Measured],
    target_mean: float | None,
    target_max: float | None,
) -> Summary:
    errors = [abs(row.error) for row in measured if row.counts]
    return Summary(
        group=group,
        count=len(errors),
        mean_error=sum(errors) / len(errors),
        max_error=max(errors),
        target_mean=target_mean,
        target_max=target_max,
    )


def error_ranges(measured: Iterable[Measured]) -> dict[str, ErrorRange]:
    """Return the range of measured over predicted step time of each regime."""
    ratios: dict[str, list[float]] = {}
    for row in measured:
        if row.regime and row.counts:
            ratios.setdefault(row.regime, []).append(row.measured / row.predicted)
    return {
        name: ErrorRange(len(its), round(min(1, *its), 3), round(max(1, *its), 3))
        for name, its in sorted(ratios.items())
    }


def as_json(measured: list[Measured]) -> dict[str, Any]:
    """Return the rows and summaries as one JSON object."""
    return {
        "rows": [{**asdict(row), "error": row.error} for row in measured],
        "summaries": [
            {**asdict(summary), "met": summary.met} for summary in summaries(measured)
        ],
    }


def text(measured: list[Measured]) -> str:
    """Return the table as text, grouped by quantity and source, then the summaries."""
    lines = [f"{'measured':>9} {'predicted':>9} {'error':>7}     run"]
    heading = ("", "")
    sources = [source for goal in _GOALS for source in goal.sources]
    sources.append(compiled.SOURCE)

    def place(row: Measured) -> tuple[int, int]:
        return _QUANTITIES.index(row.quantity), sources.index(row.source)

    for row in sorted(measured, key=place):
        if (row.quantity, row.source) != heading:
            heading = (row.quantity, row.source)
            lines.append(f"{row.quantity}, {row.source}")
        note = " (calibrates)" if row.calibrates else ""
        note = f" ({row.apart})" if row.apart else note
        note += "" if row.fits else " (said not to fit)"
        lines.append(
            f"{row.measured:9.4g} {row.predicted:9.4g} {row.error:+7.1%} {row.unit:>3} "
            f"{row.name}{note}"
        )
    return "\n".join([*lines, *map(_line, summaries(measured))])


def _line(summary: Summary) -> str:
    targets = [
        f"{name} at most {100 * target:.3g}%"
        for name, target in (
            ("mean", summary.target_mean),
            ("max", summary.target_max),
        )
        if target is not None
    ]
    verdict = f"; target {', '.join(targets)}: {_MET[summary.met]}" if targets else ""
    return (
        f"{summary.group}: {summary.count} rows, mean {summary.mean_error:.1%}, max "
        f"{summary.max_error:.1%}{verdict}"
    )


_MET = {True: "met", False: "missed"}
