"""What can happen to a run, done to real processes, and the table of what became of it.

    python -m tests.multiprocess.kill_matrix              # all cases
    python -m tests.multiprocess.kill_matrix sigterm nan  # those with such a name

Every case ends in a run that goes on from the newest checkpoint with the losses of one
that nothing happened to, or in a clear stop. A case that does not raises.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from tests.multiprocess.children import free_port, joined, kill, start

MODEL = [
    *("--preset", "test", "--model", "vocab=256", "--seq", "16", "--global-batch", "8"),
    *("--layout", "data=2", "--steps", "1000", "--sample-tokens", "0"),
    *("--bubble-rounds", "0", "--start-timeout", "200", "--resume", "auto"),
]
MOST_STEPS = 150
"""Of the run that nothing happens to."""

HEARTBEAT_S = 6
HANG_S = 15
_PATIENCE_S = 240
"""For what must come, on a machine that may be busy; nothing that is measured."""

PATCHED = """
import sys, time
import numpy as np
from meshpar.recipes import pretrain
from meshpar.train import stragglers

plain = pretrain.timed_step
is_last = "--process-id" not in sys.argv or (
    sys.argv[sys.argv.index("--process-id") + 1] == "1")

def timed_step(step, state, batch):
    if is_last and int(state.step) == 5:
        {fault}
    return plain(step, state, batch)

pretrain.timed_step = timed_step
if is_last:
    {once}
sys.exit(pretrain.main(sys.argv[1:]))
"""
NAN = 'batch = {**batch, "weights": np.full_like(batch["weights"], np.nan)}'
PLAIN = ("-m", "meshpar", "train")


def patched(*, fault: str = "pass", once: str = "pass") -> tuple[str, str]:
    """Words that start a run whose last process does something before step 5."""
    return "-c", PATCHED.replace("{fault}", fault).replace("{once}", once)


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


@dataclass(frozen=True)
class Setting:
    """Where a case runs: its text, the true losses, and a folder of its own."""

    text: Path
    losses: Sequence[float]
    folder: Path

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """The run's metrics, which a full disk does not hit."""
        return self.folder / "metrics.jsonl"


@dataclass(frozen=True)
class Child:
    """A process of a run, and what it has written so far."""

    process: subprocess.Popen[str]
    output: Path
    error: Path

    def said(self) -> str:
        """On both streams, in one line."""
        texts = (self.output.read_text(), self.error.read_text())
        return " ".join(" ".join(texts).split())

    def ended(self, status: int, timeout_s: float = _PATIENCE_S) -> float:
        """Seconds until it ended, with that status."""
        began = time.monotonic()
        found = self.process.wait(timeout_s)
        assert found == status, (found, self.said()[-3000:])
        return time.monotonic() - began


