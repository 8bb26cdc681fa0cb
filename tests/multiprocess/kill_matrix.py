"""The table of what became of runs that something was done to.

    python -m tests.multiprocess.kill_matrix              # all cases
    python -m tests.multiprocess.kill_matrix sigterm nan  # those with such a name

Every case ends in a run that goes on from the newest checkpoint with the losses of one
that nothing happened to, or in a clear stop. A case that does not raises.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import jax

from tests.multiprocess.kill_cases import CASES, Row
from tests.multiprocess.runs import Setting, whole_run


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.multiprocess.kill_matrix")
    parser.add_argument("--rows", type=Path, help="file of rows, added to and printed")
    parser.add_argument("words", nargs="*", help="of the cases' names; all when absent")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases at a time (%(default)s)"
    )
    args = parser.parse_args()
    names = [n for n in CASES if not args.words or any(w in n for w in args.words)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "whole").mkdir()
        text = scenes(root)
        losses = whole_run(text, root / "whole")

        def row_of(name: str) -> Row:
            (root / name).mkdir()
            try:
                row = CASES[name](Setting(text, losses, root / name))
            except BaseException as error:
                print(f"{name}: {error!r}", file=sys.stderr, flush=True)
                raise
            print(f"{name}: {row}", file=sys.stderr, flush=True)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps({"name": name, **asdict(row)}) + "\n")
            return row

        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(row_of, names))
    if args.rows:
        found = [json.loads(line) for line in args.rows.read_text().splitlines()]
        by_name = {one.pop("name"): Row(**one) for one in found}
        rows = [by_name[name] for name in CASES if name in by_name]
    print(
        f"`python -m tests.multiprocess.kill_matrix`, {datetime.date.today()}, "
        f"{os.cpu_count()} CPU cores (load {os.getloadavg()[1]:.0f}), Python "
        f"{platform.python_version()}, jax {jax.__version__}:\n\n{table_of(rows)}"
    )
    return 0


def scenes(folder: Path) -> Path:
    """A text of two scenes."""
    plays = Path(__file__).parents[2] / "recipes" / "data" / "shakespeare"
    path = folder / "scenes.txt"
    path.write_text((plays / "macbeth.txt").read_text()[:20_000])
    return path


def table_of(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = ("fault", "ended", "newest whole checkpoint", "went on from", "detected, s")
    lines = [[*head, "recovered, s"], ["---"] * 6]
    for row in rows:
        times = (row.detected_s, row.recovered_s)
        words = [f"{one:.1f}" if one is not None else "-" for one in times]
        on = "-" if row.resumed is None else str(row.resumed)
        lines.append([row.fault, row.ended, str(row.newest), on, *words])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
