"""One configuration of a run: from a command line, a file, or Python; and back."""

import ast
import doctest
import errno
import importlib
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from meshpar.cli.main import main as meshpar
from meshpar.models.presets import TEXT_PRESETS
from meshpar.recipes.command import main
from meshpar.recipes.config import OPTIONS, RunConfig
from meshpar.recipes.config_file import SAVED, as_toml, save
from meshpar.recipes.model import build_model, model_config
from meshpar.recipes.options import parse_arguments, program_words, resuming_command
from meshpar.recipes.report import log_config
from meshpar.recipes.run_log import on_console
from tests.refusals import ending_of, names

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(
    "module",
    [
        *("config", "config_file", "data_waits", "goodput", "option_checks", "options"),
        *("optimizer_options", "resume", "texts"),
    ],
)
def test_the_examples_of_the_recipe_hold(module):
    module = importlib.import_module(f"meshpar.recipes.{module}")
    assert doctest.testmod(module).failed == 0


def test_reading_the_options_imports_no_jax():
    """So that `meshpar train --help` and a wrong option answer at once."""
    modules = ("command", "options", "config", "config_file", "option_checks")
    for name in (*modules, "optimizer_options"):
        tree = ast.parse((RECIPES / f"{name}.py").read_text())
        found = {
            name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None) or node.names[0].name]
        }
        light = {"meshpar.distributed", "meshpar.errors", "meshpar.train.faults"}
        light |= {"meshpar.data.sources", "meshpar.foreign_files", "tyro"}
        light |= {"meshpar.errors"}
        ours = {f"meshpar.recipes.{name}" for name in ("config", "config_file")}
        ours |= {"meshpar.recipes.options", "meshpar.recipes.option_checks"}
        ours |= {"meshpar.recipes.optimizer_options"}
        assert all(
            name in light | ours or name.split(".")[0] in sys.stdlib_module_names
            for name in found
        ), found


FILES = {
    "run.toml": 'steps = 7\nlearning-rate = 1e-4\ntext = ["a.txt", "b.txt"]\n',
    "run.yaml": "steps: 7\nlearning_rate: 1e-4\ntext: [a.txt, b.txt]\nout: null\n",
}


