"""One configuration of a run: from a command line, a file, or Python; and back."""

import ast
import doctest
import importlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from meshpar import InputError
from meshpar.cli.main import main as meshpar
from meshpar.models.presets import TEXT_PRESETS
from meshpar.recipes.command import main
from meshpar.recipes.config import OPTIONS, RunConfig
from meshpar.recipes.config_file import SAVED, as_toml, save
from meshpar.recipes.model import config_of, model_of
from meshpar.recipes.options import parse_arguments, program_words, resuming_command
from meshpar.recipes.report import print_config

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(
    "module",
    [
        *("config", "config_file", "data_waits", "goodput", "option_checks", "options"),
        *("resume", "texts"),
    ],
)
def test_the_examples_of_the_recipe_hold(module):
    module = importlib.import_module(f"meshpar.recipes.{module}")
    assert doctest.testmod(module).failed == 0


def test_reading_the_options_imports_no_jax():
    """So that `meshpar train --help` and a wrong option answer at once."""
    for name in ("command", "options", "config", "config_file", "option_checks"):
        tree = ast.parse((RECIPES / f"{name}.py").read_text())
        found = {
            name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None) or node.names[0].name]
        }
        light = {"meshpar.distributed", "meshpar.errors", "meshpar.train.faults"}
        light |= {"meshpar.data.sources", "tyro"}
        ours = {f"meshpar.recipes.{name}" for name in ("config", "config_file")}
        ours |= {"meshpar.recipes.options", "meshpar.recipes.option_checks"}
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
def test_a_file_and_the_command_line_are_checked_together(tmp_path, resumed):
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
    with pytest.raises(InputError, match=f"^'{file}': rollback_steps=10"):
        parse_arguments(source)
    with pytest.raises(InputError, match="^rollback_steps=20 with save_every=5"):
        parse_arguments([*source, "--rollback-steps", "20"])


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def cut_off(path, text, **_):
        path.write_bytes(text[:9].encode())
        raise OSError("disk full")

    before = save(RunConfig(steps=3), tmp_path).read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_off)
        with pytest.raises(OSError, match="disk full"):
            save(RunConfig(steps=4), tmp_path)
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
    ("options", "words"),
    [
        (["--stpes", "5"], "no option --stpes; did you mean 'steps'"),
        (["--global_bach=5"], "no option --global_bach; did you mean 'global-batch'"),
        (["runs/a"], "no option takes 'runs/a'; each value follows its --option"),
        (["--steps", "five"], "--steps: invalid literal for int()"),
        (["--steps", "0"], "steps=0: must be a whole number of at least 1"),
        (["--steps"], "Missing value for argument '--steps'"),
        (["--dtype", "fp8"], "invalid choice 'fp8' for argument '--dtype'"),
        (["--learning-rate", "nan"], "learning_rate=nan: must be a positive number"),
        (["--sample-tokens", "-1"], "sample_tokens=-1: must be a whole number of at"),
        (["--resume"], "--resume needs the folder of the run: give --out DIR"),
        (["--spike", "3"], "spike=3 needs another on_bad_step than 'skip'"),
        (["--spike", "0.5"], "spike=0.5: must be a finite number above 1"),
        (["--on-low-memory", "go"], "invalid choice 'go' for argument"),
        (["--profile", "-1"], "profile=-1: must be a whole number of at least 0"),
        (["--config", "/no/run.toml"], "cannot read '/no/run.toml': No such file"),
        (["--config", "/no/run.ini"], "'/no/run.ini' is no .toml, .yaml or .yml file"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(options, words, capsys):
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pretrain: {words}") or f"{words}" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "stpes = 5", "a.toml': no key 'stpes'; did you mean 'steps'"),
        ("a.yaml", "stpes: 5", "a.yaml': no key 'stpes'; did you mean 'steps'"),
        ("a.toml", "steps 5", "a.toml' is no TOML: Expected '='"),
        ("a.yml", "steps: [5", "a.yml' is no YAML: while parsing"),
        ("a.yaml", "- steps", "a.yaml' holds no options"),
        ("a.toml", "steps = 'x'", "a.toml': Error parsing --steps: invalid literal"),
        ("a.toml", "[steps]\na = 5", "a.toml': steps is {'a': 5}; give a text"),
        ("a.toml", "steps = [2, 3]", "steps is [2, 3], 2 values, but it takes 1"),
        (
            "a.toml",
            "global_batch = 4\nglobal-batch = 8",
            "'global_batch' and 'global-batch' are one option; give one",
        ),
        ("a.yaml", "steps: 2\nsteps: 3", "key 'steps' stands there 2 times; give it"),
        ("a.toml", "steps = 0", "a.toml': steps=0: must be a whole number"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(steps="5"), "steps='5': must be a whole number of at least 1"),
        (dict(steps=True), "steps=True: must be a whole number"),
        (dict(learning_rate=0), "learning_rate=0: must be a positive number"),
        (dict(dtype="fp8"), "dtype='fp8': must be 'fp32' or 'bf16'"),
        (dict(resume=True), "--resume needs the folder"),
        (dict(text="caf\udce9.txt"), r"text='caf.udce9.txt': character 3 is a byte"),
        (dict(out="caf\udce9"), "out='caf.udce9': character 3 is a byte that is no"),
        (
            dict(on_bad_step="rollback", rollback_steps=10, save_every=1),
            "rollback_steps=10 with save_every=1 may need 10 checkpoints, but keep=2",
        ),
    ],
)
def test_python_is_refused_the_same(options, match):
    with pytest.raises(InputError, match=match):
        RunConfig(**options)


def test_meshpar_train_is_the_recipe(capsys):
    assert meshpar(["train", "--stpes", "3"]) == 2
    assert capsys.readouterr().err.startswith("meshpar train: no option --stpes; did")
    with pytest.raises(SystemExit):
        meshpar(["--help"])
    assert "Trains a language model on a text" in capsys.readouterr().out


def test_what_the_extra_brings_is_named_with_it_where_it_is_missing(
    monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "grain", None)
    for module in ("meshpar.recipes.pretrain", "meshpar.data.device_batches"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["--steps", "1"]) == 2
    assert capsys.readouterr().err == (
        "pretrain: training needs grain: pip install 'meshpar[train]'\n"
    )


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
    print_config(console, config, Path("config.toml"))
    text = console.export_text()
    assert "x[/old]" in text and "my[red].txt" in text


def test_every_preset_of_text_has_a_token_for_each_byte():
    for preset in TEXT_PRESETS:
        assert config_of(RunConfig(preset=preset)).vocab >= 256 or preset == "test"
    assert model_of(RunConfig(preset="tiny-gemma3")).num_layers == 3, "groups of two"
