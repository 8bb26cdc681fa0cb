"""JSON lines: an object a line, its document in one field. Also with gzip."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import IO, cast

from meshpar.data.errors import DataError
from meshpar.data.skipped import Skipped
from meshpar.foreign_files import json_type, open_file, parse_json, reason_of

_LONGEST_BYTES = 1 << 26
"""Size limit of a line: a compressed file of megabytes may hold one of gigabytes."""


def jsonl_documents(path: Path, field: str, skipped: Skipped) -> Iterator[str]:
    """The documents of a file, in order; lines of white space alone are none.

    Args:
        path: Ends in .gz where it is compressed.
        field: The key of the text.
        skipped: Takes broken lines, or refuses them.

    Raises:
        DataError: The file cannot be read, or a line is broken.
    """
    try:
        with open_file(path) as file:
            for number, line in enumerate(_lines(path, file), 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    found = _document(line, field)
                    if found.wrong is None:
                        yield found.text
                    else:
                        skipped.take(
                            f"{str(path)!r}, line {number}: {found.wrong}",
                            key=found.wrong.key,
                        )
    except (OSError, EOFError, zlib.error) as error:
        reason = reason_of(error)
        raise DataError(
            f"cannot read {str(path)!r}: {reason}; copy it again",
            key="data.unreadable_file",
        ) from error


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, and of a line that is too long its beginning alone."""
    content = cast(IO[bytes], GzipFile(fileobj=file)) if path.suffix == ".gz" else file
    while line := content.readline(_LONGEST_BYTES + 1):
        yield line
        while len(line) > _LONGEST_BYTES and not line.endswith(b"\n"):
            line = content.readline(_LONGEST_BYTES + 1)


class _Document:
    def __init__(self, text: str = "", wrong: DataError | None = None) -> None:
        self.text, self.wrong = text, wrong


def _document(line: bytes, field: str) -> _Document:
    if len(line) > _LONGEST_BYTES:
        return _Document(
            wrong=DataError(
                f"it has more than {_LONGEST_BYTES:,} bytes; cut its document",
                key="data.line_too_long",
            )
        )
    try:
        found = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _Document(
            wrong=DataError(
                f"not UTF-8 text: byte {error.start} of the line is "
                f"{line[error.start]:#04x}",
                key="data.not_utf8",
            )
        )
    except ValueError as error:
        return _Document(wrong=DataError(f"no JSON: {error}", key="data.not_json"))
    if not isinstance(found, dict):
        return _Document(
            wrong=DataError(
                f"no JSON object, but {json_type(found)}", key="data.not_json_object"
            )
        )
    if field not in found:
        keys = ", ".join(map(repr, found)) or "none"
        return _Document(
            wrong=DataError(
                f"no field {field!r}; it has {keys}: name one by field=",
                key="data.missing_field",
            )
        )
    if not isinstance(found[field], str):
        return _Document(
            wrong=DataError(
                f"field {field!r} is {json_type(found[field])}, no text; name another "
                "by field=",
                key="data.field_not_text",
            )
        )
    return _encodable(found[field], field)


def _encodable(text: str, field: str) -> _Document:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return _Document(
            wrong=DataError(
                f"field {field!r} is no text: character {error.start} is "
                f"\\u{code:04x}, half of a pair",
                key="data.unpaired_surrogate",
            )
        )
    return _Document(text)
