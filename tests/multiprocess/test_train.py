"""Real processes over gloo train as one process does, and end together."""

import re
import signal
import time

import numpy as np
import pytest

from meshpar.recipes.config import RunConfig
from meshpar.recipes.joined import agreed, agreed_stop, refuse_different
from meshpar.recipes.pretrain import pretrain
from meshpar.train.faults import StopRequest
from tests.conftest import rows
from tests.multiprocess.children import (
    COLD,
    ends_of,
    free_port,
    joined,
    killed_if_raised,
    start,
)
from tests.refusals import names
from tests.run_steps import shared_steps as shared_steps

pytestmark = pytest.mark.usefixtures("shared_steps")

MODEL = dict(preset="test", model="vocab=256,layers=4", seq=16, global_batch=8)
OPTIONS = [
    *("--preset", "test", "--model", "vocab=256,layers=4", "--seq", "16"),
    *("--global-batch", "8", "--sample-tokens", "1", "--bubble-rounds", "0"),
    *("--start-timeout", "200"),
]
STEPS = 5


def processes_of(number, devices, *options, **how):
    """Starts `meshpar train` in several processes of so many devices each."""
    command = ["-m", "meshpar", "train", *OPTIONS, "--emulate", str(devices), *options]
    return [start([*command, *one], **how) for one in joined(number, free_port())]


def train(number, devices, *options, timeout_s=300):
    """The processes' ends, each of which must be good."""
    ends = ends_of(processes_of(number, devices, *options), timeout_s)
    for end in ends:
        assert end.status == 0, end.error[-3000:]
    return ends


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, small_text, shared_steps):
    """The losses of a run of this process, and its last look at the validation text."""
    return run_of_one(tmp_path_factory.mktemp("one"), small_text)


def run_of_one(out, text, **options):
    """The losses of all steps in this process, and its last look at the other text."""
    config = dict(layout="data=2", steps=STEPS, text=text, out=out, sample_tokens=0)
    result = pretrain(RunConfig(**{**MODEL, **config, **options}))
    return rows(out / "metrics.jsonl", "loss"), result.validation_loss


