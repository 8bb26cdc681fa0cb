"""Real processes over gloo train as one process does, and end together."""

import signal
import time

import numpy as np
import pytest

from meshpar import InputError
from meshpar.recipes.config import RunConfig
from meshpar.recipes.joined import agreed, agreed_stop, refuse_different
from meshpar.recipes.pretrain import pretrain
from meshpar.train.interrupt import StopRequest
from tests.conftest import rows
from tests.marks import slow
from tests.multiprocess.children import (
    ends_of,
    free_port,
    joined,
    killed_if_raised,
    start,
)

MODEL = dict(preset="test", model="vocab=256,layers=4", seq=16, global_batch=8)
OPTIONS = [
    *("--preset", "test", "--model", "vocab=256,layers=4", "--seq", "16"),
    *("--global-batch", "8", "--sample-tokens", "1", "--bubble-rounds", "0"),
    *("--start-timeout", "200"),
]
STEPS = 5


def processes_of(number, devices, *options):
    """Starts `meshpar train` in several processes of so many devices each."""
    command = ["-m", "meshpar", "train", *OPTIONS, "--emulate", str(devices), *options]
    return [start([*command, *one]) for one in joined(number, free_port())]


def train(number, devices, *options, timeout_s=300):
    """The processes' ends, each of which must be good."""
    ends = ends_of(processes_of(number, devices, *options), timeout_s)
    for end in ends:
        assert end.status == 0, end.error[-3000:]
    return ends


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, small_text):
    """The losses of a run of this process, and its last look at the validation text."""
    out = tmp_path_factory.mktemp("one")
    config = RunConfig(
        **MODEL, layout="data=4", steps=STEPS, text=small_text, out=out, sample_tokens=0
    )
    result = pretrain(config)
    return rows(out / "metrics.jsonl", "loss"), result.validation_loss


def test_two_processes_have_the_losses_of_one_which_goes_on_from_their_checkpoint(
    one_process, small_text, tmp_path
):
    options = ["--steps", str(STEPS), "--stop-after", "3", "--out", str(tmp_path)]
    options += ["--layout", "fsdp=2,tensor=2", "--text", str(small_text)]
    first, second = train(2, 2, *options, timeout_s=200)
    assert "stopped after step 3; go on with" in first.output
    assert "layout" in first.output and "layout" not in second.output
    losses, validation_loss = one_process
    log = tmp_path / "metrics.jsonl"
    np.testing.assert_allclose(rows(log, "loss"), losses[:3], rtol=1e-5)
    times_s = rows(log, "step_s")
    config = RunConfig(
        **MODEL,
        layout="data=2",
        steps=STEPS,
        text=small_text,
        out=tmp_path,
        resume="auto",
        sample_tokens=0,
    )
    result = pretrain(config)
    np.testing.assert_allclose(rows(log, "loss"), losses, rtol=1e-5)
    assert result.validation_loss == pytest.approx(validation_loss, rel=1e-5)
    assert rows(log, "step_s")[:3] == times_s  # Those steps were not done again.


@pytest.mark.parametrize(
    ("number", "devices", "layout"),
    [
        slow(2, 4, "data=2,stage=2,tensor=2,microbatches=2"),
        slow(2, 4, "stage=2,fsdp=2,tensor=2,microbatches=4,zero=2"),
        slow(4, 2, "fsdp=4,tensor=2"),
        slow(4, 2, "data=2,stage=4,microbatches=4,schedule=gpipe"),
        slow(4, 2, "data=8,zero=1"),
    ],
)
def test_processes_train_as_one_and_resume_with_others(
    number, devices, layout, one_process, small_text, tmp_path
):
    losses, validation_loss = one_process
    common = ["--steps", str(STEPS), "--out", str(tmp_path), "--text", str(small_text)]
    train(number, devices, *common, "--layout", layout, "--stop-after", "3")
    log = tmp_path / "metrics.jsonl"
    times_s = rows(log, "step_s")
    other = [*common, "--layout", "data=2,tensor=2", "--resume", "auto"]
    train(2, 2, *other)
    assert rows(log, "step_s")[:3] == times_s and len(times_s) == 3
    np.testing.assert_allclose(rows(log, "loss"), losses, rtol=1e-5)
    assert rows(log, "validation_loss")[-1] == pytest.approx(validation_loss, rel=1e-5)


def wait_for_steps(log, number, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if log.exists() and len(log.read_text().splitlines()) >= number:
            return
        time.sleep(0.1)
    raise AssertionError(f"fewer than {number} steps in {timeout_s} s")


@pytest.fixture
def long_run(small_text, tmp_path):
    """Options of a run without an end, and its metrics."""
    options = ["--layout", "data=2", "--steps", "100000", "--save-every", "5"]
    options += ["--validate-every", "100000", "--out", str(tmp_path)]
    return [*options, "--text", str(small_text)], tmp_path / "metrics.jsonl"


@pytest.mark.slow
def test_sigterm_of_one_process_saves_and_stops_all_after_the_same_step(long_run):
    options, log = long_run
    children = processes_of(2, 1, *options)
    with killed_if_raised(children):
        wait_for_steps(log, 3)
    children[1].send_signal(signal.SIGTERM)
    ends = ends_of(children, timeout_s=60)
    assert [end.status for end in ends] == [143, 143], ends
    done = rows(log, "step")[-1] + 1
    assert (log.parent / "checkpoints" / str(done)).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_is_killed_ends_the_other_which_says_so(dead, long_run):
    options, log = long_run
    children = processes_of(2, 1, *options)
    with killed_if_raised(children):
        wait_for_steps(log, 7)
        children[dead].kill()
        end = ends_of([children[1 - dead]], timeout_s=60)[0]
    ends_of([children[dead]], timeout_s=5)
    # Of process 0's end JAX's own service may tell first, by a signal.
    assert end.status == 75 or (dead == 0 and end.status == -signal.SIGABRT)
    if end.status == 75:
        assert f"process {dead} on " in end.error
        assert "Traceback" not in end.error
    steps = rows(log, "step")
    ends = ends_of(
        processes_of(2, 1, *options, "--stop-after", "20", "--resume", "auto"), 200
    )
    assert [one.status for one in ends] == [0, 0], ends
    after = rows(log, "step")
    assert after == list(range(20))
    assert len(steps) >= 7


class Gathered:
    """Stands in for the processes: what another gathers is given."""

    def __init__(self, *of_other):
        self.of_other = list(of_other)

    def gather(self, value):
        return [value, self.of_other.pop(0)]


def test_a_folder_given_to_one_process_only_is_told_with_both_values(tmp_path):
    other = RunConfig(out=tmp_path).values()
    with pytest.raises(InputError, match="process 1 was started with out='.*out=None"):
        agreed(RunConfig(), Gathered(other))
    with pytest.raises(InputError, match="process 1 was started with seq=None"):
        refuse_different([{"seq": 16}, {}])


def test_a_signal_that_came_late_to_one_process_stops_all():
    here, none = StopRequest(), StopRequest()
    assert agreed_stop(Gathered(signal.SIGTERM), here)
    assert here.signal == signal.SIGTERM
    assert not agreed_stop(Gathered(None), none) and not none.requested


def test_options_that_differ_are_named_with_both_values():
    one = RunConfig(layout="data=4", process_id=0).values()
    refuse_different([one, {**one, "process_id": 1}])
    match = "process 1 was started with layout='data=2', process 0 with layout='data=4'"
    with pytest.raises(InputError, match=match):
        refuse_different([one, {**one, "layout": "data=2"}])
