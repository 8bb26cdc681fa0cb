"""`refuses`: bad input is refused with a key and its numbers; a snapshot has the words.

A test holds what a program relies on: the error's key and the values that its message
must name. The sentences themselves stand in `tests/__snapshots__/`, which `make words`
writes anew: a change of English is read there, as one diff.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    """`refuses_command(["lint", "--seq", "0"], "value.below_one", 0)`.

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


def ended(argv: Sequence[str]) -> int:
    """Return the status with which `meshpar` ends."""
    try:
        return main([*argv])
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
    key: str,
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