def test_two_processes_have_the_losses_of_one_which_goes_on_from_their_checkpoint(
    small_text, tmp_path
):
    one, two = tmp_path / "one", tmp_path / "two"
    small = "vocab=256,layers=1"
    options = ["--steps", str(STEPS), "--stop-after", "3", "--out", str(two)]
    options += ["--layout", "fsdp=2,tensor=2", "--text", str(small_text)]
    options += ["--model", small, "--sample-tokens", "0"]
    first, second = train(2, 2, *options, timeout_s=200)
    assert names(first.output, 3) and "--resume" in first.output
    assert "layout" in first.output and "layout" not in second.output
    losses, validation_loss = run_of_one(one, small_text, model=small)
    log = two / "metrics.jsonl"
    np.testing.assert_allclose(rows(log, "loss"), losses[:3], rtol=1e-5)
    times_s = rows(log, "step_s")
    found, found_validation = run_of_one(two, small_text, model=small, resume="auto")
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert found_validation == pytest.approx(validation_loss, rel=1e-5)
    assert rows(log, "step_s")[:3] == times_s  # Those steps were not done again.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "devices", "layout"),
    [
        (2, 4, "data=2,stage=2,tensor=2,microbatches=2"),
        (2, 4, "stage=2,fsdp=2,tensor=2,microbatches=4,zero=2"),
        (4, 2, "fsdp=4,tensor=2"),
        (4, 2, "data=2,stage=4,microbatches=4,schedule=gpipe"),
        (4, 2, "data=8,zero=1"),
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


SEVERAL = """
import sys
from dataclasses import replace
from functools import partial
import numpy as np
from meshpar.recipes import pretrain
from meshpar.recipes.joined import join
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.phases import Phases

pretrain.validate = lambda *args: 5.25
pretrain.sample = lambda *args: np.array([65])
lines, options = sys.argv[1].split(), sys.argv[2:]
config = parse_arguments(options)
with join(config) as processes:
    log = partial(pretrain.metrics_log, processes, on_metrics=None, callbacks=())
    for line in lines:
        run = replace(config, layout=line, out=config.out / line)
        words = ("meshpar", "train")
        pretrain.joined_run(run, processes, Phases(), log, None, words)
"""


def losses_of_layouts(number, devices, lines, options, out, timeout_s=500):
    """Layout -> losses, all of one start of the processes."""
    command = ["-c", SEVERAL, " ".join(lines), *options, "--emulate", str(devices)]
    command += ["--out", str(out), "--steps", str(STEPS)]
    children = [start([*command, *one]) for one in joined(number, free_port())]
    for end in ends_of(children, timeout_s):
        assert end.status == 0, end.error[-3000:]
    return {line: rows(out / line / "metrics.jsonl", "loss") for line in lines}


EXPERTS = "layers=2,embed=32,heads=4,kv_heads=2,vocab=256,experts=8,expert_ffn=16"


@pytest.fixture(scope="module")
def one_process_with_experts(tmp_path_factory, small_text):
    """The losses of a model with experts, of this process."""
    out = tmp_path_factory.mktemp("experts")
    model = {**MODEL, "preset": "tiny-moe", "model": EXPERTS}
    config = RunConfig(
        **model, layout="data=2", steps=STEPS, text=small_text, out=out, sample_tokens=0
    )
    pretrain(config)
    return rows(out / "metrics.jsonl", "loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "devices", "lines"),
    [
        (2, 2, ["context=2,fsdp=2"]),
        (
            2,
            4,
            [
                "data=2,context=4",
                "stage=2,context=2,fsdp=2,microbatches=2",
                "context=4,tensor=2,attention=allgather",
            ],
        ),
        (4, 2, ["context=4,fsdp=2,zero=2", "context=2,data=4,attention=ulysses"]),
    ],
)
def test_processes_split_sequences_as_one_does(
    number, devices, lines, one_process, small_text, tmp_path
):
    options = [*OPTIONS, "--text", str(small_text)]
    found = losses_of_layouts(number, devices, lines, options, tmp_path)
    for line, losses in found.items():
        np.testing.assert_allclose(losses, one_process[0], rtol=1e-5, err_msg=line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "devices", "lines"),
    [
        (2, 2, ["expert=4"]),
        (2, 4, ["expert=8", "fsdp=2,expert=4", "stage=2,expert=4,microbatches=2"]),
        (4, 2, ["expert=8", "expert=4,tensor=2"]),
    ],
)
def test_processes_split_experts_as_one_does(
    number, devices, lines, one_process_with_experts, small_text, tmp_path
):
    options = [*OPTIONS, "--text", str(small_text), "--preset", "tiny-moe"]
    options += ["--model", EXPERTS]
    found = losses_of_layouts(number, devices, lines, options, tmp_path)
    for line, losses in found.items():
        np.testing.assert_allclose(
            losses, one_process_with_experts, rtol=1e-5, err_msg=line
        )


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_and_with_more_processes_and_says_how(
    one_process, small_text, tmp_path
):
    """The same options each time: the devices that there are take the batch."""
    losses, _ = one_process
    options = ["--steps", str(STEPS), "--out", str(tmp_path), "--resume", "auto"]
    options += ["--layout", "data=-1,tensor=2", "--text", str(small_text)]
    train(4, 2, *options, "--stop-after", "2")
    first, _ = train(2, 2, *options, "--stop-after", "4")
    told = r"\b4 devices \D*8\b.* data=4,tensor=2 -> data=2,tensor=2,microbatches=2;"
    assert re.search(told + r" \D*8 sequences", first.output), first.output
    first, *_ = train(4, 2, *options)
    assert re.search(r"\b8 devices \D*4\b", first.output), first.output
    found = rows(tmp_path / "metrics.jsonl", "loss")
    np.testing.assert_allclose(found, losses, rtol=1e-5)


FALL_BACK = """
import sys, warnings
from pathlib import Path
import jax, numpy as np
import meshpar
from meshpar.train.checkpoint import checkpoints as checkpoint
from meshpar.train.checkpoint import Checkpoints
from tests.test_checkpoint import RUN, small_state

number, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
by_hand = dict(coordinator="localhost:" + port, num_processes=2, process_id=number)
warnings.simplefilter("always")
with meshpar.distributed.start(emulate=1, timeout_s=100, **by_hand) as processes:
    with Checkpoints(folder, processes=processes) as checkpoints:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        split = jax.NamedSharding(mesh, jax.P("data"))
        whole = jax.NamedSharding(mesh, jax.P())

        def state_of(step):
            state = small_state(step)
            return jax.tree.map(
                lambda x: jax.make_array_from_callback(
                    x.shape, split if x.ndim else whole, lambda i: np.asarray(x)[i]
                ),
                state,
            )

        for step in (3, 5):
            checkpoints.save(state_of(step), {"saved": step})
    processes.gather("saved")
    if number == 0:
        noted = sorted(path.name for path in (folder / "5").glob("checksums*"))
        print("noted", noted, flush=True)
        for path in (folder / "5").glob("checksums*"):
            path.unlink()
    processes.gather("unsealed")
    if number == 1:  # What only one of them will fail to read.
        read = checkpoint.read_run

        def read_but_5(folder):
            if folder.name == "5":
                raise OSError("broken here")
            return read(folder)

        checkpoint.read_run = read_but_5
    with Checkpoints(folder, processes=processes) as checkpoints:
        run = checkpoints.run_of_latest()
        state = state_of(0)
        shapes = jax.eval_shape(lambda: state)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        step = int(checkpoints.restore(shapes, shardings).step)
        print("read", run, step, sorted(checkpoints.damaged), flush=True)
"""


