"""Goodput: the share of a run's time spent in steps that count.

The `ml-goodput-measurement` package (0.2.3) keeps its log in Google Cloud Logging and
computes nothing without that service; this ledger is a file in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshpar.foreign_files import read_json
from meshpar.recipes.phases import Phases

NAME = "goodput.json"
"""The file in a run's folder."""


@dataclass(kw_only=True)
class Ledger:
    """Where the time of all starts of a run went.

    Args:
        began: When the first start began, seconds since 1970.
        starts: How many there were.
        spent_s: Phase -> seconds, of all starts.
        lost_s: In steps that were done and had to be done again, or were left out.
        undone_s: Of that, what `spent_s` has under `step`.
        noted: Steps done when `spent_s` was written.
        firsts: The first step of each start, whose time is under `compiling`.
    """

    began: float = field(default_factory=time.time)
    starts: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)
    lost_s: float = 0.0
    undone_s: float = 0.0
    noted: int = 0
    firsts: list[int] = field(default_factory=list)

    def lose(self, rows: Iterable[Mapping[str, Any]], every: int = 1) -> None:
        """Takes rows of metrics whose steps do not count any more.

        Args:
            rows: The rows.
            every: Steps that each of them stands for.
        """
        for row in rows:
            if "step_s" in row and row["step"] not in self.firsts:
                self.lost_s += every * row["step_s"]
                if row["step"] < self.noted:
                    self.undone_s += every * row["step_s"]

    def parts_s(self, wall_s: float) -> dict[str, float]:
        """Seconds by use; the sum is `wall_s`.

        Example:
            >>> ledger = Ledger(spent_s={"starting": 2.0, "step": 5.0}, noted=2)
            >>> ledger.lose([{"step": 1, "step_s": 1.5}, {"step": 2, "step_s": 0.5}])
            >>> parts = ledger.parts_s(10.0)
            >>> parts["productive"], parts["lost"], parts["between starts"]
            (3.5, 2.0, 2.5)
        """
        spent = dict(self.spent_s)
        parts = {
            "productive": spent.pop("step", 0.0) - self.undone_s,
            "starting": spent.pop("starting", 0.0) + spent.pop("restoring", 0.0),
            **spent,
            "lost": self.lost_s,
        }
        return {**parts, "between starts": wall_s - sum(parts.values())}


class Goodput:
    """The ledger of a run, this start's time with it.

    Args:
        phases: Of this start.
        folder: Of the run, whose ledger it goes on with; None where another process
            keeps it.
    """

    def __init__(self, phases: Phases, folder: Path | None = None) -> None:
        self._phases = phases
        self._path = None if folder is None else folder / NAME
        began = time.time() - sum(phases.spent_s().values())
        self._before = _read(self._path) or Ledger(began=began)
        self._before.starts += 1

    def begin(self, step: int) -> None:
        """The next step is compiled first."""
        self._before.firsts.append(step)

    def lose(
        self,
        rows: Iterable[Mapping[str, Any]],
        done: int | None = None,
        every: int = 1,
    ) -> None:
        """Takes rows whose steps are to be done again.

        Args:
            rows: Of metrics.
            done: Steps that this start has done; none when absent.
            every: Steps that each row stands for.
        """
        self._before.noted = self._before.noted if done is None else done
        self._before.lose(rows, every)

    def note(self, done: int) -> float:
        """Writes what is spent once `done` steps are done; the productive share."""
        self._before.noted = done
        ledger = self._now()
        if self._path is not None:
            with contextlib.suppress(OSError):  # Of a full disk the metrics tell.
                unfinished = self._path.with_name(f"{NAME}.unfinished")
                unfinished.write_text(json.dumps(asdict(ledger)), encoding="utf-8")
                os.replace(unfinished, self._path)
        wall_s = time.time() - ledger.began
        return ledger.parts_s(wall_s)["productive"] / wall_s

    def line(self) -> str:
        """Return a line with the goodput and the uses of the other time."""
        ledger = self._now()
        wall_s = time.time() - ledger.began
        parts = ledger.parts_s(wall_s)
        share = parts.pop("productive") / wall_s
        rest = ", ".join(
            f"{name} {part_s:.1f}" for name, part_s in parts.items() if part_s >= 0.05
        )
        return (
            f"goodput {share:.1%} of {wall_s:.1f} s in {ledger.starts} "
            f"start{'s' if ledger.starts > 1 else ''}; seconds of the rest: {rest}"
        )

    def _now(self) -> Ledger:
        spent_s = Counter(self._before.spent_s) + Counter(self._phases.spent_s())
        return Ledger(**{**vars(self._before), "spent_s": dict(spent_s)})


def _read(path: Path | None) -> Ledger | None:
    """Return the ledger that earlier starts wrote, or an empty one."""
    if path is None or not path.is_file():
        return None
    try:
        return Ledger(**read_json(path, key="run.unreadable_ledger"))
    except (ValueError, TypeError):
        return None
