"""Bad steps are skipped, rolled back or the end; what hangs ends with its stacks."""

import json
import subprocess
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import meshpar
from meshpar.distributed import Processes
from meshpar.models.presets import build
from meshpar.recipes import fits, pretrain, replayed
from meshpar.recipes.config import RunConfig
from meshpar.recipes.goodput import Goodput
from meshpar.recipes.phases import Phases
from meshpar.recipes.rollback import rolled_back
from meshpar.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    UncheckedCheckpointWarning,
)
from meshpar.train.faults import BadStepError, StepWatch, Watchdog
from meshpar.train.memory_report import estimated_bytes
from meshpar.train.same_step import replay
from tests import warm
from tests.conftest import rows
from tests.run_steps import SMALL, compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps
from tests.states import drawn

pytestmark = pytest.mark.usefixtures("shared_steps")


def watched(watch, losses, first=0):
    for step, loss in enumerate(losses, first):
        watch.check(step, loss=loss, skipped=not np.isfinite(loss))


def test_skipped_steps_go_on_unless_many_come_in_a_row(refuses):
    watch = StepWatch("skip", patience=3)
    watched(watch, [np.nan, np.nan, 2.0, np.inf, np.nan])
    with refuses("run.gradients_not_finite", 7, 3, kind=BadStepError):
        watched(watch, [np.nan], first=7)


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_other_policies_end_at_the_first(policy, refuses):
    with refuses("run.loss_not_finite", 1, "nan", kind=BadStepError):
        watched(StepWatch(policy), [2.0, np.nan])


def test_a_spike_is_above_the_usual_loss_and_does_not_become_usual(refuses):
    watch = StepWatch("stop", spike=2.0)
    watched(watch, [9.0, 1.0])  # Too few to know what is usual.
    watched(watch, [2.0] * 6)
    with refuses("run.loss_spike", 5, 2.5, 2, kind=BadStepError):
        watched(watch, [5.0])


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            dict(spike=0.5, policy="stop"),
            ("run.spike_not_above_one", "spike=0.5", 1),
        ),
        (dict(spike=2.0, policy="skip"), ("run.spike_with_skip", "spike=2", "skip")),
    ],
)
def test_what_would_do_nothing_is_refused(options, refusal, refuses):
    with refuses(*refusal):
        StepWatch(**options)


@pytest.fixture
def small(small_text, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "validate", lambda *args: 5.25)
    monkeypatch.setattr(pretrain, "sample", lambda *args: np.array([65]))

    def config(**options):
        given = {"layout": "data=2", "text": small_text, "out": tmp_path / "run"}
        return RunConfig(**{**SMALL, **given, **options})

    return config


@pytest.fixture
def poisoned(monkeypatch):
    """NaN in the weights of the batches that begin with these tokens, and all seen."""
    first_tokens, seen = set(), []
    plain = pretrain.timed_step

    def timed_step(step, state, batch):
        first = tuple(np.asarray(batch["tokens"])[0].tolist())
        seen.append(first)
        if first in first_tokens or len(seen) in first_tokens:
            first_tokens.add(first)
            batch = {**batch, "weights": np.full_like(batch["weights"], np.nan)}
        return plain(step, state, batch)

    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    return first_tokens, seen


@pytest.fixture
def counted(monkeypatch):
    """The losses of steps that only count: of each call, 2 where none is given."""
    losses, calls = {}, []

    def timed_step(step, state, batch):
        loss = losses.get(len(calls), 2.0)
        calls.append(loss)
        return counted_step(state, loss)

    compute_nothing(monkeypatch, timed_step)
    return losses, calls


def test_a_rollback_goes_back_and_on_with_the_text_after_the_bad_step(
    small, poisoned, capsys
):
    first_tokens, seen = poisoned
    first_tokens.add(4)  # The fourth batch, of step 3.
    config = small(steps=6, save_every=2, on_bad_step="rollback")
    result = pretrain.pretrain(config)
    assert result.steps_done == 6
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "step 3: loss nan or its gradients are not finite; back to step 2, and on"
        in (output)
    )
    assert "and on 32 windows into the text" in output
    assert len(set(seen)) == len(seen) == 8
    ledger = json.loads((config.folder / "goodput.json").read_text())
    assert (ledger["starts"], ledger["firsts"]) == (1, [0, 2])
    assert 0 < ledger["lost_s"] == ledger["undone_s"] < ledger["spent_s"]["step"]
    steps = rows(config.metrics_path, "step")
    assert steps == [0, 1, 2, 3, 4, 5, 5]
    assert rows(config.metrics_path, "skipped") == [0] * 6
    with Checkpoints(config.folder / "checkpoints") as checkpoints:
        assert checkpoints.run_of_latest()["windows"] == 8 * 8


