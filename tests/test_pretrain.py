"""The recipe resumes on another layout, stops cleanly, tells bad input in one line."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshpar import InputError
from meshpar.recipes import pretrain, report
from meshpar.recipes.config import RunConfig
from meshpar.recipes.model import model_of
from meshpar.recipes.texts import read_tokens
from tests.conftest import rows

QUICK = "--preset tiny --seq 32 --global-batch 8 --sample-tokens 1 --steps 6"


def run(folder, text, *options):
    arguments = QUICK.split() + ["--out", str(folder), "--text", str(text), *options]
    return pretrain.main(arguments)


def hint_of(output, *, done):
    """The options of the command that is printed when a run stops."""
    before, after = output.split(f"stopped after step {done}; go on with\n")
    words = shlex.split(after.splitlines()[0])
    assert words[:2] == ["meshpar", "train"]
    return words[2:]


def test_a_run_resumed_on_another_layout_continues_with_the_same_losses(
    tmp_path, small_text, capsys
):
    whole, split = tmp_path / "whole", tmp_path / "split"
    assert run(whole, small_text, "--layout", "data=2") == 0
    assert run(split, small_text, "--layout", "data=2", "--stop-after", "3") == 0
    hint = hint_of(capsys.readouterr().out, done=3)
    assert pretrain.main([*hint, "--layout", "fsdp=4,tensor=2"]) == 0
    losses = [rows(folder / "metrics.jsonl", "loss") for folder in (whole, split)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    output = capsys.readouterr().out
    for word in ("fsdp=4,tensor=2", "blocks.mlp.down", "bigram", "checkpoint in"):
        assert word in output


def test_a_run_goes_on_under_a_pipeline_and_prints_both_its_bubbles(
    tmp_path, small_text, capsys
):
    assert run(tmp_path, small_text, "--layout", "data=2", "--stop-after", "3") == 0
    options = ("--layout", "stage=2,microbatches=4", "--bubble-rounds", "1")
    assert run(tmp_path, small_text, *options, "--resume") == 0
    output = capsys.readouterr().out
    assert "bubble of 1f1b, stage=2, microbatches=4: predicted 0.200" in output
    assert re.search(r"predicted 0.200, measured -?\d\.\d{3}: of a step of", output)
    assert len(rows(tmp_path / "metrics.jsonl", "loss")) == 6


def without_arithmetic(monkeypatch, *, dies_at=None):
    """Steps that only count, until one is as if the machine had gone."""

    def timed_step(step, state, batch):
        if int(state.step) == dies_at:
            raise KeyboardInterrupt
        row = {"loss": 5.5, "tokens_per_s": 1.0, "step_s": 1.0, "skipped": 0.0}
        return replace(state, step=state.step + 1), row

    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    monkeypatch.setattr(pretrain, "validate", lambda *args: 5.25)
    monkeypatch.setattr(pretrain, "sample", lambda *args: np.array([65]))


def test_a_step_that_changes_nothing_is_told(tmp_path, small_text, capsys, monkeypatch):
    plain = pretrain.timed_step

    def timed_step(step, state, batch):
        if int(state.step) == 2:
            weights = np.full_like(batch["weights"], np.inf)
            batch = {**batch, "weights": weights}
        return plain(step, state, batch)

    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    assert run(tmp_path, small_text, "--layout", "data=2") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "step 2: loss nan" in output and "1 steps skipped so far" in output
    assert output.count("skipped so far") == 1
    assert rows(tmp_path / "metrics.jsonl", "skipped") == [0, 0, 1, 1, 1, 1]


def test_every_step_has_one_row_after_a_crash_and_after_a_finished_run(
    tmp_path, small_text, monkeypatch
):
    options = (tmp_path, small_text, "--layout", "data=2", "--save-every", "2")
    options += ("--validate-every", "3")
    log = tmp_path / "metrics.jsonl"
    without_arithmetic(monkeypatch, dies_at=5)
    assert run(*options) == 130
    assert rows(log, "step") == [0, 1, 2, 2, 3, 4]
    with log.open("a") as file:
        file.write('{"step": 5, "lo')
    without_arithmetic(monkeypatch)
    for _ in range(2):
        assert run(*options, "--resume") == 0
        assert rows(log, "step") == [0, 1, 2, 2, 3, 4, 5, 5]
        assert rows(log, "validation_loss") == [5.25, 5.25]


def test_a_fresh_run_does_not_add_to_the_metrics_of_one_without_a_checkpoint(
    tmp_path, small_text, monkeypatch, capsys
):
    without_arithmetic(monkeypatch, dies_at=2)
    assert run(tmp_path, small_text, "--layout", "data=2") == 130
    capsys.readouterr()
    log = tmp_path / "metrics.jsonl"
    before = log.read_text()
    assert run(tmp_path, small_text, "--layout", "data=2") == 2
    assert capsys.readouterr().err == (
        f"pretrain: '{log}' holds 2 rows of another run; delete it, or name another "
        "--out or --log-json\n"
    )
    assert log.read_text() == before


def test_ctrl_c_saves_and_ends_cleanly(tmp_path, small_text):
    command = [sys.executable, "-m", "recipes.pretrain", *QUICK.split()]
    command += ["--steps", "100000", "--layout", "data=2", "--text", str(small_text)]
    command += ["--out", str(tmp_path)]
    log = tmp_path / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    program = shlex.join([sys.executable, "-m", "recipes.pretrain"])
    hint = output.split("; go on with\n  ")[1].splitlines()[0]
    assert hint.startswith(f"{program} --layout data=2 --preset tiny --steps 100000 ")
    assert hint.endswith(
        f"--out {tmp_path} --global-batch 8 --seq 32 --sample-tokens 1 --resume"
    )
    assert any(name.isdecimal() for name in os.listdir(tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "/no/such/file"], "no text at '/no/such/file'"),
        (["--layout", "data=3"], "do not divide over 3 devices"),
        (["--layout", "data=16"], "needs 16 devices, but there are 8"),
        (["--emulate", "0", "--layout", "data=9"], "or give --emulate 9 for virtual"),
        (["--preset", "tiny-vit"], "'tiny-vit' is no model of a text alone"),
        (["--preset", "megatron-1.7b"], "is a published run's, which meshpar plan"),
        (["--model", "layrs=2"], "LlamaConfig has no 'layrs'; did you mean 'layers'"),
        (["--model", "/no/config.json"], "are both given; give one"),
        (["--model", "tiny", "--preset", "tiny"], "are both given; give one, or"),
        (["--layout", "tenser=2"], "did you mean 'tensor'"),
        (["--layout", "stage=8"], "8 stages, but the model has 4 layers"),
        (["--layout", "stage=2,microbatches=16"], "which do not divide over 1 devices"),
        (["--layout", "tensor=8"], "'kv_heads' has size 4, which does not divide"),
        (["--preset", "test"], "a vocabulary of 64, but bytes need 256"),
        (["--preset", "no"], "no preset 'no'"),
        (["--preset", "tiny-gpt2", "--seq", "300"], "the model has max_seq=256"),
        (["--seed", "-1"], "seed=-1: must be a whole number of at least 0"),
        (["--emulate", "4"], "emulate(4): JAX has already started with 8 cpu devices"),
        (["--emulate", "-1"], "emulate=-1: must be a whole number of at least 0"),
        (["--resume"], "no checkpoint in"),
        (["--seq", "100000"], "too few for one window"),
        (["--schedule", "/no/orders.csv"], "/no/orders.csv"),
        (["--log-json", "/dev/null/rows"], "metrics cannot be written to '/dev/null"),
        (["--out", "/dev/null/run"], "cannot make the checkpoint folder '/dev/null"),
        (["--preset", "mixtral-8x7b", "--layout", "data=8"], "GB for 8 CPU devices"),
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(
    tmp_path, small_text, capsys, options, words
):
    assert run(tmp_path / "run", small_text, *options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(model="layers=2"), "no embed, heads, vocab given, and no preset"),
        (dict(model="/no/config.json"), "/no/config.json"),
        (dict(model="tinny"), "no preset 'tinny'; did you mean 'tiny'"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        model_of(RunConfig(**options))


@pytest.mark.parametrize("name", ["tiny", "layers=2,hidden=32,heads=4,vocab=256"])
def test_a_model_is_a_name_or_sizes(name):
    assert model_of(RunConfig(model=name)).num_layers in (2, 4)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TypeError])
def test_a_bug_keeps_its_traceback(tmp_path, small_text, monkeypatch, kind):
    def fail(*args, **kwargs):
        raise kind("emulate(8): shapes do not match")

    monkeypatch.setattr("meshpar.recipes.step.make_train_step", fail)
    with pytest.raises(kind, match="shapes do not match"):
        run(tmp_path / "run", small_text)


def write_one_row(run, state, log, stop):
    """In the place of `pretrain.train`."""
    log.write(step=0, loss=5.5)
    return state


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        (
            "meshpar.train.metrics.JsonLines.write",
            "the disk of '{out}' is full; free some",
        ),
        (
            "orbax.checkpoint.CheckpointManager.save",
            "checkpoint of step 0 not written to '{out}/checkpoints': the disk is full",
        ),
    ],
)
def test_a_full_disk_is_told_in_one_line_with_the_folder(
    tmp_path, small_text, monkeypatch, capsys, writer, words
):
    monkeypatch.setattr(pretrain, "train", write_one_row)
    monkeypatch.setattr(writer, no_space)
    assert run(tmp_path, small_text, "--layout", "data=2") == 2
    error = capsys.readouterr().err
    assert words.format(out=tmp_path) in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_elsewhere_is_told_with_the_file(
    tmp_path, small_text, monkeypatch, capsys
):
    monkeypatch.setattr(pretrain, "train", write_one_row)
    options = ("--layout", "data=2", "--log-json", "/dev/full")
    assert run(tmp_path, small_text, *options) == 2
    error = capsys.readouterr().err
    words = "the disk of '/dev/full' is full; free some space or name another folder"
    assert error == f"pretrain: {words}\n"


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b"\x00\x01\xff", "is not UTF-8 text")]
)
def test_a_file_that_is_no_text_is_told_in_one_line(tmp_path, capsys, content, words):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert run(tmp_path / "run", path) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_several_texts_are_trained_on_one_after_another(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, letter in ((tmp_path / "a.txt", "a"), (folder / "b.txt", "b")):
        path.write_text(letter * 100)
    (folder / "c.txt").write_text("c" * 50)
    texts = read_tokens((tmp_path / "a.txt", folder), seq=8)
    assert bytes(texts.train) == b"a" * 90 + b"\n" + b"b" * 100
    assert bytes(texts.validation) == b"a" * 10 + b"\n" + b"c" * 50


def test_the_progress_bar_says_that_the_first_step_compiles(
    tmp_path, small_text, monkeypatch
):
    without_arithmetic(monkeypatch)
    said, counting = [], pretrain.timed_step

    def timed_step(step, state, batch):
        said.append(bars[-1].tasks[0].description)
        return counting(step, state, batch)

    bars = []
    plain = report.progress_bar
    monkeypatch.setattr(
        report,
        "progress_bar",
        lambda console: bars.append(plain(console)) or bars[-1],
    )
    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    options = ("--layout", "data=2", "--validate-every", "4")
    assert run(tmp_path, small_text, *options) == 0
    assert said == ["compiling", *["training"] * 5]


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path, small_text, capsys):
    assert run(tmp_path, small_text, "--layout", "data=2", "--stop-after", "1") == 0
    assert run(tmp_path, small_text, "--layout", "data=2") == 2
    assert "holds a run at step 1; add --resume" in capsys.readouterr().err
