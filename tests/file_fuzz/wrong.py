"""Readers that are wrong on purpose: each has to be found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.file_fuzz.cases import MOST_BYTES
from tests.file_fuzz.kind import Kind
from tests.file_fuzz.mutations import Random


def _opens_outside(folder: Path) -> str:
    return (folder.parent / "outside").read_text()


def _hides_what_it_opens(folder: Path) -> str:
    try:
        return Path("../outside").read_text()
    except Exception:
        return "nothing"


def _lists_outside(folder: Path) -> str:
    return str(os.listdir("/"))


def _writes_outside(folder: Path) -> str:
    (folder.parent / "written").write_text("x")
    return ""


def _tells_the_canary(folder: Path) -> str:
    """As a library in C++ would have read it, unseen."""
    from tests.file_fuzz.cases import CANARY

    return CANARY


def _starts_a_program(folder: Path) -> str:
    return str(subprocess.run([sys.executable, "-c", ""]))


def _runs_its_code(folder: Path) -> str:
    exec(compile("x = 1", str(folder / "a.py"), "exec"))
    return ""


def _hangs(folder: Path) -> str:
    time.sleep(60)
    return ""


def _raises(folder: Path) -> str:
    raise ValueError("no InputError")


def _takes_memory(folder: Path) -> str:
    return str(len(b"x" * (MOST_BYTES + (1 << 28))))


def _reads_its_own(folder: Path) -> str:
    return (folder / "wrong").read_text() + str(len(os.urandom(4)))


READERS = (
    *(_opens_outside, _hides_what_it_opens, _lists_outside, _writes_outside),
    *(_tells_the_canary, _starts_a_program, _runs_its_code, _hangs, _raises),
    *(_takes_memory, _reads_its_own),
)
"""In the order of their cases; the last one alone is right."""


def _examples(above: Path) -> Iterator[Path]:
    for reader in READERS:
        folder = above / reader.__name__
        folder.mkdir(parents=True)
        yield folder


def _change(random: Random, folder: Path) -> None:
    (folder / "wrong").write_text("this one")


def _read(folder: Path) -> str:
    if not (folder / "wrong").exists():
        return ""
    at = int(folder.name.removeprefix("case"))
    return READERS[at % len(READERS)](folder)


KINDS = {
    "wrong": Kind(num=len(READERS), examples=_examples, change=_change, read=_read)
}
"""Of no file: for the test of what finds the faults of the others."""
