"""Parquet files: a document a row, in one column; pyarrow reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshpar.data.errors import DataError
from meshpar.data.skipped import Skipped

_ROWS_AT_ONCE = 1024


def parquet_documents(path: Path, field: str, skipped: Skipped) -> Iterator[str]:
    """The documents of a file, in order.

    Args:
        path: The file.
        field: The column of the text.
        skipped: Takes rows without a text, or refuses them.

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
    if not _is_text(kind, pyarrow.types):
        raise DataError(
            f"{str(path)!r}: column {field!r} is of {kind}, no text; name another by "
            "field=",
            key="data.column_not_text",
        )


def _is_text(kind: Any, types: Any) -> bool:
    """Whether values are texts, each as it is or as a number in a dictionary."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    known = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(kind) for is_kind in known)


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{str(path)!r} needs pyarrow: pip install 'meshpar[parquet]'",
            key="data.missing_package",
        ) from error
    return pyarrow, pyarrow.parquet
