"""What can happen to a run, case by case, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.multiprocess.runs import (
    Setting,
    gone_on,
    is_saving,
    newest,
    patched,
    resumed_after,
    rows_of,
    running,
    same_losses,
    saved_run,
    wait,
)
from tests.refusals import names

HEARTBEAT_S = 6
HANG_S = 30


@dataclass(frozen=True)
class Row:
    """What became of a case.

    Args:
        fault: What was done.
        ended: How the run ended, or that it went on.
        newest: Step of the newest checkpoint that was whole.
        resumed: Step that it went on from; None where it did not end.
        detected_s: From the fault to the end, or to the line that tells.
        recovered_s: From the new start to its first step; the slowest of several.
    """

    fault: str
    ended: str
    newest: int
    resumed: int | None
    detected_s: float | None
    recovered_s: float | None


def sigkill(setting: Setting, num_runs: int = 2, num_kills: int = 10) -> Row:
    """Runs that are killed again and again, side by side."""
    ones = []
    for number in range(num_runs):
        folder = setting.folder / str(number)
        folder.mkdir()
        ones.append(replace(setting, folder=folder))
    with ThreadPoolExecutor(num_runs) as pool:
        saved, recovered_s = zip(
            *pool.map(lambda n: killed(ones[n], num_kills, seed=n), range(num_runs)),
            strict=True,
        )
    return Row(
        f"SIGKILL at {num_runs * num_kills} random moments of {num_runs} runs: half "
        "while a checkpoint is written, the rest after a step and in the start",
        "every start goes on from the newest checkpoint",
        min(saved),
        min(saved),
        None,
        max(recovered_s),
    )


def killed(setting: Setting, num_kills: int, seed: int) -> tuple[int, float]:
    """The step that a run comes to that is killed so often, and its slowest start."""
    moments, saved, slowest_s = random.Random(seed), 0, 0.0
    during = ["a save", "a step", "a save", "the start"] * num_kills
    for moment in during[seed % 2 : seed % 2 + num_kills]:
        began = time.monotonic()
        with running(setting, save_every=1) as (child,):
            limit_s = slowest_s * moments.random() if moment == "the start" else 240.0
            while newest(setting.out) <= saved and time.monotonic() < began + limit_s:
                assert child.process.poll() is None, child.said()
                time.sleep(0.005)
            if moment != "the start":
                slowest_s = max(slowest_s, time.monotonic() - began)
                time.sleep(moments.uniform(0, 0.3))
            if moment == "a save":
                wait(lambda: is_saving(setting.out), [child])
                time.sleep(moments.uniform(0, 0.03))
            child.process.kill()
            child.ended(-signal.SIGKILL)
            said = child.said()
        if saved and "resumed after" in said:
            assert resumed_after(said) == saved, said
        assert newest(setting.out) >= saved  # Nothing that was saved is lost.
        saved = newest(setting.out)
    resumed, recovered_s = gone_on(setting, after=saved)
    return resumed, max(recovered_s, slowest_s)


def lost(setting: Setting, number: int, how: signal.Signals) -> Row:
    """One of two processes is killed or stopped; the other ends by itself."""
    words = ["--heartbeat", str(HEARTBEAT_S)]
    with running(setting, *words, num_processes=2) as children:
        wait(lambda: newest(setting.out) >= 4, children)
        wait(lambda: is_saving(setting.out), children)
        before = newest(setting.out)
        faulty, other = children[number], children[1 - number]
        faulty.process.send_signal(how)
        began = time.monotonic()
        status = other.process.wait(HEARTBEAT_S + 60)
        detected_s = time.monotonic() - began
        said = other.said()
    # Of process 0's end JAX's own service may tell first, by a signal.
    is_aborted = number == 0 and status == -signal.SIGABRT
    assert status == 75 or is_aborted, (status, said)
    if how == signal.SIGSTOP:
        told = re.search(rf"process {number} on \S+ \D*(\d+) s\b", said)
        assert told and int(told[1]) <= HEARTBEAT_S + 5, said
    saved = newest(setting.out)
    assert saved >= before
    resumed, recovered_s = gone_on(setting, after=saved)
    what = {signal.SIGKILL: "killed while saving", signal.SIGSTOP: "stalled"}[how]
    who = "process 0 of 2, the coordinator," if number == 0 else "process 1 of 2"
    limit = f" (SIGSTOP, --heartbeat {HEARTBEAT_S})" if how == signal.SIGSTOP else ""
    return Row(
        f"{who} {what}{limit}",
        f"the other ends with status {134 if is_aborted else status}",
        saved,
        resumed,
        detected_s,
        recovered_s,
    )


def hang(setting: Setting) -> Row:
    """One of two processes no longer gets on, though it is there."""
    words = patched(fault="time.sleep(10_000)")
    limit = ["--hang-timeout", str(HANG_S)]
    with running(setting, *limit, num_processes=2, words=words) as children:
        wait(lambda: len(rows_of(setting.log)) >= 5, children)
        began = time.monotonic()
        for child in children:
            child.ended(75, HANG_S + 60)
        detected_s = time.monotonic() - began
        said = [child.said() for child in children]
    assert all("most recent call first" in one for one in said), said
    assert any(names(one, f"{HANG_S} s") for one in said), said
    assert '"<string>", line 13 in timed_step' in said[1], said[1]
    saved = newest(setting.out)
    resumed, recovered_s = gone_on(setting, after=saved)
    return Row(
        f"process 1 of 2 no longer gets on (--hang-timeout {HANG_S})",
        "both write their stacks and end with status 75",
        saved,
        resumed,
        detected_s,
        recovered_s,
    )


def sigterm(setting: Setting) -> Row:
    """One of two processes gets SIGTERM; both save after the same step."""
    with running(setting, num_processes=2, save_every=100) as children:
        wait(lambda: len(rows_of(setting.log)) >= 5, children)
        children[1].process.terminate()
        began = time.monotonic()
        for child in children:
            child.ended(143)
        detected_s = time.monotonic() - began
    saved = newest(setting.out)
    assert saved == len(rows_of(setting.log)) >= 5
    resumed, recovered_s = gone_on(setting, after=saved)
    ended = "both save after the same step and end with status 143"
    fault = "SIGTERM to process 1 of 2"
    return Row(fault, ended, saved, resumed, detected_s, recovered_s)


def full_disk(setting: Setting) -> Row:
    """A disk of 4 MB that is full for a while."""
    setting.out.mkdir()
    with mounted(setting.out), running(setting) as (child,):
        wait(lambda: newest(setting.out) >= 2, [child])
        ballast = setting.out / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        told = re.compile(r"\b[\d,]+ free bytes\b")
        detected_s = wait(lambda: bool(told.search(child.said())), [child])
        before = newest(setting.out)
        assert before >= 2
        ballast.unlink()
        wait(lambda: newest(setting.out) > before, [child])
        child.process.kill()
        child.ended(-signal.SIGKILL)
        saved = newest(setting.out)
        resumed, recovered_s = gone_on(setting, after=saved)
    return Row(
        "disk full (a tmpfs of 4 MB), then free again, then SIGKILL",
        "the run goes on, and saves again once there is room",
        saved,
        resumed,
        detected_s,
        recovered_s,
    )


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A file system of 4 MB in the place of a folder; only root may have that."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def damaged(setting: Setting, harm: Callable[[Path], None], what: str) -> Row:
    """The newest checkpoint's largest file is not as it was written."""
    saved_run(setting)
    state = setting.out / "checkpoints" / "6" / "state"
    files = [path for path in state.rglob("*") if path.is_file()]
    harm(max(files, key=lambda path: path.stat().st_size))
    says = r"\b6\b\D* state/"
    resumed, recovered_s = gone_on(setting, after=4, says=says)
    ended = "told in one line; the checkpoint before is taken"
    return Row(f"newest checkpoint {what}", ended, 4, resumed, None, recovered_s)


