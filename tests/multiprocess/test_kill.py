"""Killed at any moment, stalled or without its disk, a run loses nothing it saved."""

import random
import signal
import time

import numpy as np
import pytest

from meshpar.recipes.config import RunConfig
from meshpar.recipes.pretrain import pretrain
from tests.conftest import rows
from tests.multiprocess.children import (
    ends_of,
    free_port,
    joined,
    killed_if_raised,
    start,
)
from tests.multiprocess.test_train import MODEL, OPTIONS, wait_for_steps

pytestmark = pytest.mark.slow

STEPS = 30


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, small_text):
    """The losses of a run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole")
    options = dict(layout="data=2", steps=STEPS, text=small_text, out=out)
    pretrain(RunConfig(**MODEL, **options, sample_tokens=0))
    return rows(out / "metrics.jsonl", "loss")


def train(*options, text, out):
    command = ["-m", "meshpar", "train", *OPTIONS, "--layout", "data=2"]
    command += ["--steps", str(STEPS), "--save-every", "1", "--text", str(text)]
    return start([*command, "--out", str(out), "--resume", "auto", *options])


def saved_step(out):
    """Of the newest checkpoint that has its name."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def test_a_run_killed_again_and_again_has_the_losses_of_one_that_was_not(
    uninterrupted, small_text, tmp_path
):
    """Saving every step, so that most of the moments are during a save."""
    moments = random.Random(0)
    for _ in range(6):
        before = saved_step(tmp_path)
        child = train("--emulate", "2", text=small_text, out=tmp_path)
        deadline = time.monotonic() + 120
        with killed_if_raised([child]):
            while saved_step(tmp_path) <= before and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(moments.uniform(0, 0.4))
        child.kill()
        ends_of([child], timeout_s=10)
        assert saved_step(tmp_path) > before or before == STEPS
    (end,) = ends_of([train("--emulate", "2", text=small_text, out=tmp_path)], 200)
    assert end.status == 0, end.error[-2000:]
    losses = rows(tmp_path / "metrics.jsonl", "loss")
    np.testing.assert_allclose(losses, uninterrupted, rtol=1e-5)


POISONED = """
import sys
import numpy as np
from meshpar.recipes import pretrain

plain, calls = pretrain.timed_step, []

def timed_step(step, state, batch):
    calls.append(state)
    if len(calls) == 4 and "1" == sys.argv[sys.argv.index("--process-id") + 1]:
        batch = {**batch, "weights": np.full_like(batch["weights"], np.nan)}
    return plain(step, state, batch)

pretrain.timed_step = timed_step
sys.exit(pretrain.main(sys.argv[1:]))
"""


def test_both_processes_go_back_after_a_nan_in_the_rows_of_one(small_text, tmp_path):
    options = [*OPTIONS, "--layout", "data=2", "--steps", "6", "--save-every", "2"]
    options += ["--on-bad-step", "rollback", "--emulate", "1", "--replay-every", "3"]
    options += ["--text", str(small_text), "--out", str(tmp_path)]
    children = [
        start(["-c", POISONED, *options, *one]) for one in joined(2, free_port())
    ]
    ends = ends_of(children, timeout_s=200)
    assert [end.status for end in ends] == [0, 0], ends
    assert "back to step 2, and on 32 windows into the text" in ends[0].output
    assert rows(tmp_path / "metrics.jsonl", "step") == [0, 1, 2, 3, 4, 5, 5]
    assert rows(tmp_path / "metrics.jsonl", "skipped") == [0] * 6


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_process_that_stalls_ends_the_other_within_the_heartbeat_and_5_s(
    stalled, small_text, tmp_path
):
    children = [
        train("--emulate", "1", "--heartbeat", "6", *one, text=small_text, out=tmp_path)
        for one in joined(2, free_port())
    ]
    with killed_if_raised(children):
        wait_for_steps(tmp_path / "metrics.jsonl", 3)
        children[stalled].send_signal(signal.SIGSTOP)
        (end,) = ends_of([children[1 - stalled]], timeout_s=60)
    children[stalled].kill()
    ends_of([children[stalled]], timeout_s=10)
    assert end.status == 75, end.error[-2000:]
    assert f"process {stalled} on " in end.error
    assert "was not heard of for" in end.error
    silent_s = int(end.error.split("was not heard of for ")[1].split(" s")[0])
    assert silent_s <= 6 + 5