def test_a_rollback_refuses_a_later_checkpoint_than_the_bad_step(refuses):
    """The one chosen could not be read, and the newest was read instead."""
    began = []

    class Unreadable:
        step_read = 6

        def finish(self):
            began.append("finish")

        def newest_good(self, at_most):
            return at_most

        def restore(self, shapes, shardings):
            return None

    run = SimpleNamespace(
        config=RunConfig(on_bad_step="rollback", rollback_steps=2),
        checkpoints=Unreadable(),
        step=SimpleNamespace(state_shapes=None, shardings=None),
        num_rollbacks=0,
        phases=SimpleNamespace(begin=began.append),
    )
    bad = BadStepError(5, "loss 9 is 4 times the usual 2", key="run.loss_spike")
    with refuses("run.no_checkpoint_before_bad_step", 5, 4, kind=BadStepError):
        rolled_back(run, bad)
    assert began == ["restoring", "finish"]


@pytest.mark.parametrize(
    ("config", "step", "refusal"),
    [
        (dict(on_bad_step="stop"), 2, ("run.loss_not_finite", 2, 150)),
        (dict(on_bad_step="stop", save_every=5), 2, ("run.loss_not_finite", 2, 5)),
        (
            dict(on_bad_step="rollback", rollback_steps=5),
            2,
            ("run.no_checkpoint_before_bad_step", 0, "--keep", 2, 5),
        ),
    ],
)
def test_what_there_is_to_go_back_to_is_told(config, step, refusal, refuses):
    checkpoints = SimpleNamespace(
        latest_step=None, finish=lambda: None, newest_good=lambda at_most: None
    )
    run = SimpleNamespace(
        config=RunConfig(**config),
        checkpoints=checkpoints,
        step=None,
        num_rollbacks=0,
        phases=SimpleNamespace(begin=lambda name: None),
    )
    with refuses(*refusal, kind=BadStepError):
        rolled_back(run, BadStepError(step, "loss nan", key="run.loss_not_finite"))


def test_a_rollback_does_not_forget_what_loss_is_usual(small, counted, capsys):
    losses, calls = counted
    losses.update({9: 50.0, 11: 50.0})
    config = small(steps=12, save_every=4, on_bad_step="rollback", spike=3.0)
    assert pretrain.pretrain(config).steps_done == 12
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("is 25 times the usual 2; back to step 8") == 2
    assert calls.count(50.0) == 2


def test_stop_ends_with_status_1_and_leaves_the_checkpoint_before(
    small, counted, refuses_recipe
):
    counted[0][3] = np.nan
    config = small(steps=6, save_every=2, on_bad_step="stop")
    words = ["--text", str(config.text[0]), "--out", str(config.out)]
    words += ["--preset", "test", "--model", "vocab=256", "--seq", "16", "--steps", "6"]
    words += ["--global-batch", "8", "--layout", "data=2", "--save-every", "2"]
    words += ["--on-bad-step", "stop"]
    told = "run.loss_not_finite", 3, "nan", 2
    refuses_recipe(lambda: pretrain.main(words), *told, status=1)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    small, monkeypatch, capsys
):
    plain, failed = Checkpoints.save, []

    def save(self, state, run, *, wait=True):
        if int(state.step) == 2:
            failed.append(2)
            raise CheckpointError("disk trouble", key="checkpoint.not_written")
        plain(self, state, run, wait=wait)

    monkeypatch.setattr(Checkpoints, "save", save)
    config = small(steps=4, save_every=1)
    assert pretrain.pretrain(config).steps_done == 4
    output = " ".join(capsys.readouterr().out.split())
    assert "disk trouble; the run goes on, and the checkpoint before stays" in output
    assert failed == [2]
    names = sorted(one.name for one in (config.folder / "checkpoints").iterdir())
    assert names == ["3", "4"]