def cut_short(path: Path) -> None:
    """Half of a file is gone."""
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    """One bit in the middle of a file is another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def data_file(
    setting: Setting, harm: Callable[[Path], None], what: str, *values: Any
) -> Row:
    """The text cannot be read when the run is started again, and then can."""
    own = replace(setting, text=setting.folder / "own.txt")
    shutil.copy(setting.text, own.text)
    saved_run(own)
    whole = own.text.read_bytes()
    harm(own.text)
    began = time.monotonic()
    with running(own) as (child,):
        child.ended(2)
        detected_s = time.monotonic() - began
        error = child.error.read_text()
    assert len(error.splitlines()) == 1, error
    assert all(names(error, value) for value in (f"'{own.text}'", *values)), error
    own.text.write_bytes(whole)
    resumed, recovered_s = gone_on(own, after=6)
    ended = "status 2 and one line; as before once it is there again"
    return Row(
        f"the data file {what} before a start",
        ended,
        6,
        resumed,
        detected_s,
        recovered_s,
    )


def break_a_line(path: Path) -> None:
    """A byte that is no UTF-8."""
    path.write_bytes(path.read_bytes()[:5000] + b"\xff\xfe\n" + b"more\n" * 500)


def nan_stops(setting: Setting) -> Row:
    """A NaN in the batch of step 5, with `--on-bad-step stop`."""
    words = patched(nan=True)
    with running(setting, "--on-bad-step", "stop", words=words) as (child,):
        wait(lambda: len(rows_of(setting.log)) >= 5, [])
        detected_s = child.ended(1)
        error = child.error.read_text()
    assert all(names(error, value) for value in ("step 5", "nan", "step 4")), error
    resumed, recovered_s = gone_on(setting, after=4)
    fault = "NaN in the batch of step 5, --on-bad-step stop"
    return Row(fault, "status 1 and one line", 4, resumed, detected_s, recovered_s)


def nan_rolls_back(setting: Setting) -> Row:
    """A NaN in the rows of one of two, with `--on-bad-step rollback`."""
    words = patched(nan=True)
    options = ["--on-bad-step", "rollback", "--stop-after", "8"]
    with running(setting, *options, num_processes=2, words=words) as children:
        for child in children:
            child.ended(0)
        said = children[0].said()
    assert re.search(r"\bstep 4\b\D*48 windows\b", said), said
    rows = rows_of(setting.log)
    assert [row["step"] for row in rows] == list(range(8))
    assert np.isfinite([row["loss"] for row in rows]).all()
    same_losses(setting, 4)
    fault = "NaN in the rows of process 1 of 2, --on-bad-step rollback"
    ended = "both go back to step 4, and on with the text after the bad step"
    return Row(fault, ended, 4, 4, None, None)


def slow_device(setting: Setting) -> Row:
    """One of two processes computes at a fifth of the other's speed."""
    words = patched(once="faults._MATMULS *= 5")
    options = ["--validate-every", "3", "--stop-after", "4"]
    with running(setting, *options, num_processes=2, words=words) as children:
        for child in children:
            child.ended(0)
        said = children[0].said()
    assert names(said, "device 0 of process 1"), said
    table = [
        json.loads(line)
        for line in (setting.out / "processes.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["process"]) for row in table] == [(2, 0), (2, 1)]
    same_losses(setting, 4)
    ended = "named at the next look at the validation text; the run goes on"
    return Row("process 1 of 2 is five times slower", ended, 4, None, None, None)


CASES: dict[str, Callable[[Setting], Row]] = {
    "sigkill": sigkill,
    "killed": lambda one: lost(one, 1, signal.SIGKILL),
    "coordinator-killed": lambda one: lost(one, 0, signal.SIGKILL),
    "stalled": lambda one: lost(one, 1, signal.SIGSTOP),
    "coordinator-stalled": lambda one: lost(one, 0, signal.SIGSTOP),
    "hang": hang,
    "slow": slow_device,
    "sigterm": sigterm,
    "full-disk": full_disk,
    "truncated": lambda one: damaged(one, cut_short, "with a file cut to half"),
    "bit-flipped": lambda one: damaged(one, flip_a_bit, "with one bit flipped"),
    "file-missing": lambda one: damaged(one, Path.unlink, "without one of its files"),
    "data-vanished": lambda one: data_file(one, Path.unlink, "vanishes"),
    "data-broken": lambda one: data_file(
        one, break_a_line, "gets a line that is no UTF-8", 5000, "0xff"
    ),
    "nan-stop": nan_stops,
    "nan-rollback": nan_rolls_back,
}
"""What is done, by a name."""
