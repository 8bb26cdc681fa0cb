"""Options that recipes share have one meaning each, and completion knows them all."""

import importlib
import subprocess

import pytest

from meshpar.cli.main import SUBCOMMANDS, main
from meshpar.recipes import segment_volume
from meshpar.recipes.config import OPTIONS
from meshpar.recipes.shared_options import metrics_file

PARSERS = {
    "diffusion": "_arguments",
    "forecast": "_parser",
    "long_context": "_arguments",
    "moe": "_parser",
    "recommend": "_parser",
    "segment_volume": "_parser",
}


def options_of(recipe, words):
    made = getattr(
        importlib.import_module(f"meshpar.recipes.{recipe}"), PARSERS[recipe]
    )
    return (
        made(words) if PARSERS[recipe] == "_arguments" else made().parse_options(words)
    )


@pytest.mark.parametrize("recipe", PARSERS)
def test_out_is_the_folder_of_the_run_in_every_recipe(recipe, tmp_path):
    args = options_of(recipe, ["--out", str(tmp_path / "run"), "--steps", "3"])
    assert args.out == tmp_path / "run" and args.steps == 3 and args.layout
    if hasattr(args, "log_json"):
        assert metrics_file(args) == tmp_path / "run" / "metrics.jsonl"
        assert args.out.is_dir()


@pytest.mark.parametrize(
    ("recipe", "old", "name"),
    [
        ("diffusion", "--batch", "global_batch"),
        ("forecast", "--every", "validate_every"),
        ("forecast", "--rate", "learning_rate"),
        ("long_context", "--rows", "global_batch"),
        ("segment_volume", "--every", "validate_every"),
        ("segment_volume", "--rate", "learning_rate"),
    ],
)
def test_the_old_spelling_is_taken_with_a_warning(recipe, old, name, capsys):
    for words in ([old, "7"], [f"{old}=7"]):
        assert getattr(options_of(recipe, words), name) == 7
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{old} is now --{name.replace('_', '-')}" in line


def test_a_nifti_file_in_out_is_taken_for_the_prediction(tmp_path, capsys):
    args = options_of("segment_volume", ["--out", str(tmp_path / "found.nii.gz")])
    segment_volume._move_prediction(args)
    assert (args.prediction, args.out) == (str(tmp_path / "found.nii.gz"), None)
    assert "--prediction" in capsys.readouterr().err


def test_a_misspelt_option_of_a_recipe_has_its_nearest_name(capsys):
    with pytest.raises(SystemExit) as ended:
        options_of("moe", ["--stepps", "3"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--stepps" in line and "did you mean --steps" in line


def test_completion_has_every_command_and_every_option_of_train(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert not ended.value.code
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(words, at):
        command = (
            f"source {script}; COMP_WORDS=(meshpar {words}); COMP_CWORD={at}; "
            '_shtab_meshpar; echo "${COMPREPLY[@]}"'
        )
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return set(found.stdout.split())

    assert completed("''", 1) >= set(SUBCOMMANDS)
    names = {f"--{name.replace('_', '-')}" for name in OPTIONS}
    assert completed("train --", 2) >= names
    assert completed("plan --glo", 2) == {"--global-batch"}
