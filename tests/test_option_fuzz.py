"""Every option of every command takes any value, or refuses it in one line."""

import io
import sys

import pytest

from meshpar.cli.main import main
from meshpar.recipes import finetune, moe
from tests.file_fuzz.process import run
from tests.option_fuzz.values import VALUES, options
from tests.refusals import status_of


@pytest.mark.slow
def test_no_value_of_an_option_ends_a_command_in_a_trace(tmp_path):
    """`python -m tests.option_fuzz --command NAME FOLDER` tries those of a command."""
    found = run("tests.option_fuzz", folder=tmp_path)
    print(found.counts)
    assert found.status == 0, found.told
    assert sum(sum(one.values()) for one in found.counts.values()) >= 3000
    assert not any(one["fault"] for one in found.counts.values())


def test_all_options_of_the_parsers_are_tried():
    found = {(option.command, option.name) for option in options()}
    for expected in (
        *(("plan", "--hardware"), ("inspect", "checkpoint"), ("train", "--config")),
        *(("train", "--from-weights"), ("finetune", "--chat"), ("fuzz", "--seed")),
    ):
        assert expected in found
    assert len(found) * len(VALUES) >= 3000


CONTROL = "\x1b[31m\n\r\u202e"


def test_a_value_of_control_characters_is_escaped_on_one_line(capsys):
    """Of a subcommand, where argparse quotes it as it is, and of a recipe."""
    for end in (
        lambda: main(["lint", "--layout", "data=2", f"x{CONTROL}"]),
        lambda: main(["fuzz", f"--with-rules={CONTROL}"]),
        lambda: finetune.main(["--from", f"absent{CONTROL}"]),
        lambda: finetune.main(["--from", "a", f"--rank={CONTROL}"]),
        lambda: moe.main(["--layout", f"data={CONTROL}"]),
    ):
        assert status_of(end) == 2
        told = capsys.readouterr().err.splitlines(keepends=True)
        assert len(told) == 1 and not set("\x1b\r\u202e") & set(told[0])


@pytest.mark.parametrize(
    "words",
    [
        *(["--rank", "x"], ["--chat", "a", "--text", "b"], ["--resume", "often"]),
        *(["--no-such", "1"], ["--from", "s3://bucket/x"], ["--from", "x" * 5000]),
    ],
)
def test_an_option_of_finetune_is_refused_in_one_line(words, capsys):
    assert status_of(lambda: finetune.main(["--from", "absent", *words])) == 2
    told = capsys.readouterr().err
    assert told.startswith("finetune: ") and told.count("\n") == 1


def test_a_name_that_stdout_cannot_encode_is_printed_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert status_of(lambda: main(["inspect", "absent"])) == 2
    print("a\udcff", flush=True)
    assert written.getvalue() == b"a\\udcff\n"
