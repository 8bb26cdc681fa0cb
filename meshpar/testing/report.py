"""What a run of comparisons found, as data and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshpar.testing.comparison import Deviation
from meshpar.testing.layout_cases import Case


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
        """Whether it ran, and every deviation is within its bound."""
        return not self.failure and all(deviation.ok for deviation in self.deviations)

    @property
    def worst(self) -> dict[str, Deviation]:
        """Quantity -> the deviation that uses most of its bound."""
        return _worst(self.deviations)

    @property
    def summary(self) -> str:
        """The worst error and bound of each quantity, in a line."""
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
        """What is wrong, and the command that shows it again."""
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
        """Whether all layouts agree with one device."""
        return all(result.ok for result in self.results)

    def worst(self, precision: str) -> dict[str, Deviation]:
        """Quantity -> the deviation that uses most of its bound, of all its cases."""
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
