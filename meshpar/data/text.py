"""Text files: a document each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshpar.data.errors import DataError
from meshpar.foreign_files import open_file


def text_documents(path: Path) -> Iterator[str]:
    """The text of a file, as its only document.

    Raises:
        DataError: It cannot be read, is empty, or is not UTF-8 text.
    """
    yield read_text(path)


def lines_of(text: str) -> list[str]:
    """Split a text at its line feeds alone, and drop a byte order mark before it.

    `str.splitlines` splits at characters that may stand in a line, too.

    Example:
        >>> lines_of("one\\u2028still\\ntwo\\n")
        ['one\\u2028still', 'two']
    """
    lines = text.removeprefix("\ufeff").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_text(file: Path) -> str:
    """The text of a file, without a byte order mark.

    Raises:
        DataError: It cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        with open_file(file) as opened:
            text = opened.read().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(file)!r} is not UTF-8 text: byte {error.start} is "
            f"{error.object[error.start]:#04x}; convert it, or choose a text file",
            key="data.not_utf8",
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read {str(file)!r}: {error.strerror}", key="data.unreadable_file"
        ) from error
    if "\0" in text:
        raise DataError(
            f"{str(file)!r} is binary: character {text.index(chr(0))} is NUL; choose a "
            "text file",
            key="data.binary_file",
        )
    if not text.strip():
        raise DataError(
            f"{str(file)!r} is empty; choose a file with text in it",
            key="data.empty_file",
        )
    return text
