"""Real processes that a test starts, and that never outlive it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[2]

# What would tell a process that it is of a cluster, or give it other devices.
_NOT_PASSED = ("SLURM_", "OMPI_", "PMIX_", "KUBERNETES_", "TPU_", "MESHPAR_", "JAX_")
_PASSED = ("JAX_COMPILATION_CACHE_", "JAX_ENABLE_COMPILATION_", "JAX_PERSISTENT_CACHE_")

COLD = (sys.executable,)
"""Python itself, for a process that a test kills or whose start it measures."""

_READ_ONLY = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
"""Killed while it writes to JAX's cache, a process leaves half a program there."""

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@dataclass(frozen=True)
class Ended:
    """What became of a process."""

    status: int
    output: str
    error: str
    wall_s: float


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start(
    command: Sequence[str],
    *,
    interpreter: Sequence[str] | None = None,
    streams: Mapping[str, Any] = PIPES,
    **environment: str,
) -> subprocess.Popen:
    """Starts Python with those words.

    Args:
        command: The words.
        interpreter: The words before them; of the warm interpreter by default, whose
            client alone a SIGKILL or SIGSTOP would reach.
        streams: Where `stdout` and `stderr` go.
        environment: Variables beside this process's own.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED) or not name.startswith(_NOT_PASSED)
    }
    return subprocess.Popen(
        [*(warm.words() if interpreter is None else interpreter), *command],
        cwd=ROOT,
        env={
            **kept,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "PYTHONPATH": str(ROOT),
            **(_READ_ONLY if interpreter == COLD else {}),
            **environment,
        },
        text=True,
        **streams,
    )


@contextlib.contextmanager
def killed_if_raised(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Kills the children where what is waited for inside does not come."""
    try:
        yield
    except BaseException:
        kill(children)
        raise


def kill(children: Sequence[subprocess.Popen]) -> None:
    """Ends those that still run, stopped ones too."""
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def ends_of(children: Sequence[subprocess.Popen], timeout_s: float) -> list[Ended]:
    """Waits for all; kills those that still run then, whose status is -9."""
    started = time.monotonic()
    ends = []
    try:
        for child in children:
            left_s = max(started + timeout_s - time.monotonic(), 0.1)
            try:
                output, error = child.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                child.kill()
                output, error = child.communicate()
            wall_s = time.monotonic() - started
            ends.append(Ended(child.returncode, output, error, wall_s))
    finally:
        kill(children)
    return ends


def joined(num_processes: int, port: int) -> list[list[str]]:
    """The options by which each process joins."""
    return [
        [
            *("--coordinator", f"localhost:{port}"),
            *("--num-processes", str(num_processes)),
            *("--process-id", str(process)),
        ]
        for process in range(num_processes)
    ]