def test_resume_auto_begins_where_there_is_no_checkpoint_and_passes_a_damaged_one_over(
    small, capsys
):
    config = small(steps=3, save_every=1, stop_after=2, resume="auto")
    config.folder.mkdir()
    config.metrics_path.write_text('{"step": 0, "loss": 1.0}\n')
    pretrain.pretrain(config)
    kept = config.metrics_path.with_name(f"{config.metrics_path.name}.before")
    assert kept.read_text() == '{"step": 0, "loss": 1.0}\n'
    assert f"are kept as {kept}" in capsys.readouterr().out.replace("\n", " ")
    whole = rows(config.metrics_path, "loss")
    files = (config.folder / "checkpoints" / "2" / "state").rglob("*")
    largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(b"")
    capsys.readouterr()
    pretrain.pretrain(small(steps=3, resume="auto"))
    output = " ".join(capsys.readouterr().out.split())
    assert "checkpoint of step 2 is damaged: its file state/" in output
    assert "resumed after step 1" in output
    losses = rows(config.metrics_path, "loss")
    np.testing.assert_allclose(losses[:2], whole, rtol=1e-6)
    assert rows(config.metrics_path, "step") == [0, 1, 2, 2]


def test_a_damaged_one_without_checksums_is_told_when_reading_finds_it(small, capsys):
    config = small(steps=3, save_every=1, stop_after=2)
    pretrain.pretrain(config)
    folder = config.folder / "checkpoints" / "2"
    (folder / "checksums.json").unlink()
    for file in (folder / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    capsys.readouterr()
    with pytest.warns(UncheckedCheckpointWarning):
        pretrain.pretrain(small(steps=3, resume=True))
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("checkpoint of step 2 is damaged: ") == 1
    assert "resumed after step 1" in output


@pytest.fixture(scope="module")
def half_split():
    """A step, its state and a batch, of arrays that are split and that are not."""
    step = meshpar.make_train_step(
        build("test", layers=1), optax.adam(1e-3), "data=4,tensor=2", check=False
    )
    tokens = np.random.default_rng(0).integers(0, 64, (4, 9))
    batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:])
    batch["weights"] = np.ones((4, 8), np.float32)
    return step, drawn(step, scale=0.1), batch


def test_sound_devices_give_the_same_bits_twice(half_split):
    assert replay(*half_split) is None


def test_one_bit_on_one_device_is_found_there(half_split, monkeypatch):
    step, state, batch = half_split
    plain, calls = step.loss_and_gradients, []

    def second_is_wrong(state, batch):
        loss, gradients = plain(state, batch)
        calls.append(loss)
        if len(calls) == 2:
            array = gradients["final_norm"]["scale"]
            shards = [np.array(shard.data) for shard in array.addressable_shards]
            shards[3].view(np.uint32)[5] ^= 1
            placed = [
                jax.device_put(values, shard.device)
                for values, shard in zip(shards, array.addressable_shards, strict=True)
            ]
            gradients["final_norm"]["scale"] = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, placed
            )
        return loss, gradients

    monkeypatch.setattr(step, "loss_and_gradients", second_is_wrong)
    device = step.mesh.devices.flat[3]
    found = replay(step, state, batch)
    assert found == (
        f"computed twice, gradients.final_norm.scale is not the same on {device}"
    )


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_replay_that_differs_is_a_bad_step(
    policy, small, counted, monkeypatch, capsys, refuses
):
    found = iter([None, "computed twice, x is not the same on cpu:3", None])
    monkeypatch.setattr(replayed, "replay", lambda *args: next(found))
    config = small(steps=5, replay_every=2, on_bad_step=policy)
    if policy == "stop":
        told = "run.step_not_repeatable", 4, "x", "cpu:3"
        with refuses(*told, kind=BadStepError):
            pretrain.pretrain(config)
    else:
        assert pretrain.pretrain(config).steps_done == 5
        assert "step 4: computed twice, x is not the same" in capsys.readouterr().out


HANG = """
import time
from meshpar.train.faults import Watchdog
with Watchdog(0.2) as watchdog:
    watchdog.phase("step")
    time.sleep(60)
"""


def test_a_process_whose_steps_do_not_end_writes_its_stacks_and_ends():
    child = subprocess.run(
        [*warm.words(), "-c", HANG], capture_output=True, text=True, timeout=50
    )
    assert child.returncode == 75
    assert "most recent call first" in child.stderr
    assert '"<string>", line 6 in <module>' in child.stderr
    assert "meshpar: process 0: no step has ended for 0.2 s" in child.stderr


class Ending:
    """Stands in for the processes of a job: what ends them is noted."""

    def __init__(self):
        self.why = threading.Event(), []

    def end_all(self, why, *, with_stacks):
        self.why[1].append((why, with_stacks))
        self.why[0].set()