@pytest.mark.parametrize("name", FILES)
def test_the_command_line_wins_over_a_file_and_that_over_the_defaults(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name])
    found = parse_arguments(["--seed", "3", "--config", str(path), "--steps=9"])
    wanted = RunConfig(steps=9, seed=3, learning_rate=1e-4, text=("a.txt", "b.txt"))
    assert found == wanted
    other = parse_arguments(["--config", str(path), "--text", "c.txt"])
    assert other.text == (Path("c.txt"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [('out = "{out}"\n', ["--resume"]), ("resume = true\n", ["--out", "{out}"])],
    ids=["the file has the folder", "the file says resume"],
)
def test_a_file_and_the_command_line_resume_a_run_together(text, words, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text(text.format(out=tmp_path))
    words = [word.format(out=tmp_path) for word in words]
    found = parse_arguments([*words, "--config", str(config)])
    assert found.resume and found.folder == tmp_path


def test_the_sizes_of_a_file_are_found_from_any_folder():
    text = as_toml(RunConfig(model="config.json"))
    assert str(Path("config.json").absolute()) in text


def test_several_texts_are_several_options():
    found = parse_arguments(["--text", "a.txt", "--text", "b b.txt"])
    assert found.text == (Path("a.txt"), Path("b b.txt"))


EVERY = RunConfig(
    layout="fsdp=2",
    preset="test",
    model="vocab=256",
    dtype="bf16",
    text=("my text.txt", "-other.txt"),
    out="runs/a b",
    log_json="it's.jsonl",
    learning_rate=1e-5,
    decay_steps=10,
    stop_after=3,
    emulate=2,
)


def test_the_file_of_a_run_is_read_back(tmp_path):
    path = save(EVERY, tmp_path)
    found = parse_arguments(["--config", str(path)])
    # Its paths hold from any folder; the next run has a folder of its own.
    absolute = {
        "text": tuple(path.absolute() for path in EVERY.text),
        "log_json": EVERY.log_json.absolute(),
    }
    assert found == replace(EVERY, out=None, stop_after=None, **absolute)
    assert as_toml(found) == path.read_text()


def test_a_name_with_a_control_character_is_read_back(tmp_path):
    config = RunConfig(text="/a\x7f\tb.txt", out=tmp_path)
    assert (
        parse_arguments(["--config", str(save(config, tmp_path))]).text == config.text
    )


def test_a_list_of_one_value_is_that_value(tmp_path):
    (tmp_path / "a.toml").write_text("steps = [2]")
    assert parse_arguments(["--config", str(tmp_path / "a.toml")]).steps == 2


def test_rollbacks_that_always_have_a_checkpoint_are_taken():
    for options in (
        dict(keep=10),
        dict(keep_every=4),
        dict(steps=1),
        dict(save_every=9),
    ):
        RunConfig(
            **{"save_every": 1, "rollback_steps": 10, **options}, on_bad_step="rollback"
        )


@pytest.mark.parametrize("resumed", [False, True])
def test_a_file_and_the_command_line_are_checked_together(tmp_path, resumed, refuses):
    file = tmp_path / SAVED
    source = ["--out", str(tmp_path), "--resume"] if resumed else []
    source = source or ["--config", str(file)]
    rollback = ["--on-bad-step", "rollback", "--rollback-steps", "10"]
    for text, words in (
        ('on_bad_step="rollback"\nrollback_steps=10\nsave_every=5', ["--keep", "4"]),
        ("keep=5", [*rollback, "--save-every", "5"]),
        ('data=["a.jsonl"]', ["--tokenizer", "t.json", "--validation-data", "b.txt"]),
        ('data=["a.jsonl"]\ntokenizer="t.json"', ["--eos", "<end>"]),
        ('data=["a.jsonl"]\neos="<end>"', ["--tokenizer", "t.json"]),
    ):
        file.write_text(text)
        parse_arguments([*source, *words])
    file.write_text('on_bad_step="rollback"\nrollback_steps=10\nsave_every=5\nkeep=2')
    with refuses("run.too_few_checkpoints", f"'{file}'", "rollback_steps=10"):
        parse_arguments(source)
    few = "run.too_few_checkpoints", "rollback_steps=20", "save_every=5"
    with refuses(*few) as caught:
        parse_arguments([*source, "--rollback-steps", "20"])
    assert not names(str(caught.value), file)


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def cut_off(path, text, **_):
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = save(RunConfig(steps=3), tmp_path).read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_off)
        with pytest.raises(OSError) as caught:
            save(RunConfig(steps=4), tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / SAVED).read_text() == before


def test_the_command_that_resumes_a_run_gives_the_same_run():
    words = shlex.split(resuming_command(EVERY, ["python", "-m", "recipes.pretrain"]))
    assert words[:3] == ["python", "-m", "recipes.pretrain"]
    assert parse_arguments(words[3:]) == replace(EVERY, resume=True, stop_after=None)


def test_a_resumed_run_is_as_it_was_but_for_what_is_given(tmp_path):
    save(RunConfig(steps=7, text="a.txt", preset="test"), tmp_path)
    words = ["--resume", "--out", str(tmp_path), "--text", "b.txt", "--seq", "64"]
    found = parse_arguments(words)
    assert (found.steps, found.preset, found.seq) == (7, "test", 64)
    assert found.text == (Path("b.txt"),)
    fresh = parse_arguments(words[1:])
    assert (fresh.steps, fresh.preset) == (150, None)


def test_a_folder_does_not_decide_on_other_processes_and_devices(tmp_path):
    of_start = f'coordinator = "10.0.0.1:1"\nnum_processes = 2\nout = "{tmp_path}/b"\n'
    (tmp_path / SAVED).write_text(
        f'seq = 64\nemulate = 4096\nstop_after = 1\noptimizer = "adamw"\n{of_start}'
    )
    found = parse_arguments(["--resume", "--out", str(tmp_path)])
    assert found == RunConfig(seq=64, resume=True, out=tmp_path)


@pytest.mark.parametrize("option", ["--log-json", "--tensorboard", "--data-cache"])
def test_a_folder_does_not_decide_what_is_written_elsewhere(option, tmp_path, refuses):
    run, outside = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "link").symlink_to(outside)
    name = option.removeprefix("--").replace("-", "_")
    words = ["--resume", "--out", str(run), "--data", "a.jsonl"]
    for path in (outside, run / ".." / "elsewhere", run / "link"):
        (run / SAVED).write_text(f'{name} = "{path}"\n')
        with refuses("run.folder_writes_outside", str(path), option, words=False):
            parse_arguments(words)
        given = parse_arguments([*words, option, str(outside)])
        assert getattr(given, name) == outside
    (run / SAVED).write_text(f'{name} = "{run}/inside"\n')
    assert getattr(parse_arguments(words), name) == run / "inside"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("python -m recipes.pretrain", "python -m recipes.pretrain"),
        ("python3.11 -m meshpar train", "python3.11 -m meshpar train"),
        ("python {bin}/meshpar train", "meshpar train"),
        ("python {other}/meshpar train", "{other}/meshpar train"),
    ],
)
def test_a_run_is_resumed_by_the_words_that_started_it(
    words, program, tmp_path, monkeypatch
):
    places = {"bin": tmp_path / "bin", "other": tmp_path / "other"}
    for place in places.values():
        place.mkdir()
        (place / "meshpar").write_text("#!/bin/sh\n")
        (place / "meshpar").chmod(0o755)
    monkeypatch.setenv("PATH", str(places["bin"]))
    options = ["--steps", "3"]
    monkeypatch.setattr(sys, "orig_argv", [*words.format(**places).split(), *options])
    found = program_words(options, default=["meshpar", "train"])
    assert found == program.format(**places).split()
    assert program_words(["--steps", "4"], default=["x"]) == ["x"]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--stpes", "5"], ("command.unknown_option", "--stpes", "steps")),
        (
            ["--global_bach=5"],
            ("command.unknown_option", "--global_bach", "global-batch"),
        ),
        (["runs/a"], ("command.stray_value", "runs/a")),
        (["--steps", "five"], ("command.bad_option", "--steps")),
        (["--steps", "0"], ("value.not_whole_number", "steps", 0, 1)),
        (["--steps"], ("command.bad_option", "--steps")),
        (["--dtype", "fp8"], ("command.bad_option", "fp8", "--dtype")),
        (["--learning-rate", "nan"], ("value.not_positive", "learning_rate", "nan")),
        (
            ["--sample-tokens", "-1"],
            ("value.not_whole_number", "sample_tokens", -1, 0),
        ),
        (["--resume"], ("run.resume_without_folder", "--resume", "--out")),
        (["--spike", "3"], ("run.spike_with_skip", "spike", 3, "on_bad_step")),
        (["--spike", "0.5"], ("run.spike_not_above_one", "spike", 0.5, 1)),
        (["--on-low-memory", "go"], ("command.bad_option", "go", "--on-low-memory")),
        (["--profile", "-1"], ("value.not_whole_number", "profile", -1, 0)),
        (["--config", "/no/run.toml"], ("run.unreadable_config", "/no/run.toml")),
        (
            ["--config", "/no/run.ini"],
            ("run.unknown_config_format", "/no/run.ini", ".yml"),
        ),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(options, refusal, refuses_recipe):
    is_ours = refusal[0] != "command.bad_option"  # That is in tyro's words.
    refuses_recipe(lambda: main(options), *refusal, words=is_ours)