@contextlib.contextmanager
def running(
    setting: Setting,
    *options: str,
    num_processes: int = 1,
    words: Sequence[str] = PLAIN,
    save_every: int = 2,
) -> Iterator[list[Child]]:
    """The processes of a run, none of which outlives what is inside."""
    common = [*MODEL, "--save-every", str(save_every), "--text", str(setting.text)]
    common += ["--out", str(setting.out), "--log-json", str(setting.log), *options]
    common += ["--emulate", str(2 // num_processes)]
    hands = joined(num_processes, free_port()) if num_processes > 1 else [[]]
    children = []
    try:
        for number, hand in enumerate(hands):
            paths = [setting.folder / f"{name}{number}.txt" for name in ("out", "err")]
            with paths[0].open("w") as output, paths[1].open("w") as error:
                streams = {"stdout": output, "stderr": error}
                process = start(
                    [*words, *common, *hand], streams=streams, PYTHONUNBUFFERED="1"
                )
            children.append(Child(process, *paths))
        yield children
    finally:
        kill([child.process for child in children])


def rows_of(log: Path) -> list[dict[str, float]]:
    """Of steps, as far as they are written."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [row for row in rows if "loss" in row]


def newest(out: Path) -> int:
    """Step of the newest checkpoint that has its name."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def is_saving(out: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((out / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def wait(what: Callable[[], bool], children: Sequence[Child]) -> float:
    """Seconds until something is so, while all children run."""
    began = time.monotonic()
    while not what():
        alive = all(child.process.poll() is None for child in children)
        waited = time.monotonic() - began
        assert alive and waited < _PATIENCE_S, [child.said() for child in children]
        time.sleep(0.005)
    return time.monotonic() - began


def same_losses(setting: Setting, num_steps: int) -> None:
    """Every step once, with the loss of the run that nothing happened to."""
    rows = rows_of(setting.log)[:num_steps]
    assert [row["step"] for row in rows] == list(range(num_steps))
    losses = [row["loss"] for row in rows]
    np.testing.assert_allclose(losses, setting.losses[:num_steps], rtol=1e-5)


def resumed_after(said: str) -> int:
    """The step that a run says it goes on from."""
    return int(said.split("resumed after step ")[1].split(",")[0])


def gone_on(setting: Setting, *, after: int, says: str = "") -> tuple[int, float]:
    """Starts the run again, as one process: the step it went on from, and when.

    Args:
        setting: Of the case.
        after: Step of the checkpoint that it must go on from.
        says: What it must print.
    """
    steps, began = after + 4, time.time()

    def is_on() -> bool:
        rows = rows_of(setting.log)
        is_new = setting.log.exists() and setting.log.stat().st_mtime > began
        return is_new and bool(rows) and rows[-1]["step"] >= after

    with running(setting, "--stop-after", str(steps)) as (child,):
        recovered_s = wait(is_on, [])
        child.ended(0)
        said = child.said()
    assert resumed_after(said) == after, said
    assert says in said, said
    same_losses(setting, steps)
    return after, recovered_s


def sigkill(setting: Setting, num_kills: int = 20, seed: int = 0) -> Row:
    """Killed again and again: while saving, after a step, and while it starts."""
    moments, saved, slowest_s = random.Random(seed), 0, 0.0
    during = (["a save"] * 2 + ["a step", "the start"]) * num_kills
    for moment in during[:num_kills]:
        began = time.monotonic()
        with running(setting, save_every=1) as (child,):
            if moment == "the start":
                time.sleep(moments.uniform(0, slowest_s))
            else:
                wait(lambda last=saved: newest(setting.out) > last, [child])
                slowest_s = max(slowest_s, time.monotonic() - began)
            if moment == "a save":
                wait(lambda: is_saving(setting.out), [child])
            time.sleep(moments.uniform(0, 0.05 if moment == "a save" else 0.5))
            child.process.kill()
            child.ended(-signal.SIGKILL)
            said = child.said()
        if saved and "resumed after" in said:
            assert resumed_after(said) == saved, said
        assert newest(setting.out) >= saved  # Nothing that was saved is lost.
        saved = newest(setting.out)
    resumed, recovered_s = gone_on(setting, after=saved)
    ended = f"each start went on from the newest checkpoint, to step {saved} in the end"
    return Row(
        f"SIGKILL at {num_kills} random moments: half while a checkpoint is written, "
        "the rest after a step and while it starts",
        ended,
        saved,
        resumed,
        None,
        max(recovered_s, slowest_s),
    )


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
        assert f"process {number} on " in said and "was not heard of for" in said
        silent_s = int(said.split("was not heard of for ")[1].split(" s")[0])
        assert silent_s <= HEARTBEAT_S + 5
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
    assert any(f"has ended for {HANG_S} s" in one for one in said), said
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
        on = "the run goes on, and the checkpoint before stays"
        detected_s = wait(lambda: on in child.said(), [child])
        assert "the disk is full" in child.said()
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


def saved_run(setting: Setting) -> None:
    """A run with checkpoints of steps 2, 4 and 6 that ended by itself."""
    with running(setting, "--stop-after", "6", "--keep", "3") as (child,):
        child.ended(0)
    assert newest(setting.out) == 6


def damaged(setting: Setting, harm: Callable[[Path], None], what: str) -> Row:
    """The newest checkpoint's largest file is not as it was written."""
    saved_run(setting)
    state = setting.out / "checkpoints" / "6" / "state"
    files = [path for path in state.rglob("*") if path.is_file()]
    harm(max(files, key=lambda path: path.stat().st_size))
    says = "checkpoint of step 6 is damaged: its file state/"
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


def data_file(setting: Setting, harm: Callable[[Path], None], says: str) -> Row:
    """The text cannot be read when the run is started again, and then can."""
    own = Setting(setting.folder / "own.txt", setting.losses, setting.folder)
    shutil.copy(setting.text, own.text)
    saved_run(own)
    whole = own.text.read_bytes()
    harm(own.text)
    began = time.monotonic()
    with running(own) as (child,):
        child.ended(2)
        detected_s = time.monotonic() - began
        error = child.error.read_text()
    assert says in error and len(error.splitlines()) == 1, error
    own.text.write_bytes(whole)
    resumed, recovered_s = gone_on(own, after=6)
    ended = "status 2 and one line; as before once it is there again"
    return Row(f"data file: {says}", ended, 6, resumed, detected_s, recovered_s)


def break_a_line(path: Path) -> None:
    """A byte that is no UTF-8."""
    path.write_bytes(path.read_bytes()[:5000] + b"\xff\xfe\n" + b"more\n" * 500)


def nan_stops(setting: Setting) -> Row:
    """A NaN in the batch of step 5, with `--on-bad-step stop`."""
    words = patched(fault=NAN)
    with running(setting, "--on-bad-step", "stop", words=words) as (child,):
        wait(lambda: len(rows_of(setting.log)) >= 5, [])
        detected_s = child.ended(1)
        error = child.error.read_text()
    assert "step 5: loss nan or its gradients are not finite" in error
    assert "the newest checkpoint is of step 4" in error
    resumed, recovered_s = gone_on(setting, after=4)
    fault = "NaN in the batch of step 5, --on-bad-step stop"
    return Row(fault, "status 1 and one line", 4, resumed, detected_s, recovered_s)


def nan_rolls_back(setting: Setting) -> Row:
    """A NaN in the rows of one of two, with `--on-bad-step rollback`."""
    words = patched(fault=NAN + "; pretrain.timed_step = plain")
    options = ["--on-bad-step", "rollback", "--stop-after", "8"]
    with running(setting, *options, num_processes=2, words=words) as children:
        for child in children:
            child.ended(0)
        said = children[0].said()
    assert "back to step 4, and on 48 windows into the text" in said
    rows = rows_of(setting.log)
    assert [row["step"] for row in rows] == list(range(8))
    assert np.isfinite([row["loss"] for row in rows]).all()
    same_losses(setting, 4)
    fault = "NaN in the rows of process 1 of 2, --on-bad-step rollback"
    ended = "both go back to step 4, and on with the text after the bad step"
    return Row(fault, ended, 4, 4, None, None)


def slow_device(setting: Setting) -> Row:
    """One of two processes computes at a fifth of the other's speed."""
    words = patched(once="stragglers._MATMULS *= 5")
    options = ["--validate-every", "3", "--stop-after", "4"]
    with running(setting, *options, num_processes=2, words=words) as children:
        for child in children:
            child.ended(0)
        said = children[0].said()
    assert "device 0 of process 1 on " in said, said
    assert "times the median of all for the same matmuls" in said
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
    "data-vanished": lambda one: data_file(one, Path.unlink, "no text at"),
    "data-broken": lambda one: data_file(one, break_a_line, "is not UTF-8 text: byte"),
    "nan-stop": nan_stops,
    "nan-rollback": nan_rolls_back,
}
"""What is done, by a name."""


def whole_run(text: Path, folder: Path) -> list[float]:
    """The losses of a run that nothing happens to."""
    setting = Setting(text, [], folder)
    stop = ["--stop-after", str(MOST_STEPS)]
    with running(setting, *stop, save_every=MOST_STEPS) as (child,):
        child.ended(0)
    return [row["loss"] for row in rows_of(setting.log)]


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


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.multiprocess.kill_matrix")
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
            row = CASES[name](Setting(text, losses, root / name))
            print(f"{name}: {row}", file=sys.stderr, flush=True)
            return row

        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(row_of, names))
    print(
        f"`python -m tests.multiprocess.kill_matrix`, {datetime.date.today()}, "
        f"{os.cpu_count()} CPU cores (load {os.getloadavg()[1]:.0f}), Python "
        f"{platform.python_version()}, jax {jax.__version__}:\n\n{table_of(rows)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