@pytest.mark.parametrize("phase", ["saving", "restoring", "validating", "end"])
def test_every_phase_of_a_run_has_its_limit(phase):
    processes = Ending()
    with Watchdog(0.1, processes) as watchdog:
        phases = Phases(watchdog)
        phases.begin("step")
        with phases.during("data"):
            pass
        phases.begin(phase)
        assert processes.why[0].wait(20)
    ((why, with_stacks),) = processes.why[1]
    limit = "0.1" if phase == "saving" else "0.4"  # The others may compile.
    assert why.endswith(f"has not ended for {limit} s") and with_stacks
    assert phase in why or phase in ("restoring", "end")
    assert {"starting", "step", "data", phase} <= phases.spent_s().keys()


def test_the_start_of_a_run_has_its_limit():
    processes = Ending()
    with Watchdog(0.1, processes) as watchdog:
        Phases(watchdog)
        assert processes.why[0].wait(20)
    assert processes.why[1] == [("the start has not ended for 0.4 s", True)]


def test_a_phase_that_ends_is_followed_by_the_one_before():
    phases = Phases()
    phases.begin("step")
    with pytest.raises(ZeroDivisionError), phases.during("saving"):
        assert phases.now == "saving"
        raise ZeroDivisionError
    assert phases.now == "step"


def test_the_next_start_goes_on_with_the_ledger_of_the_one_before(tmp_path):
    first = Goodput(Phases(), tmp_path)
    first.begin(0)
    first.note(4)
    second = Goodput(Phases(), tmp_path)
    second.begin(3)
    rows_cut = [{"step": one, "step_s": 0.5} for one in (0, 3, 4)]
    second.lose([*rows_cut, {"step": 3, "validation_loss": 1.0}])
    assert 0 <= second.note(5) <= 1
    ledger = json.loads((tmp_path / "goodput.json").read_text())
    assert (ledger["starts"], ledger["firsts"]) == (2, [0, 3])
    # Steps 0 and 3 compiled; of step 4 nothing had been written.
    assert (ledger["lost_s"], ledger["undone_s"]) == (0.5, 0.0)
    assert "in 2 starts; seconds of the rest: lost 0.5" in second.line()


VERSION_1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
MEMINFO = "MemTotal: 900 kB\nMemAvailable:  800 kB\n"


@pytest.mark.parametrize(
    ("files", "free_bytes"),
    [
        ({}, 800 * 1024),
        ({"memory.max": "max\n", "memory.current": "5"}, 800 * 1024),
        ({"memory.max": "9000\n", "memory.current": "2000\n"}, 7000),
        (
            {
                "memory/memory.limit_in_bytes": "600",
                "memory/memory.usage_in_bytes": "9",
            },
            591,
        ),
        (
            {
                "memory.max": "9000",
                "memory.current": "8000",
                "memory.stat": "anon 7\ninactive_file 3000\nactive_file 5\n",
            },
            4000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "900",
                "memory/memory.usage_in_bytes": "800",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            400,
        ),
    ],
)
def test_a_control_group_may_have_less_memory_than_its_host(
    files, free_bytes, tmp_path
):
    for name, text in {"../../../proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        path.resolve().write_text(text)
    assert fits.host_memory_bytes(tmp_path) == free_bytes


def test_a_run_that_does_not_fit_is_told_with_both_numbers(
    monkeypatch, caplog, refuses
):
    config = RunConfig(**SMALL, layout="data=2")
    step = pretrain.make_step(config)
    states, temporary = estimated_bytes(step, meshpar.batch_shapes(8, 16))
    needed = 2 * (states + temporary)
    monkeypatch.setattr(fits, "_memory_bytes", lambda device: needed)
    fits.check_memory(config, step, Processes())
    monkeypatch.setattr(fits, "estimated_bytes", lambda *args: (states, temporary))
    monkeypatch.setattr(fits, "_memory_bytes", lambda device: needed - 1)
    with refuses("run.too_little_memory", "data=2", "0.0", 2, "CPU"):
        fits.check_memory(config, step, Processes())
    config = replace(config, on_low_memory="warn")
    fits.check_memory(config, step, Processes())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("layout 'data=2' needs about")


def test_processes_compare_their_steps_once_before_the_first(small, monkeypatch):
    steps = []

    def compared(processes, step, state, batch):
        steps.append((int(state.step), sorted(batch)))

    monkeypatch.setattr(pretrain, "check_same_step", compared)
    pretrain.pretrain(small(steps=2))
    [(first, names)] = steps
    assert first == 0 and {"targets", "tokens", "weights"} <= set(names)
