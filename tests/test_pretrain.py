"""The recipe resumes on another layout, stops cleanly, tells bad input in one line."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshpar.recipes import bubble, pretrain, report
from meshpar.recipes.config import RunConfig
from meshpar.recipes.model import build_model
from meshpar.recipes.texts import read_tokens
from tests import run_steps, warm
from tests.conftest import rows
from tests.marks import slow
from tests.run_steps import compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps
from tests.states import begin_with_zeros

pytestmark = pytest.mark.usefixtures("shared_steps")

TINY = ["--preset", "tiny", "--seq", "32", "--global-batch", "8", "--steps", "6"]
SMALL = [
    word
    for name, value in {**run_steps.SMALL, "steps": 6}.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]


def run(folder, text, *options, size=SMALL):
    words = [*size, "--out", str(folder), "--text", str(text), *options]
    return pretrain.main(words)


def hint_of(output, *, done):
    """The options of the command that is printed when a run stops."""
    before, after = output.split(f"stopped after step {done}; go on with\n")
    words = shlex.split(after.splitlines()[0])
    assert words[:2] == ["meshpar", "train"]
    return words[2:]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_goes_on_under_a_pipeline_and_measures_its_bubble(
    tmp_path, small_text, capsys
):
    two_layers = ("--model", "vocab=256,layers=2")
    options = (*two_layers, "--layout", "data=2", "--stop-after", "3")
    assert run(tmp_path, small_text, *options) == 0
    options = (
        *two_layers,
        "--layout",
        "stage=2,microbatches=4",
        "--bubble-rounds",
        "1",
    )
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
        return counted_step(state)

    compute_nothing(monkeypatch, timed_step)


def test_a_run_goes_on_under_a_pipeline_and_prints_both_its_bubbles(
    tmp_path, small_text, capsys, monkeypatch
):
    without_arithmetic(monkeypatch)
    found = bubble.Bubble(step_s=1.0, useful_s=0.75, rounds=1)
    monkeypatch.setattr(bubble, "measured_bubble", lambda *args: found)
    two_layers = ("--model", "vocab=256,layers=2")
    options = (*two_layers, "--layout", "data=2", "--stop-after", "3")
    assert run(tmp_path, small_text, *options) == 0
    options = (
        *two_layers,
        "--layout",
        "stage=2,microbatches=4",
        "--bubble-rounds",
        "1",
    )
    assert run(tmp_path, small_text, *options, "--resume") == 0
    output = capsys.readouterr().out
    assert "bubble of 1f1b, stage=2, microbatches=4: predicted 0.200" in output
    assert "predicted 0.200, measured 0.250: of a step of 1" in output
    assert rows(tmp_path / "metrics.jsonl", "step") == [0, 1, 2, 3, 4, 5, 5]


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
    for word in ("data=2", "blocks.mlp.down", "bigram", "checkpoint in"):
        assert word in output
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
    tmp_path, small_text, monkeypatch, refuses_recipe
):
    without_arithmetic(monkeypatch, dies_at=2)
    assert run(tmp_path, small_text, "--layout", "data=2") == 130
    log = tmp_path / "metrics.jsonl"
    before = log.read_text()
    refuses_recipe(
        lambda: run(tmp_path, small_text, "--layout", "data=2"),
        "run.metrics_are_taken",
        log,
        2,
    )
    assert log.read_text() == before


def test_ctrl_c_saves_and_ends_cleanly(tmp_path, small_text):
    command = [*warm.words(), "-m", "recipes.pretrain", *SMALL, "--steps", "100000"]
    command += ["--layout", "data=2", "--text", str(small_text), "--out", str(tmp_path)]
    log = tmp_path / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    program = shlex.join([sys.executable, "-m", "recipes.pretrain"])
    hint = output.split("; go on with\n  ")[1].splitlines()[0]
    assert hint.startswith(
        f"{program} --layout data=2 --preset test --model vocab=256,layers=1 "
        "--steps 100000 "
    )
    assert hint.endswith(
        f"--out {tmp_path} --global-batch 8 --seq 16 --decay-steps 7 "
        "--sample-tokens 1 --resume"
    )
    assert any(name.isdecimal() for name in os.listdir(tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--text", "/no/such/file"], ("data.missing_file", "/no/such/file")),
        (["--layout", "data=3"], ("batch.indivisible", 8, 3)),
        (["--layout", "data=16"], ("layout.wrong_device_count", 16, 8)),
        (
            ["--emulate", "0", "--layout", "data=9"],
            ("layout.wrong_device_count", 9, 8, "--emulate"),
        ),
        (["--preset", "tiny-vit"], ("model.not_of_text", "tiny-vit")),
        (["--preset", "megatron-1.7b"], ("model.only_for_planner", "megatron-1.7b")),
        (
            ["--model", "layrs=2"],
            ("model.unknown_size", "LlamaConfig", "layrs", "layers"),
        ),
        (
            ["--model", "/no/config.json"],
            ("model.preset_and_model", "tiny", "/no/config.json"),
        ),
        (
            ["--model", "tiny", "--preset", "tiny"],
            ("model.preset_and_model", "tiny", "layers=2"),
        ),
        (["--layout", "tenser=2"], ("layout.unknown_key", "tenser", "'tensor'")),
        (["--layout", "stage=8"], ("layout.too_many_stages", 8, 4)),
        (
            ["--layout", "stage=2,microbatches=16"],
            ("batch.indivisible", 8, 1, "microbatches=16"),
        ),
        (["--layout", "tensor=8"], ("layout.indivisible", "'kv_heads'", 4, 8)),
        (["--preset", "test"], ("model.vocabulary_too_small", 64, 256)),
        (["--preset", "no"], ("model.unknown_preset", "no")),
        (
            ["--preset", "tiny-gpt2", "--seq", "300"],
            ("batch.sequence_too_long", 300, "max_seq=256"),
        ),
        (["--seed", "-1"], ("value.not_whole_number", "seed", -1, 0)),
        (["--emulate", "4"], ("mesh.already_started", 4, 8, "cpu")),
        (["--emulate", "-1"], ("value.not_whole_number", "emulate", -1, 0)),
        (["--resume"], ("checkpoint.none_in_folder",)),
        (["--seq", "100000"], ("data.too_few_tokens", 100000)),
        (["--schedule", "/no/orders.csv"], (None, "/no/orders.csv")),
        (["--log-json", "/dev/null/rows"], ("run.unwritable_metrics", "/dev/null")),
        (["--out", "/dev/null/run"], ("checkpoint.folder_not_made", "/dev/null")),
        slow(
            ["--preset", "mixtral-8x7b", "--layout", "data=8"],
            ("run.too_little_memory", "GB", 8),
        ),
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(
    tmp_path, small_text, monkeypatch, refuses_recipe, options, refusal
):
    begin_with_zeros(monkeypatch)
    of_host = refusal[0] == "run.too_little_memory"
    refuses_recipe(
        lambda: run(tmp_path / "run", small_text, *options, size=TINY),
        *refusal,
        words=not of_host,
    )


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (dict(model="layers=2"), ("model.missing_sizes", "embed", "heads", "vocab")),
        (
            dict(model="/no/config.json"),
            ("weights.unreadable_json", "'/no/config.json'"),
        ),
        (dict(model="tinny"), ("model.unknown_preset", "tinny", "'tiny'")),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, refusal, refuses):
    with refuses(*refusal):
        build_model(RunConfig(**options))


@pytest.mark.parametrize("name", ["tiny", "layers=2,hidden=32,heads=4,vocab=256"])
def test_a_model_is_a_name_or_sizes(name):
    assert build_model(RunConfig(model=name)).num_layers in (2, 4)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TypeError])
def test_a_bug_keeps_its_traceback_and_has_a_status_of_its_own(
    tmp_path, small_text, monkeypatch, capsys, kind
):
    bug = kind("emulate(8): shapes do not match")

    def fail(*args, **kwargs):
        raise bug

    monkeypatch.setattr(pretrain, "make_step", fail)
    assert run(tmp_path / "run", small_text) == 70
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and str(bug) in trace[-1]
    assert kind.__name__ in line


def write_one_row(run, state, log, stop):
    """In the place of `pretrain.train`."""
    log.write(step=0, loss=5.5)
    return state


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("writer", "refusal"),
    [
        ("meshpar.train.metrics.JsonLines.write", (None, "'{out}'")),
        (
            "orbax.checkpoint.CheckpointManager.save",
            ("checkpoint.not_written", 0, "'{out}/checkpoints'"),
        ),
    ],
)
def test_a_full_disk_is_told_in_one_line_with_the_folder(
    tmp_path, small_text, monkeypatch, refuses_recipe, writer, refusal
):
    begin_with_zeros(monkeypatch)
    monkeypatch.setattr(pretrain, "train", write_one_row)
    monkeypatch.setattr(writer, no_space)
    key, *values = refusal
    refuses_recipe(
        lambda: run(tmp_path, small_text, "--layout", "data=2"),
        key,
        *(str(value).format(out=tmp_path) for value in values),
        words=key is None,  # The other has the free bytes of a disk.
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_elsewhere_is_told_with_the_file(
    tmp_path, small_text, monkeypatch, refuses_recipe
):
    begin_with_zeros(monkeypatch)
    monkeypatch.setattr(pretrain, "train", write_one_row)
    options = ("--layout", "data=2", "--log-json", "/dev/full")
    refuses_recipe(lambda: run(tmp_path, small_text, *options), None, "'/dev/full'")


@pytest.mark.parametrize(
    ("content", "refusal"),
    [(b"", ("data.empty_file",)), (b"\x00\x01\xff", ("data.not_utf8", 2))],
)
def test_a_file_that_is_no_text_is_told_in_one_line(
    tmp_path, refuses_recipe, content, refusal
):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    refuses_recipe(lambda: run(tmp_path / "run", path), *refusal, path)


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


def test_a_folder_with_a_run_in_it_is_not_overwritten(
    tmp_path, small_text, monkeypatch, refuses_recipe
):
    without_arithmetic(monkeypatch)
    assert run(tmp_path, small_text, "--layout", "data=2", "--stop-after", "1") == 0
    refuses_recipe(
        lambda: run(tmp_path, small_text, "--layout", "data=2"),
        "run.folder_is_taken",
        tmp_path,
        1,
        "--resume",
    )
