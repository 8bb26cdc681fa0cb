"""Runs of `meshpar train` in real processes that something is done to."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests import warm
from tests.multiprocess.children import COLD, free_port, joined, kill, start

MODEL = [
    *("--preset", "test", "--model", "vocab=256,layers=1", "--seq", "16"),
    *("--global-batch", "8"),
    *("--layout", "data=2", "--steps", "1000", "--sample-tokens", "0"),
    *("--bubble-rounds", "0", "--start-timeout", "200", "--resume", "auto"),
]
MOST_STEPS = 150
"""Of the run that nothing happens to."""

_PATIENCE_S = 240
"""For what must come, on a machine that may be busy; nothing that is measured."""

PATCHED = """
import sys, time
import numpy as np
from meshpar.recipes import pretrain
from meshpar.train import faults

plain = pretrain.timed_step
is_last = "--process-id" not in sys.argv or (
    sys.argv[sys.argv.index("--process-id") + 1] == "1")

def timed_step(step, state, batch):
    if is_last and int(state.step) == 5:
        {fault}
    return plain(step, state, batch)

def make_batches(run):
    def batch_of(number):
        batch = plain_batches(run)(number)
        is_first_time = run.position.step + number == 5 and not run.num_rollbacks
        if {nan} and is_last and is_first_time:
            batch = {**batch, "weights": np.full_like(batch["weights"], np.nan)}
        return batch
    return batch_of

plain_batches, pretrain.make_batches = pretrain.make_batches, make_batches
pretrain.timed_step = timed_step
if is_last:
    {once}
sys.exit(pretrain.main(sys.argv[1:]))
"""
PLAIN = ("-m", "meshpar", "train")


def patched(
    *, fault: str = "pass", once: str = "pass", nan: bool = False
) -> tuple[str, str]:
    """Words that start a run whose last process does something before step 5.

    Args:
        fault: What it does then.
        once: What it does when it starts.
        nan: Whether its rows of that step have a NaN.
    """
    text = PATCHED.replace("{fault}", fault).replace("{once}", once)
    return "-c", text.replace("{nan}", str(nan))


@dataclass(frozen=True)
class Setting:
    """Where a case runs: its text, the true losses, and a folder of its own."""

    text: Path
    losses: Sequence[float]
    folder: Path
    interpreter: Sequence[str] = COLD
    """Of the starts that go on, whose times a case tells."""

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
    interpreter: Sequence[str] = COLD,
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
                    [*words, *common, *hand],
                    interpreter=interpreter,
                    streams=streams,
                    PYTHONUNBUFFERED="1",
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
    """Whether one newer than all that have their name is being written."""
    begun = (out / "checkpoints").glob("*.orbax-checkpoint-tmp*")
    return any(int(path.name.split(".")[0]) > newest(out) for path in begun)


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
    """Every step once, with the loss of the run that nothing happened to.

    As far as that run came, or came before something happened to it.
    """
    rows = rows_of(setting.log)[:num_steps]
    assert [row["step"] for row in rows] == list(range(num_steps))
    known = setting.losses[:num_steps]
    losses = [row["loss"] for row in rows[: len(known)]]
    np.testing.assert_allclose(losses, known, rtol=1e-5)


def resumed_after(said: str) -> int:
    """The step that a run says it goes on from."""
    return int(said.split("resumed after step ")[1].split(",")[0])


def gone_on(setting: Setting, *, after: int, says: str = "") -> tuple[int, float]:
    """Starts the run again, as one process: the step it went on from, and when.

    Args:
        setting: Of the case.
        after: Step of the checkpoint that it must go on from.
        says: Pattern of what it must print.
    """
    steps, began = after + 4, time.time()
    kept = rows_of(setting.log)[:after]

    def is_on() -> bool:
        rows = rows_of(setting.log)
        is_new = setting.log.exists() and setting.log.stat().st_mtime > began
        return is_new and bool(rows) and rows[-1]["step"] >= after

    stop, words = ("--stop-after", str(steps)), setting.interpreter
    with running(setting, *stop, interpreter=words) as (child,):
        recovered_s = wait(is_on, [])
        child.ended(0)
        said = child.said()
    assert resumed_after(said) == after, said
    assert re.search(says, said), said
    same_losses(setting, steps)
    assert rows_of(setting.log)[:after] == kept  # Their times too: not done again.
    return after, recovered_s


def saved_run(setting: Setting) -> None:
    """A run with checkpoints of steps 2, 4 and 6 that ended by itself."""
    options = ("--stop-after", "6", "--keep", "3")
    with running(setting, *options, interpreter=warm.words()) as (child,):
        child.ended(0)
    assert newest(setting.out) == 6


def whole_run(text: Path, folder: Path) -> list[float]:
    """The losses of a run that nothing happens to."""
    setting = Setting(text, [], folder)
    stop = ["--stop-after", str(MOST_STEPS)]
    quick = dict(save_every=MOST_STEPS, interpreter=warm.words())
    with running(setting, *stop, **quick) as (child,):
        child.ended(0)
    return [row["loss"] for row in rows_of(setting.log)]
