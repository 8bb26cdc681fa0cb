"""Report of a run of comparisons, with the smallest case that still fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from meshpar import MESH_AXES, Layout
from meshpar.testing.comparison import Deviation
from meshpar.testing.layout_cases import Case, Choices, refusal


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case's comparison.

    Args:
        case: The case.
        deviations: Of every array; empty where the case did not run to its end.
        failure: What ended it, where it did not.
        refused: Key of the error with which the library refuses it, as it must.
        seconds: Wall time, nearly all of it compiling.
    """

    case: Case
    deviations: tuple[Deviation, ...]
    failure: str = ""
    refused: str = ""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if it ran and every deviation is within its bound."""
        return not self.failure and all(deviation.ok for deviation in self.deviations)

    @property
    def worst(self) -> dict[str, Deviation]:
        """The deviation that uses most of its bound, by quantity."""
        return _worst(self.deviations)

    @property
    def summary(self) -> str:
        """One line with the worst error and bound of each quantity."""
        columns = (
            f"{name} {one.error:.1e}/{one.bound:.0e}{'' if one.ok else ' FAILS'}"
            for name, one in self.worst.items()
            if one.bound or not one.ok
        )
        verdict = "ok" if self.ok else "FAIL"
        found = self.failure or ", ".join(columns)
        if self.refused and not self.failure:
            found = f"refused as expected: {self.refused}"
        return f"{verdict} ({self.seconds:.0f} s): {found}"

    def __str__(self) -> str:
        return f"{self.case}\n    {self.summary}"

    def explain(self) -> str:
        """Return what is wrong, and the command that repeats it."""
        wrong = [str(one) for one in self.worst.values() if not one.ok]
        lines = [self.failure] if self.failure else wrong
        again = f"again with: {self.case.command}"
        return "\n".join(
            [str(self.case.layout), *(f"    {x}" for x in (*lines, again))]
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cases, and the smallest failing one that was found from the first failure."""

    results: tuple[Result, ...]
    smallest: Result | None = None

    @property
    def ok(self) -> bool:
        """True if all layouts agree with one device."""
        return all(result.ok for result in self.results)

    def worst(self, precision: str) -> dict[str, Deviation]:
        """Return the deviation that uses most of its bound, by quantity."""
        return _worst(
            deviation
            for result in self.results
            if result.case.layout.precision == precision
            for deviation in result.deviations
        )

    def __str__(self) -> str:
        failed = sum(not result.ok for result in self.results)
        head = f"{len(self.results) - failed} of {len(self.results)} layouts agree"
        lines = [f"{head} with one device (error/bound of the worst array)"]
        lines += map(str, self.results)
        if self.smallest is not None:
            lines += ["", "smallest failing case:", self.smallest.explain()]
        return "\n".join(lines)


def _worst(deviations: Iterable[Deviation]) -> dict[str, Deviation]:
    worst: dict[str, Deviation] = {}
    for one in deviations:
        other = worst.get(one.quantity)
        if other is None or _severity(one) > _severity(other):
            worst[one.quantity] = one
    return worst


def _severity(one: Deviation) -> float:
    if math.isnan(one.error):
        return math.inf
    return one.error / (one.bound or 1e-300)


MAX_TRIES = 40


def shrink(failed: Result, run: Callable[[Case], Result], choices: Choices) -> Result:
    """Return the failure reached by always taking the first simpler failing case.

    Deterministic; gives up after `MAX_TRIES` runs.

    Args:
        failed: Where to start.
        run: Runs a case.
        choices: What says whether a simpler case is valid, and what it may not change.
    """
    tried = {failed.case}
    smaller: Result | None = failed
    while smaller is not None:
        failed, smaller = smaller, None
        for case in simpler_cases(failed.case, choices):
            if case in tried or refusal(case, choices) is not None:
                continue
            if len(tried) > MAX_TRIES:
                return failed
            tried.add(case)
            result = run(case)
            if not result.ok:
                smaller = result
                break
    return failed


def simpler_cases(case: Case, choices: Choices) -> Iterator[Case]:
    """Yield cases one step simpler, largest steps first; they may be invalid."""
    if case.resume_as is not None:
        yield replace(case, resume_as=None)
        for layout in _simpler_layouts(case.resume_as):
            yield replace(case, resume_as=layout)
    for layout in _simpler_layouts(case.layout):
        yield replace(case, layout=layout)
    if case.mask != "full":
        yield replace(case, mask="full")
    fewer_layers = re.sub(r"layers=\d+", "layers=1", case.model)
    if fewer_layers != case.model:
        yield replace(case, model=fewer_layers)
    shards = case.layout.batch_shards * case.layout.microbatches
    if choices.global_batch is None and case.global_batch > shards:
        yield replace(case, global_batch=shards)
    if choices.seq is None and case.seq > 2:
        yield replace(case, seq=max(2, case.seq // 2))
    if case.seed:
        yield replace(case, seed=0)


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    default = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if value == getattr(default, field.name):
            continue
        yield replace(layout, **{field.name: getattr(default, field.name)})
        if field.name in MESH_AXES and value > 2:
            sizes: list[Any] = [2, value // 2] if value > 5 and value % 2 == 0 else [2]
            for size in sizes:
                yield replace(layout, **{field.name: size})
