"""A run goes on with other options; what may not change is named with the reason."""

import json
import shlex
import signal

import numpy as np
import pytest

from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.resume import (
    Position,
    changes,
    data_position,
    rate_change,
    refuse_other,
)
from tests.conftest import rows
from tests.run_steps import SMALL, compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture
def small(small_text, tmp_path):
    """A configuration with other options than these."""

    def config(**options):
        given = {"layout": "data=2", "text": small_text, "out": tmp_path / "a run"}
        return RunConfig(**{**SMALL, "decay_steps": None, **given, **options})

    return config


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2", "fsdp=2,tensor=2"])
def test_more_steps_have_the_losses_of_an_uninterrupted_run_on_any_layout(
    layout, small, tmp_path
):
    """With the same learning rates: those of `decay_steps`, not of `steps`."""
    whole = pretrain.pretrain(small(steps=7, out=tmp_path / "whole"))
    part = pretrain.pretrain(small(steps=3, decay_steps=7))
    times_s = rows(part.folder / "metrics.jsonl", "step_s")
    options = dict(steps=7, decay_steps=7, resume=True)
    rest = pretrain.pretrain(small(layout=layout, **options))
    assert (part.steps_done, rest.steps_done, rest.signal) == (3, 7, None)
    losses = [rows(end.folder / "metrics.jsonl", "loss") for end in (whole, rest)]
    assert len(losses[0]) == len(losses[1]) == 7
    assert rows(part.folder / "metrics.jsonl", "step_s")[:3] == times_s  # Not again.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert rest.validation_loss == pytest.approx(whole.validation_loss, rel=1e-6)


@pytest.fixture
def seen(monkeypatch):
    """Batches of the steps that are asked for, none of which is computed."""
    batches = []

    def timed_step(step, state, batch):
        batches.append(batch["tokens"])
        return counted_step(state)

    compute_nothing(monkeypatch, timed_step)
    return batches


def test_what_may_change_is_told_and_the_text_goes_on_where_it_was(
    small, seen, capsys, tmp_path
):
    pretrain.pretrain(small(steps=9, out=tmp_path / "whole", global_batch=4))
    windows = np.concatenate(seen)
    seen.clear()
    pretrain.pretrain(small(steps=3))
    other = tmp_path / "other.txt"
    other.write_text("Something else to read. " * 40)
    capsys.readouterr()
    options = dict(global_batch=4, learning_rate=1e-3, resume=True)
    pretrain.pretrain(small(steps=5, **options))
    output = capsys.readouterr().out
    assert "resumed after step 3, 24 windows into the text" in output
    for change in ("steps 3 -> 5", "global_batch 8 -> 4", "learning_rate 0.003 -> 0.0"):
        assert f"changed: {change}" in output
    assert "learning rate of step 3" in output
    assert "(--decay-steps 3 keeps its curve)" in output
    np.testing.assert_array_equal(np.concatenate(seen), windows[:32])
    pretrain.pretrain(small(steps=6, **options, text=other))
    output = capsys.readouterr().out
    assert "resumed after step 5, 0 windows into the text" in output
    assert f"-> {other}" in output
    assert rows(tmp_path / "a run" / "metrics.jsonl", "step")[-3:] == [4, 5, 5]


def test_what_may_not_change_is_told_in_one_line(small, seen, refuses_recipe):
    config = small(steps=3)
    pretrain.pretrain(config)
    resumed = ["--resume", "--out", str(config.out)]
    for options, refusal in (
        ("--model vocab=256,layers=4", ("run.changed_model", "layers", 1, 4)),
        ("--preset tiny --model layers=2", ("run.changed_model",)),
        ("--seed 1", ("run.changed_seed", "seed", 0, 1)),
        ("--steps 2", ("run.too_few_steps", 3, "steps", 2)),
    ):
        argv = [*resumed, *options.split()]
        refuses_recipe(lambda argv=argv: pretrain.main(argv), *refusal)
    saved = json.loads(json.dumps(parse_arguments(resumed).values()))
    assert (saved["steps"], saved["layout"]) == (3, "data=2")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_ends_with_its_status_and_a_command_that_goes_on(
    number, status, small, seen, monkeypatch, capsys
):
    plain = pretrain.timed_step

    def timed_step(step, state, batch):
        if int(state.step) == 1:
            signal.raise_signal(number)
        return plain(step, state, batch)

    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    started = shlex.split(pretrain.resuming_command(small(steps=4), []))
    assert pretrain.main(started[:-1]) == status
    output = capsys.readouterr().out
    hint = shlex.split(output.split("; go on with\n")[1].splitlines()[0])
    assert hint[:2] == ["meshpar", "train"] and "a run" in hint[hint.index("--out") + 1]
    assert pretrain.main(hint[2:]) == 0
    assert rows(small().metrics_path, "step") == [0, 1, 2, 3, 3]


def test_steps_that_were_skipped_do_not_move_the_learning_rate():
    before = {"steps": 20, "decay_steps": None, "learning_rate": 0.01}
    config = RunConfig(steps=40, learning_rate=0.01)
    (told,) = rate_change(config, before, done=12, skipped=2)
    (of_ten,) = rate_change(config, before, done=10)
    assert told.partition(" 0.0")[2] == of_ten.partition(" 0.0")[2]
    assert told != rate_change(config, before, done=12)[0]


def test_a_checkpoint_of_an_earlier_version_says_less():
    before = {"steps": 9, "seed": 0, "global_batch": 8, "seq": 16, "preset": "tiny"}
    now = {**before, "model_sizes": {"layers": 4}, "data": "a"}
    refuse_other(before, now, done=9)
    assert data_position(before, now, done=5) == Position(step=5, windows=40)
    assert changes(before, now) == []


def test_windows_of_another_length_begin_at_the_beginning():
    before = {"data": "a", "seq": 8, "windows": 40}
    assert data_position(before, {"data": "a", "seq": 4}, done=5).windows == 0


def test_a_resumed_run_with_fewer_steps_than_are_done_is_refused(refuses):
    now = {"steps": 4, "seed": 0, "model_sizes": {}}
    with refuses("run.too_few_steps", 5, "steps", 4):
        refuse_other({}, now, done=5)