@pytest.mark.parametrize(
    ("name", "text", "refusal"),
    [
        ("a.toml", "stpes = 5", ("run.unknown_config_key", "stpes", "steps")),
        ("a.yaml", "stpes: 5", ("run.unknown_config_key", "stpes", "steps")),
        ("a.toml", "steps 5", ("run.bad_toml",)),
        ("a.yml", "steps: [5", ("run.bad_yaml",)),
        ("a.yaml", "- steps", ("run.no_options_in_config",)),
        ("a.toml", "steps = 'x'", ("command.bad_option", "--steps")),
        ("a.toml", "[steps]\na = 5", ("run.bad_config_value", "steps", {"a": 5})),
        ("a.toml", "steps = [2, 3]", ("run.too_many_values", "steps", [2, 3], 1)),
        (
            "a.toml",
            "global_batch = 4\nglobal-batch = 8",
            ("run.option_under_two_keys", "'global_batch'", "'global-batch'"),
        ),
        ("a.yaml", "steps: 2\nsteps: 3", ("run.config_key_twice", "steps", 2)),
        ("a.toml", "steps = 0", ("value.not_whole_number", "steps", 0, 1)),
    ],
)
def test_a_wrong_file_is_told_in_one_line(
    name, text, refusal, tmp_path, refuses_recipe
):
    (tmp_path / name).write_text(text)
    of_others = "run.bad_toml", "run.bad_yaml", "command.bad_option"
    path = str(tmp_path / name)
    refuses_recipe(
        lambda: main(["--config", path]),
        *refusal,
        path,
        words=refusal[0] not in of_others,
    )


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (dict(steps="5"), ("value.not_whole_number", "steps", "'5'", 1)),
        (dict(steps=True), ("value.not_whole_number", "steps", True)),
        (dict(learning_rate=0), ("value.not_positive", "learning_rate", 0)),
        (dict(dtype="fp8"), ("run.unknown_dtype", "fp8", "fp32", "bf16")),
        (dict(resume=True), ("run.resume_without_folder", "--resume")),
        (dict(text="caf\udce9.txt"), ("run.option_not_utf8", "text", 3)),
        (dict(out="caf\udce9"), ("run.option_not_utf8", "out", 3)),
        (
            dict(on_bad_step="rollback", rollback_steps=10, save_every=1),
            ("run.too_few_checkpoints", "rollback_steps=10", 10, "keep=2"),
        ),
    ],
)
def test_python_is_refused_the_same(options, refusal, refuses):
    with refuses(*refusal):
        RunConfig(**options)


