"""`refuses`: bad input is refused with a key and its numbers; a snapshot has the words.

A test holds what a program relies on: the error's key and the values that its message
must name. The sentences themselves stand in `tests/__snapshots__/`, which `make words`
writes anew: a change of English is read there, as one diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from meshpar.cli.main import BAD_INPUT, SUBCOMMANDS, main
from meshpar.errors import InputError

ROOT = Path(__file__).parents[1]
Refuses = Callable[..., AbstractContextManager[pytest.ExceptionInfo]]

_TEMPORARY = re.compile(
    re.escape(tempfile.gettempdir()) + r"/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/\w+"
)


@pytest.fixture
def refuses(snapshot: SnapshotAssertion) -> Refuses:
    """`with refuses("layout.indivisible", 6, 4): ...`, as `pytest.raises` is used.

    What follows the key are the numbers and names that the message must hold, each as
    a whole word. `kind=` is the class of the error, where a program tells it apart.
    `words=False` keeps a sentence out of the snapshot: one that quotes another
    library, whose words differ between versions.
    """

    @contextlib.contextmanager
    def refusal(
        key: str, *values: Any, kind: type[InputError] = InputError, words: bool = True
    ) -> Iterator[pytest.ExceptionInfo]:
        with pytest.raises(kind) as caught:
            yield caught
        assert caught.value.key == key, str(caught.value)
        check_words(str(caught.value), key, values, snapshot if words else None)

    return refusal


@pytest.fixture
def refuses_command(
    snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture
) -> Callable[..., None]:
    """`refuses_command(["lint", "--seq", "0"], "value.not_whole_number", 0)`.

    The command ends with status 2 and one line on stderr; with `--json`, which all but
    `train` have, an object on stdout holds the key.
    """

    def refused(
        argv: Sequence[str], key: str, *values: Any, words: bool = True
    ) -> None:
        line = _refusal_line(argv, capsys)
        if argv[:1] and argv[0] in SUBCOMMANDS and argv[0] != "train":
            assert ended([argv[0], "--json", *argv[1:]]) == BAD_INPUT
            error = json.loads(capsys.readouterr().out)["error"]
            assert error["key"] == key, error
        check_words(line, key, values, snapshot if words else None)

    return refused


@pytest.fixture
def refuses_recipe(
    snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture
) -> Callable[..., str]:
    """`refuses_recipe(lambda: moe.main(["--png", "a.gif"]), "command.unknown_suffix")`.

    A recipe ends with `status` and one line on stderr, beside argparse's usage. What it
    has printed before is returned. None is the key of an error that has none.
    """

    def refused(
        run: Callable[[], int],
        key: str | None,
        *values: Any,
        status: int = BAD_INPUT,
        words: bool = True,
    ) -> str:
        capsys.readouterr()
        end = ending_of(run)
        assert (end.status, end.key) == (status, key), end.line
        check_words(end.line, key, values, snapshot if words else None)
        return capsys.readouterr().out

    return refused


@dataclass(frozen=True)
class Ending:
    """How a recipe ended: its status, its line on stderr, and the error's key."""

    status: int
    line: str
    key: str | None


def ending_of(run: Callable[[], int]) -> Ending:
    """Return how a recipe ends that writes a line while it handles its error."""
    stderr = _Noting()
    with contextlib.redirect_stderr(stderr):
        status = status_of(run)
    *usage, line = stderr.getvalue().splitlines() or [""]
    assert all(one.startswith(("usage: ", " ")) for one in usage), stderr.getvalue()
    keys = [one.key for one in stderr.noted if isinstance(one, InputError)]
    return Ending(status, line, keys[0] if keys else None)


class _Noting(io.StringIO):
    """Stands in for stderr, and notes the errors that are handled at each writing."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[BaseException] = []

    def write(self, text: str) -> int:
        error = sys.exception()
        while error is not None:
            self.noted.append(error)
            error = error.__cause__ or error.__context__
        return super().write(text)


def ended(argv: Sequence[str]) -> int:
    """Return the status with which `meshpar` ends."""
    return status_of(lambda: main([*argv]))


def status_of(run: Callable[[], int]) -> int:
    """Return the status with which a command or a recipe ends."""
    try:
        return run()
    except SystemExit as end:
        return int(end.code or 0)


def _refusal_line(argv: Sequence[str], capsys: pytest.CaptureFixture) -> str:
    assert ended(argv) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("meshpar") and captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


def check_words(
    message: str,
    key: str | None,
    values: Sequence[Any],
    snapshot: SnapshotAssertion | None,
) -> None:
    """Check that a message names all values, and that it is the snapshot's sentence."""
    missing = [value for value in values if not names(message, value)]
    assert not missing, (missing, message)
    if snapshot is not None:
        assert f"{key}: {neutral(message)}" == snapshot


def names(message: str, value: Any) -> bool:
    """Return whether a message has a value as a whole word or number.

    Example:
        >>> names("needs 16 devices, but there are 8", 8)
        True
        >>> names("needs 16 devices", 6)
        False
    """
    return re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", message) is not None


def neutral(sentence: str) -> str:
    """Return the sentence without the folders of this machine and lines of code.

    Example:
        >>> neutral(f"no text at '{ROOT}/README.md'")
        "no text at 'CHECKOUT/README.md'"
        >>> neutral("cumsum along the sequence (models/gpt.py:31)")
        'cumsum along the sequence (models/gpt.py:LINE)'
    """
    sentence = _TEMPORARY.sub("TMP", sentence).replace(str(ROOT), "CHECKOUT")
    return re.sub(r"(\.py):\d+", r"\1:LINE", sentence)
