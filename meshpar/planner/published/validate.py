"""The planner's error against published runs: every row, mean and largest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshpar.planner.published.measured import Measured
from meshpar.planner.published.others import SOURCES


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of the rows of one group that are counted.

    Args:
        group: What it is of.
        count: Counted rows.
        mean_error, max_error: Of the absolute relative errors.
        target_mean, target_max: What they should be at most; None for no target.
    """

    group: str
    count: int
    mean_error: float
    max_error: float
    target_mean: float | None = None
    target_max: float | None = None

    @property
    def met(self) -> bool:
        """Whether the targets are met."""
        return (self.target_mean is None or self.mean_error <= self.target_mean) and (
            self.target_max is None or self.max_error <= self.target_max
        )


_A100 = ("Narayanan et al. 2021", "Korthikanti et al. 2022")
_H100 = ("Tazi et al. 2025",)
_OTHERS = ("Qi et al. 2024", "Yeung et al. 2024")


def rows() -> list[Measured]:
    """Every published number that the planner is held against."""
    return [row for source in SOURCES for row in source()]


def summaries(measured: Iterable[Measured]) -> list[Summary]:
    """Mean and largest error of each group; calibration rows are not counted."""
    measured = list(measured)
    steps = [row for row in measured if row.quantity == "step"]
    memory = [row for row in measured if row.quantity == "memory"]
    apart = [row for row in steps if row.source in _OTHERS]
    return [
        *_by_source(measured),
        _summary("step time, A100 (Megatron-LM)", _of(steps, _A100), 0.05, 0.12),
        _summary("step time, H100 (nanotron)", _of(steps, _H100), 0.12, None),
        _summary("memory", memory, 0.08, None),
        _summary(
            "step time, other stacks, no target", apart, None, None, all_rows=True
        ),
    ]


def _by_source(measured: list[Measured]) -> Iterator[Summary]:
    """Of each quantity and source the rows that its summary counts, without a goal."""
    for quantity in ("step", "memory"):
        for source in dict.fromkeys(row.source for row in measured):
            own = [
                row
                for row in measured
                if (row.quantity, row.source) == (quantity, source)
            ]
            if any(_counts(row) or row.source in _OTHERS for row in own):
                yield _summary(
                    f"{quantity}, {source}",
                    own,
                    None,
                    None,
                    all_rows=source in _OTHERS,
                )


def _counts(row: Measured) -> bool:
    return not (row.calibrates or row.apart)


def _of(measured: list[Measured], sources: tuple[str, ...]) -> list[Measured]:
    return [row for row in measured if row.source in sources]


def _summary(
    group: str,
    measured: list[Measured],
    target_mean: float | None,
    target_max: float | None,
    *,
    all_rows: bool = False,
) -> Summary:
    errors = [abs(row.error) for row in measured if all_rows or _counts(row)]
    return Summary(
        group=group,
        count=len(errors),
        mean_error=sum(errors) / len(errors),
        max_error=max(errors),
        target_mean=target_mean,
        target_max=target_max,
    )


def as_json(measured: list[Measured]) -> dict[str, Any]:
    """The table and its summaries as one object."""
    return {
        "rows": [{**asdict(row), "error": row.error} for row in measured],
        "summaries": [
            {**asdict(summary), "met": summary.met} for summary in summaries(measured)
        ],
    }


def text(measured: list[Measured]) -> str:
    """The table for people."""
    lines = [f"{'measured':>9} {'predicted':>9} {'error':>7}     run"]
    heading = ("", "")
    for row in sorted(measured, key=_place):
        if (row.quantity, row.source) != heading:
            heading = (row.quantity, row.source)
            lines.append(f"{row.quantity}, {row.source}")
        note = " (calibrates)" if row.calibrates else ""
        note = f" ({row.apart})" if row.apart else note
        lines.append(
            f"{row.measured:9.4g} {row.predicted:9.4g} {row.error:+7.1%} {row.unit:>3} "
            f"{row.name}{note}"
        )
    return "\n".join([*lines, *map(_line, summaries(measured))])


def _place(row: Measured) -> tuple[int, int]:
    """Layers, steps, memory; of each the sources in order."""
    return (
        ("layer", "step", "memory").index(row.quantity),
        (*_A100, *_H100, *_OTHERS).index(row.source),
    )


def _line(summary: Summary) -> str:
    targets = [
        f"{name} at most {target:.0%}"
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