@pytest.mark.slow
def test_what_one_process_cannot_read_all_pass_over(tmp_path):
    port = str(free_port())
    commands = [
        ["-c", FALL_BACK, str(number), port, str(tmp_path)] for number in (0, 1)
    ]
    ends = ends_of([start(command) for command in commands], timeout_s=200)
    for end in ends:
        assert end.status == 0, end.error[-3000:]
        assert "read {'saved': 3} 3 [5]" in end.output
    noted = "['checksums-0-of-2.json', 'checksums-1-of-2.json']"
    assert f"noted {noted}" in ends[0].output


FAILS_WHILE_SAVING = """
import sys, time
from pathlib import Path
import jax, numpy as np
import meshpar
from meshpar.train.checkpoint import Checkpoints
from tests.test_checkpoint import small_state

number, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
by_hand = dict(coordinator="localhost:" + port, num_processes=2, process_id=number)
with meshpar.distributed.start(emulate=1, timeout_s=100, **by_hand) as processes:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.NamedSharding(mesh, jax.P())
    state = jax.tree.map(
        lambda x: jax.make_array_from_callback(
            x.shape, whole, lambda i: np.asarray(x)[i]
        ),
        small_state(3),
    )
    with Checkpoints(folder, processes=processes) as checkpoints:
        checkpoints.save(state, {"saved": 3}, wait=False)
        if number == 1:
            raise ValueError("a fault of one process")
        time.sleep(600)
"""


@pytest.mark.slow
def test_an_error_in_one_process_that_saves_holds_up_none(tmp_path):
    """Neither Orbax's threads nor JAX's service are waited for at exit."""
    port = str(free_port())
    code = FAILS_WHILE_SAVING
    commands = [["-c", code, str(number), port, str(tmp_path)] for number in (0, 1)]
    first, second = ends_of([start(command) for command in commands], timeout_s=200)
    assert first.status == 75 and "process 1" in first.error
    assert second.status not in (0, None)
    assert "ValueError: a fault of one process" in second.error
    assert max(first.wall_s, second.wall_s) < 150


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
    children = processes_of(2, 1, *options, interpreter=COLD)
    with killed_if_raised(children):
        wait_for_steps(log, 7)
        children[dead].kill()
        end = ends_of([children[1 - dead]], timeout_s=60)[0]
    ends_of([children[dead]], timeout_s=5)
    # Of process 0's end JAX's own service may tell first, by a signal.
    assert end.status == 75 or (dead == 0 and end.status == -signal.SIGABRT)
    if end.status == 75:
        assert names(end.error, f"process {dead}")
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


def test_a_folder_given_to_one_process_only_is_told_with_both_values(tmp_path, refuses):
    other = RunConfig(out=tmp_path).values()
    key, one = "processes.different_options", "process 1"
    with refuses(key, one, f"out='{tmp_path}'", "process 0", "out=None"):
        agreed(RunConfig(), Gathered(other))
    with refuses(key, one, "seq=None", "process 0", "seq=16"):
        refuse_different([{"seq": 16}, {}])


def test_a_signal_that_came_late_to_one_process_stops_all():
    here, none = StopRequest(), StopRequest()
    assert agreed_stop(Gathered(signal.SIGTERM), here)
    assert here.signal == signal.SIGTERM
    assert not agreed_stop(Gathered(None), none) and not none.requested


def test_options_that_differ_are_named_with_both_values(refuses):
    one = RunConfig(layout="data=4", process_id=0).values()
    refuse_different([one, {**one, "process_id": 1}])
    told = "process 1", "layout='data=2'", "process 0", "layout='data=4'"
    with refuses("processes.different_options", *told):
        refuse_different([one, {**one, "layout": "data=2"}])