def test_meshpar_train_is_the_recipe(capsys, refuses_recipe):
    wrong = ["train", "--stpes", "3"]
    refuses_recipe(lambda: meshpar(wrong), "command.unknown_option", "--stpes", "steps")
    with pytest.raises(SystemExit):
        meshpar(["--help"])
    assert "Train a language model on a text" in capsys.readouterr().out


def test_what_the_extra_brings_is_named_with_it_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    for module in ("meshpar.recipes.pretrain", "meshpar.data.batches"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    end = ending_of(lambda: main(["--steps", "1"]))
    assert end.status == 2 and end.line.startswith("pretrain: ")
    assert names(end.line, "grain") and names(end.line, "'meshpar[train]'")


def test_help_has_every_option_an_example_and_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"], command="meshpar train")
    assert not ended.value.code
    text = capsys.readouterr().out
    for option in OPTIONS:
        assert f"--{option.replace('_', '-')}" in text
    assert "meshpar train --layout data=4" in text and "exit status: 0 done" in text
    assert SAVED == "config.toml"


def test_a_name_in_brackets_is_printed_as_it_is():
    console = Console(width=200, record=True)
    config = RunConfig(out=Path("runs/x[/old]"), text=(Path("my[red].txt"),))
    with on_console(console):
        log_config(config, Path("config.toml"))
    text = console.export_text()
    assert "x[/old]" in text and "my[red].txt" in text


def test_every_preset_of_text_has_a_token_for_each_byte():
    for preset in TEXT_PRESETS:
        assert model_config(RunConfig(preset=preset)).vocab >= 256 or preset == "test"
    assert build_model(RunConfig(preset="tiny-gemma3")).num_layers == 3, "groups of two"
