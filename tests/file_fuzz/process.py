"""Runs a fuzzer in a process of its own: an audit hook stays as long as its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.file_fuzz.guard import ROOT

_MOST_S = 1800


class Fuzzed(NamedTuple):
    """What a fuzzer has found.

    Args:
        counts: Its last line, read as JSON; None where it has not come to that.
        told: All that it has printed, and the case that ran last.
        status: Its exit status.
    """

    counts: Any
    told: str
    status: int


def run(module: str, *words: str, folder: Path) -> Fuzzed:
    """Run the module of a fuzzer, without the settings of JAX that the tests have.

    Args:
        module: Such as `tests.file_fuzz`.
        words: Its options.
        folder: An empty folder.
    """
    kept = {name: one for name, one in os.environ.items() if name[:4] != "JAX_"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words, str(folder)],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_MOST_S,
    )
    lines = done.stdout.rstrip().splitlines() or [""]
    counts = json.loads(lines[-1]) if lines[-1].startswith("{") else None
    running = folder / "running.txt"
    last = running.read_text() if running.exists() else "none"
    told = f"{done.stdout}\nthe last case: {last}\n{done.stderr[-3000:]}"
    return Fuzzed(counts, told, done.returncode)
