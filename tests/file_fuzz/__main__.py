"""Read files of one kind, each changed at random: python -m tests.file_fuzz KIND.

python -m tests.file_fuzz gguf --num 200 --seed 0 FOLDER
python -m tests.file_fuzz gguf --seed 0 --only 17 FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Before JAX is imported.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # It is outside.

import numpy as np

from tests.file_fuzz.cases import CANARY, MOST_S, Outcome, limit_memory, note, run_case
from tests.file_fuzz.guard import Guard
from tests.file_fuzz.kind import Kind
from tests.file_fuzz.kinds import kind_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; 0 where none is a fault. The last line counts the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="see tests/file_fuzz/models.py, runs.py, texts.py")
    parser.add_argument("folder", type=Path, help="an empty folder, for the files")
    parser.add_argument("--num", type=int, help="cases (default: the slow test's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone, and keep it")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="of a case")
    parser.add_argument("--show", action="store_true", help="print all outcomes")
    args = parser.parse_args(argv)
    kind = kind_of(args.kind)
    sys.dont_write_bytecode = True
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outside").write_text(CANARY)
    examples = list(kind.examples(folder / "examples"))
    for example in examples:  # What is imported later, and what ends without a change.
        with contextlib.chdir(shutil.copytree(example, folder / "warm")):
            kind.read(Path.cwd())
        shutil.rmtree(folder / "warm")
    guard = Guard()
    limit_memory()
    counts: Counter[str] = Counter(taken=0, refused=0, fault=0)
    numbers = range(args.num or kind.num) if args.only is None else [args.only]
    for number in numbers:
        outcome = _run(args, kind, guard, examples, folder, number)
        counts[outcome.kind] += 1
        if outcome.kind == "fault" or args.show:
            what = f"{args.kind} --seed {args.seed} --only {number}"
            print(f"{outcome.kind} {what}\n{outcome.told[-6000:]}\n", flush=True)
    print(json.dumps(counts), flush=True)
    return min(counts["fault"], 1)


def _run(
    args: argparse.Namespace,
    kind: Kind,
    guard: Guard,
    examples: Sequence[Path],
    folder: Path,
    number: int,
) -> Outcome:
    random = np.random.default_rng((args.seed, number))
    case = folder / f"case{number}"
    shutil.copytree(examples[number % len(examples)], case)
    kind.change(random, case)
    note(folder, f"{args.kind} --seed {args.seed} --only {number}")
    outcome = run_case(guard, case, lambda: kind.read(case), args.seconds)
    if args.only is None:
        shutil.rmtree(case)
    return outcome


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Threads that a case has left behind are not waited for.
