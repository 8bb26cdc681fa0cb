"""Documents of a file of texts: plain text, JSON lines (also gzip), Parquet."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any, cast

from meshpar.errors import DataError, Skipped, install_extra
from meshpar.foreign_files import error_reason, json_type, open_file, parse_json

_LONGEST_BYTES = 1 << 26
"""Size limit of a line: a compressed file of megabytes may hold one of gigabytes."""
_ROWS_AT_ONCE = 1024


def documents(path: Path, format: str, field: str, skipped: Skipped) -> Iterator[str]:
    """Yield the documents of a file in order.

    Args:
        path: The file.
        format: `text`, a file being one document, `jsonl` or `parquet`.
        field: Field or column of the text.
        skipped: Policy for broken lines and rows.

    Raises:
        DataError: The file cannot be read, or holds no text of that format.
    """
    if format == "text":
        yield read_text(path)
    elif format == "jsonl":
        yield from jsonl_documents(path, field, skipped)
    else:
        yield from parquet_documents(path, field, skipped)


def split_lines(text: str) -> list[str]:
    """Split a text at its line feeds alone, and drop a byte order mark before it.

    `str.splitlines` splits at characters that may stand in a line, too.

    Example:
        >>> split_lines("one\\u2028still\\ntwo\\n")
        ['one\\u2028still', 'two']
    """
    lines = text.removeprefix("\ufeff").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_text(file: Path) -> str:
    """Read a text file, without its byte order mark.

    Raises:
        DataError: The file cannot be read, is empty, or is not UTF-8 text.
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


def jsonl_documents(path: Path, field: str, skipped: Skipped) -> Iterator[str]:
    """Yield the documents of JSON lines in order; blank lines are skipped.

    Args:
        path: The file, compressed if its name ends in .gz.
        field: Key of the text.
        skipped: Policy for broken lines.

    Raises:
        DataError: The file cannot be read, or a line is broken.
    """
    try:
        with open_file(path) as file:
            for number, line in enumerate(_lines(path, file), 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                try:
                    text = _jsonl_text(line, field)
                except DataError as error:
                    skipped.take(
                        f"{str(path)!r}, line {number}: {error}", key=error.key
                    )
                else:
                    yield text
    except (OSError, EOFError, zlib.error) as error:
        reason = error_reason(error)
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


def _jsonl_text(line: bytes, field: str) -> str:
    """Return the text of a line; raise a `DataError` if the line is broken."""
    if len(line) > _LONGEST_BYTES:
        raise DataError(
            f"it has more than {_LONGEST_BYTES:,} bytes; cut its document",
            key="data.line_too_long",
        )
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: byte {error.start} of the line is "
            f"{line[error.start]:#04x}",
            key="data.not_utf8",
        ) from error
    except ValueError as error:
        raise DataError(f"no JSON: {error}", key="data.not_json") from error
    if not isinstance(value, dict):
        raise DataError(
            f"no JSON object, but {json_type(value)}", key="data.not_json_object"
        )
    if field not in value:
        keys = ", ".join(map(repr, value)) or "none"
        raise DataError(
            f"no field {field!r}; it has {keys}: name one by field=",
            key="data.missing_field",
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(
            f"field {field!r} is {json_type(text)}, no text; name another by field=",
            key="data.field_not_text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"field {field!r} is no text: character {error.start} is "
            f"\\u{ord(text[error.start]):04x}, half of a pair",
            key="data.unpaired_surrogate",
        ) from error
    return text


def parquet_documents(path: Path, field: str, skipped: Skipped) -> Iterator[str]:
    """Yield the documents of a Parquet file, a row each, in order.

    Args:
        path: The file.
        field: Column of the text.
        skipped: Policy for rows without a text.

    Raises:
        DataError: pyarrow is not installed, the file is no Parquet, or it has no such
            column of text.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, field, pyarrow)
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, 1):
                if text is None:
                    skipped.take(
                        f"{str(path)!r}, row {number}: {field!r} is null",
                        key="data.null_text",
                    )
                else:
                    yield text
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"cannot read {str(path)!r} as Parquet: {reason}",
            key="data.unreadable_parquet",
        ) from error


def _check_column(path: Path, schema: Any, field: str, pyarrow: Any) -> None:
    if field not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise DataError(
            f"{str(path)!r} has no column {field!r}; it has {names}: name one by "
            "field=",
            key="data.missing_column",
        )
    kind = schema.field(field).type
    types = pyarrow.types
    # A dictionary's values are numbers of its texts.
    texts = kind.value_type if types.is_dictionary(kind) else kind
    text_types = (types.is_string, types.is_large_string, types.is_string_view)
    if not any(is_type(texts) for is_type in text_types):
        raise DataError(
            f"{str(path)!r}: column {field!r} is of {kind}, no text; name another by "
            "field=",
            key="data.column_not_text",
        )


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{str(path)!r} needs pyarrow: {install_extra('parquet')}",
            key="data.missing_package",
        ) from error
    return pyarrow, pyarrow.parquet
