"""Sources of data: a path, its weight in a mixture, its format and field."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from meshpar.errors import DataError, key_values, local_path, nearest

_SUFFIXES = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json.gz": "jsonl",
    ".parquet": "parquet",
    ".bin": "tokens",
    ".idx": "megatron",
}
FORMATS = ("text", "jsonl", "parquet", "megatron", "nanogpt")
OF_TOKENS = {"megatron", "nanogpt"}
WITH_FIELDS = {"jsonl", "parquet"}
_KEYS = ("path", "weight", "field", "format")
_EXAMPLE = "path=web/*.jsonl,weight=0.7,field=text"
_HAS_KEYS = re.compile(rf"(?:{'|'.join(_KEYS)})\s*=|.*,\s*path\s*=")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source of a mixture, or all of the data.

    Args:
        path: A file, a folder, or a pattern such as `web/*.jsonl`.
        weight: Weight of its rows among the other sources'; None for no weights.
        field: Field or column of the text.
        format: Format of every file; None for the format that each name tells.

    Raises:
        DataError: The weight is not positive, or there is no such format.
    """

    path: str
    weight: Fraction | None = None
    field: str = "text"
    format: str | None = None

    def __post_init__(self) -> None:
        local_path("data", self.path)
        if self.weight is not None and self.weight <= 0:
            raise DataError(
                f"weight={self.weight} of {self.path!r}: must be a positive number; "
                "leave out a source without a share",
                key="data.weight_not_positive",
            )
        if self.format is not None and self.format not in FORMATS:
            raise DataError(
                f"format={self.format} of {self.path!r}; "
                + nearest(self.format, FORMATS),
                key="data.unknown_format",
            )

    @classmethod
    def parse(cls, text: str) -> DataSource:
        """Parse a path, or keys with their values.

        Raises:
            DataError: An unknown key, or a value that a source cannot have.

        Example:
            >>> DataSource.parse("path=web/*.jsonl,weight=0.7").weight
            Fraction(7, 10)
            >>> DataSource.parse("my texts/a.txt").path
            'my texts/a.txt'
        """
        if not _HAS_KEYS.match(text):
            return cls(path=text)
        values = key_values(text, noun="data", example=_EXAMPLE)
        for key in values:
            if key not in _KEYS:
                raise DataError(
                    f"data {text!r}: no key {key!r}; {nearest(key, _KEYS)}",
                    key="data.unknown_key",
                )
        if "path" not in values:
            raise DataError(
                f"data {text!r} names no path; write for example {_EXAMPLE}",
                key="data.missing_path",
            )
        weight = values.pop("weight", None)
        return cls(**values, weight=None if weight is None else _weight(text, weight))

    def __str__(self) -> str:
        weight = None if self.weight is None else f"{float(self.weight):.12g}"
        if weight is not None and Fraction(weight) != self.weight:
            weight = str(self.weight)  # no decimal is exact
        values = {
            "path": self.path,
            "weight": weight,
            "field": None if self.field == "text" else self.field,
            "format": self.format,
        }
        given = {key: value for key, value in values.items() if value is not None}
        if given.keys() == {"path"}:
            return self.path
        return ",".join(f"{key}={value}" for key, value in given.items())

    def absolute(self) -> DataSource:
        """Return the source with an absolute path."""
        return replace(self, path=str(Path(self.path).absolute()))

    def files(self, leave_out: Collection[Path] = ()) -> list[tuple[Path, str]]:
        """Return every file and its format, in order of name.

        Args:
            leave_out: Files and folders inside the folder that are no data.

        Raises:
            DataError: There is no file, or one of an unknown format.
        """
        path = Path(self.path)
        wrong = DataError(
            f"no file matches {self.path!r}; give a path or another pattern",
            key="data.no_match",
        )
        if path.is_dir():
            found = [one for one in path.rglob("*") if _suffix(one) and one.is_file()]
            found = _without(found, leave_out, path)
            wrong = DataError(
                f"the folder {self.path!r} holds no file of {_known()}",
                key="data.empty_folder",
            )
        elif path.exists() or not glob.has_magic(self.path):
            found = [path]
        else:
            found = [Path(one) for one in glob.glob(self.path, recursive=True)]
            found = [one for one in found if one.is_file()]
        if len(found) > 1:  # Of a pair one is enough.
            found = [one for one in found if _suffix(one) != ".idx"]
        files = sorted(found)
        if not files:
            raise wrong
        return [(file, self._file_format(file)) for file in files]

    def _file_format(self, file: Path) -> str:
        if not file.exists():
            raise DataError(
                f"no data at {str(file)!r}; give a file, folder or pattern",
                key="data.missing_file",
            )
        if self.format is not None:
            return self.format
        suffix = _suffix(file)
        if suffix is None:
            raise DataError(
                f"{str(file)!r} is none of {_known()}; say which it is: "
                f"path={file},format={'|'.join(FORMATS)}",
                key="data.unknown_suffix",
            )
        if suffix == ".bin":
            return "megatron" if file.with_suffix(".idx").exists() else "nanogpt"
        return _SUFFIXES[suffix]


def check_weights(sources: Sequence[DataSource]) -> None:
    """Check that either all sources have weights or none has.

    Raises:
        DataError: Some have weights, and this first one has none.
    """
    without = [source for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise DataError(
            f"data {without[0].path!r} has no weight, but others have: give each one, "
            f"such as path={without[0].path},weight=1, or none",
            key="data.missing_weight",
        )


def _weight(text: str, weight: str) -> Fraction:
    try:
        return Fraction(weight)
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"data {text!r}: weight={weight} is no number; write for example "
            f"{_EXAMPLE}",
            key="data.weight_not_number",
        ) from error


def _without(
    found: list[Path], leave_out: Collection[Path], folder: Path
) -> list[Path]:
    """Return the paths that are not at or below any of `leave_out` in the folder."""
    whole = folder.resolve()
    others = [one.resolve() for one in leave_out]
    inside = [one for one in others if one != whole and one.is_relative_to(whole)]
    if not inside:
        return found
    return [
        path
        for path in found
        if not any(path.resolve().is_relative_to(other) for other in inside)
    ]


def _suffix(path: Path) -> str | None:
    """Return the known end of a file's name; None for others and for hidden files."""
    if path.name.startswith("."):
        return None
    ends = ("".join(path.suffixes[-2:]), path.suffix)
    return next((end for end in ends if end in _SUFFIXES), None)


def _known() -> str:
    return ", ".join(_SUFFIXES)
