"""Put one fault after another into a copy of the library: do the tests find it?

    python -m tests.mutants --sample 6 --seed 1 --jobs 2

Exit status: 0 all are found, 1 some are not, 2 a claimed test fails without a fault.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshpar.cli.parsing import positive
from tests.mutants.faults import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.running import (
    FOUND,
    Outcome,
    absent_tests,
    copied,
    outcomes,
    run_unmutated,
)
from tests.mutants.table import table

ROOT = Path(__file__).parents[2]


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    found = argparse.ArgumentParser(prog="python -m tests.mutants")
    add = found.add_argument
    names = [mutant.name for mutant in MUTANTS]
    add("--only", nargs="+", choices=names, metavar="NAME", help="these alone")
    add("--sample", type=positive, metavar="N", help="so many of them, drawn at random")
    add(
        "--seed", type=int, metavar="S", help="of the draw (default: another each time)"
    )
    add(
        "--jobs",
        type=positive,
        default=2,
        metavar="J",
        help="copies at work (default: 2)",
    )
    add("--root", type=Path, default=ROOT, help="another checkout (default: this one)")
    add(
        "--limit-s",
        type=float,
        default=300.0,
        help="for a mutant's tests (default: 300)",
    )
    add("--table", action="store_true", help="print the table of CONTRIBUTING.md alone")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each mutant and a total, and return the exit status."""
    args = parser().parse_args(argv)
    if args.table:
        print(table())
        return 0
    mutants = chosen(args.only, args.sample, args.seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [
            copied(args.root, Path(folder) / str(number)) for number in range(args.jobs)
        ]
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if absent := absent_tests(copies[0], tests):
            print("no such tests:", *absent, sep="\n  ")
            return 2
        sound = run_unmutated(copies, tests, args.limit_s * len(tests))
        if sound.status != 0:
            print(sound.output, "tests that fail without a fault find none:", sep="\n")
            print(*sound.failed, sep="\n")
            return 2
        print(
            f"{len(tests)} tests or files pass without a fault, {sound.seconds:.0f} s"
        )
        found = [tell(one) for one in outcomes(copies, mutants, args.limit_s)]
    missed = [one.mutant.name for one in found if one.verdict != FOUND]
    print(
        f"{len(found) - len(missed)} of {len(found)} faults found in "
        f"{time.perf_counter() - start:.0f} s"
    )
    if missed:
        print("not found:", *missed, sep="\n  ")
    return 1 if missed else 0


def chosen(
    only: Sequence[str] | None, sample: int | None, seed: int | None
) -> list[Mutant]:
    """Return the mutants of those names, or all; or a sample of them."""
    mutants = [one for one in MUTANTS if only is None or one.name in only]
    if sample is None:
        return mutants
    seed = random.randrange(1_000_000) if seed is None else seed
    print(f"sample of {sample}, seed {seed}")
    return random.Random(seed).sample(mutants, min(sample, len(mutants)))


def tell(outcome: Outcome) -> Outcome:
    """Print the line of one mutant."""
    mutant, seconds = outcome.mutant, f"{outcome.seconds:.1f} s"
    where = f"{mutant.room:22}{mutant.name:34}"
    print(f"{outcome.verdict:8}{seconds:>8}  {where}{outcome.detail}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
