"""Mutants run in copies of a checkout: which of them the tests find."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutant import Mutant

FOUND, MISSED, INVALID, TIMEOUT = "found", "missed", "invalid", "timeout"

_TESTS_FAILED = 1
_NOT_COLLECTED = "tests cannot be collected"
_STATUSES = {
    2: _NOT_COLLECTED,
    3: "pytest failed itself",
    4: _NOT_COLLECTED,
    5: "no test ran",
}
"""Exit statuses of pytest that say nothing of the fault: an import broke, mostly."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)
"""A test in pytest's summary, which has files there too that cannot be imported."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests of one mutant did.

    Args:
        mutant: It.
        verdict: `FOUND`, `MISSED`, `INVALID` or `TIMEOUT`.
        detail: The test that failed, or why none could.
        seconds: Time of its tests.
    """

    mutant: Mutant
    verdict: str
    detail: str
    seconds: float


class Ran(NamedTuple):
    """One run of pytest; the status is None where it did not end in time."""

    status: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """Node ids of the tests that failed."""
        return _FAILED.findall(self.output)


def copied(root: Path, to: Path) -> Path:
    """Copy the files of a checkout that git knows or does not ignore, links as links.

    Args:
        root: Of the checkout.
        to: The new folder.

    Returns:
        The new folder.
    """
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(
        ["git", "-C", str(root), *listing], check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = root / name, to / name
        if os.path.lexists(source):  # It may be deleted and not committed.
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to


def absent_tests(root: Path, tests: Iterable[str]) -> list[str]:
    """Return the tests that have no file, or no function of their name in it."""
    return [test for test in tests if not _is_there(root, *test.split("::"))]


def _is_there(root: Path, file: str, name: str = "") -> bool:
    path, function = root / file, re.escape(name.partition("[")[0])
    if not path.is_file():
        return False
    return not name or bool(re.search(rf"^def {function}\(", path.read_text(), re.M))


def run_tests(folder: Path, tests: Sequence[str], *options: str, limit_s: float) -> Ran:
    """Run tests of a copy by its own library, the fast ones alone.

    Args:
        folder: Of the copy.
        tests: Files or node ids.
        options: More options of pytest.
        limit_s: Seconds after which all its processes are killed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--color=no"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0], None
    return Ran(status, output, time.perf_counter() - start)


def run_unmutated(folders: Sequence[Path], tests: Sequence[str], limit_s: float) -> Ran:
    """Run tests without any fault, each copy its part of them; status 0 if all pass.

    Args:
        folders: Of the copies.
        tests: Files or node ids.
        limit_s: Seconds that each copy may take.
    """
    parts = [tests[at :: len(folders)] for at in range(len(folders))]
    with ThreadPoolExecutor(len(folders)) as pool:
        running = [
            pool.submit(run_tests, folder, part, limit_s=limit_s)
            for folder, part in zip(folders, parts, strict=True)
            if part
        ]
    ran = [one.result() for one in running]
    bad = [one for one in ran if one.status != 0]
    return Ran(
        bad[0].status if bad else 0,
        "\n".join(one.output for one in bad),
        max(one.seconds for one in ran),
    )


def outcomes(
    folders: Sequence[Path], mutants: Sequence[Mutant], limit_s: float
) -> Iterator[Outcome]:
    """Yield the outcome of each mutant as it is known, one at a time in each copy.

    Args:
        folders: Of the copies.
        mutants: What to try.
        limit_s: Seconds that the tests of one may take.
    """
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        free.put(folder)

    def tried(number: int, mutant: Mutant) -> Outcome:
        folder = free.get()
        try:
            return outcome_of(folder, mutant, number, limit_s)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as pool:
        tries = [pool.submit(tried, *one) for one in enumerate(mutants, start=1)]
        for done in as_completed(tries):
            yield done.result()


def outcome_of(folder: Path, mutant: Mutant, number: int, limit_s: float) -> Outcome:
    """Put the fault into a copy, run the tests that claim it, and take it out again.

    Args:
        folder: Of the copy.
        mutant: The mutant.
        number: Of this try, another for each.
        limit_s: Seconds that its tests may take.
    """
    path = folder / mutant.file
    text, before = path.read_text(encoding="utf-8"), path.stat()
    try:
        faulty = mutant.applied(text)
    except ValueError as error:
        return Outcome(mutant=mutant, verdict=INVALID, detail=str(error), seconds=0.0)
    try:
        _write(path, faulty, before.st_mtime + number)
        ran = run_tests(folder, mutant.tests, "-x", limit_s=limit_s)
    finally:
        _write(path, text, before.st_mtime)
    verdict, detail = _verdict(ran)
    return Outcome(mutant=mutant, verdict=verdict, detail=detail, seconds=ran.seconds)


def _write(path: Path, text: str, modified: float) -> None:
    """Write a file with a time of its own: by it Python knows what it has compiled."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (modified, modified))


def _verdict(ran: Ran) -> tuple[str, str]:
    if ran.status is None:
        return TIMEOUT, f"its tests did not end in {ran.seconds:.0f} s"
    if ran.status == 0:
        return MISSED, "all its tests pass"
    if ran.status == _TESTS_FAILED and ran.failed:
        return FOUND, ran.failed[0]
    if ran.status == _TESTS_FAILED:  # Of several files, after the first to break.
        return INVALID, _NOT_COLLECTED
    ended = f"pytest ended with status {ran.status}"
    return INVALID, _STATUSES.get(ran.status, ended)
