"""Commands that need no JAX start without it, and every help says what one needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.cli.main import SUBCOMMANDS, main

ROOT = Path(__file__).parents[1]
MODEL = "layers=4,hidden=64,heads=4,vocab=256"
ARITHMETIC = [
    ["plan", "--model", MODEL, "--devices", "8", "--seq", "64", "--global-batch", "16"],
    ["estimate", "--model", MODEL, "--layout", "fsdp=4,tensor=2", "--seq", "64"],
    ["estimate", "--model", "no-such-model", "--layout", "fsdp=4"],
    *([name, "--help"] for name in SUBCOMMANDS),
    *([name, "--no-such-option"] for name in SUBCOMMANDS),
    ["audit", "--layout", "data=2", "--target", "gpu:h10:1x8"],
    ["--help"],
    ["--version"],
    ["lnt"],
]
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "rich", "matplotlib", "plotly"}
NOT_FOR_WORDS = {"numpy", "socket", "email", "zipfile"}
"""Packages of arithmetic, of processes and of other packages' versions."""

SCRIPT = """
import contextlib, io, sys
from meshpar.cli.main import main
for argv in {argvs!r}:
    with contextlib.suppress(SystemExit):
        with contextlib.redirect_stdout(io.StringIO()):
            with contextlib.redirect_stderr(io.StringIO()):
                main(argv)
    found = {heavy!r} & {{name.partition(".")[0] for name in sys.modules}}
    if found:
        sys.exit(f"{{argv}} imports {{found}}")
"""


def run_script(script):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "argvs, heavy",
    [
        ([["plan", "--help"], ["estimate", "--hlp"], ["lnt"]], HEAVY | NOT_FOR_WORDS),
        (ARITHMETIC, HEAVY),
        (
            [
                [
                    "schedule",
                    "--schedule",
                    "1f1b",
                    "--stages",
                    "4",
                    "--microbatches",
                    "8",
                ]
            ],
            HEAVY,
        ),
    ],
    ids=["words", "all", "schedule"],
)
def test_arithmetic_help_and_misspelt_words_import_no_jax(argvs, heavy):
    child = run_script(SCRIPT.format(argvs=argvs, heavy=heavy))
    assert child.returncode == 0, child.stderr


def test_importing_meshpar_and_reading_a_layout_imports_neither_jax_nor_numpy():
    child = run_script(
        "import sys, meshpar\n"
        "meshpar.Layout.parse('data=2,stage=2')\n"
        "print({'jax', 'flax', 'optax', 'numpy'} & sys.modules.keys())"
    )
    assert child.stdout == "set()\n", child.stderr


# Help.


def help_of(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main([*argv, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_has_an_example_of_itself_and_the_exit_statuses(name, capsys):
    text = help_of([name], capsys)
    assert f"example:\n  meshpar {name} " in text
    assert re.search(r"exit status:\s+0 .*2 bad input", text)


ALONE = {
    "preset": "a model must be chosen",
    "model": "a model must be chosen",
    "model-from": "a model must be chosen",
    "recipe": "there is none",
    "keep": "there is none",
    "forbid": "there is none",
    "html": "nothing is written",
    "plot": "nothing is drawn",
    "trace": "nothing is written",
    "confirm": "nothing is compiled",
    "resume-as": "every fourth drawn case goes on elsewhere",
    "sync-every": "every step is of all replicas",
}
"""Options that take a value and mean nothing where they are left out."""

NOT_NEEDED = {"plan": {"layout"}, "fuzz": {"layout"}}


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name != "train"])
def test_help_says_the_default_of_every_option_that_takes_a_value(name, capsys):
    options = help_of([name], capsys).partition("options:")[2].partition("example:")[0]
    taking = {
        match[1]: " ".join(entry.split())
        for entry in re.split(r"\n  (?=-)", options)
        if (match := re.match(r"--([a-z-]+) [A-Z{]", entry))
    }
    assert taking or name == "doctor"  # which has only switches
    silent = [
        option
        for option, entry in taking.items()
        if "default" not in entry and "(required)" not in entry
    ]
    assert set(silent) <= ALONE.keys() | (
        {"layout"} if name in ("plan", "fuzz") else set()
    )


def test_the_help_of_training_says_the_default_of_every_option(capsys):
    entries = re.split(r"\n\W* --(?=[a-z])", help_of(["train"], capsys))[1:]
    assert len(entries) > 15
    silent = [
        entry.split()[0]
        for entry in entries
        if not re.search(r"\(default:|\(repeatable", " ".join(entry.split()))
    ]
    assert silent == []


def test_training_without_its_extra_says_how_to_install_it(
    monkeypatch, refuses_command
):
    monkeypatch.setitem(sys.modules, "grain", None)
    for name in ("pretrain", "command"):
        monkeypatch.delitem(sys.modules, f"meshpar.recipes.{name}", raising=False)
    monkeypatch.delitem(sys.modules, "meshpar.data.batches", raising=False)
    values = ("grain", "meshpar[train]")
    refuses_command(["train", "--steps", "1"], "run.missing_package", *values)


def test_the_help_of_the_command_names_every_subcommand_and_the_statuses(capsys):
    text = help_of([], capsys)
    assert all(re.search(rf"^    {name}\b", text, re.M) for name in SUBCOMMANDS)
    assert "exit status: 0 done, 1 the answer is no, 2 bad input" in text


def test_the_version_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(
        r"meshpar \S+.*, jax \d+(\.\d+)+, Python \d+\.\d+\.\d+\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    "argv, refusal",
    [
        (["lnt"], ("command.unknown_command", "'lnt'", "'lint'")),
        (
            ["plan", "--devicse", "8"],
            ("command.unknown_option", "--devicse 8", "--devices", "plan --help"),
        ),
    ],
)
def test_a_misspelt_word_is_told_with_the_nearest(argv, refusal, refuses_command):
    refuses_command(argv, *refusal)
