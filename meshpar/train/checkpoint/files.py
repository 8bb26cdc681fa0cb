"""Files of a checkpoint: checksums that find damage, and the description of the run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar.foreign_files import error_reason, open_file, read_json, read_json_object

NAME = "checksums.json"
_OF_PART = re.compile(r"checksums-\d+-of-(\d{1,6})\.json")
_CHUNK_BYTES = 1 << 22
_PIECE_BYTES = 1 << 26
_MOST_NOTED_BYTES = 1 << 28  # Of millions of files.
_THREADS = 4  # zlib lets the others run.


@dataclass(frozen=True, order=True, kw_only=True)
class Piece:
    """Consecutive bytes of a file.

    Args:
        name: Of the file, within the folder.
        size: Bytes of the whole file.
        start: Of the piece, in bytes.
        length: Of the piece, in bytes.
    """

    name: str
    size: int
    start: int
    length: int

    def crc32(self, folder: Path) -> int:
        """Return the checksum of its bytes, as many as there are."""
        crc, left = 0, self.length
        with open_file(folder / self.name) as file:
            file.seek(self.start)
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        return crc


def write_checksums(folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Write sizes and CRC-32s of the files below a folder to a file there.

    It appears at once and whole, or not at all.

    Args:
        folder: The folder, whose files will not change.
        part: Number of the share of the pieces that is noted.
        num_parts: Number of writers that share them.
    """
    pieces = _share(_pieces(folder), part, num_parts)
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = list(pool.map(lambda piece: piece.crc32(folder), pieces))
    noted = [
        [piece.name, piece.size, piece.start, piece.length, crc]
        for piece, crc in zip(pieces, crcs, strict=True)
    ]
    path = folder / _file_name(part, num_parts)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(noted), encoding="utf-8")
    os.replace(unfinished, path)


def has_checksums(folder: Path) -> bool:
    """Return True if changes in a folder can be found: all its pieces are noted."""
    noted = _noted_in(folder)
    return bool(noted) and not _missing(noted)


def damage(folder: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """Return a line on the first file that has changed; None without any damage.

    Without checksums there is none. If one of several processes has not noted its
    checksums, its files cannot be checked: that is damage too.

    Args:
        folder: The folder of `write_checksums`.
        part: Number of the share of the pieces that is read.
        num_parts: Number of readers that share them, whoever has noted them.
    """
    crcs: dict[Piece, int] = {}
    noted = _noted_in(folder)
    for path in noted:
        try:
            crcs.update(_read(path))
        except (ValueError, TypeError, AttributeError, OverflowError):
            return f"its file {path.name} cannot be read"
    pieces = _share(crcs, part, num_parts)
    with ThreadPoolExecutor(_THREADS) as pool:
        told = pool.map(lambda one: _piece_damage(folder, one, crcs[one]), pieces)
        found = next(filter(None, told), None)
    missing = _missing(noted)
    if found is None and missing:
        return (
            f"its checksums are incomplete: {missing[0]} is missing; if a run is "
            "saving it, wait until that is done; to read the checkpoint unchecked, "
            f"delete its other {Path(NAME).stem}*.json"
        )
    return found


def _piece_damage(folder: Path, piece: Piece, crc: int) -> str | None:
    try:
        state = (folder / piece.name).lstat()
        if not stat.S_ISREG(state.st_mode):
            return f"its file {piece.name} is a link, a folder or a device"
        found = state.st_size
        if found != piece.size:
            return f"its file {piece.name} has {found:,} bytes, not {piece.size:,}"
        if piece.crc32(folder) != crc:
            return f"its file {piece.name} has other bytes than were written"
    except (
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # Or no file can be like that.
        return f"its file {piece.name} cannot be read: {error_reason(error)}"
    return None


def _pieces(folder: Path) -> Iterator[Piece]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(Path(NAME).stem):
            size = path.stat().st_size
            for start in range(0, max(size, 1), _PIECE_BYTES):
                yield Piece(
                    name=str(path.relative_to(folder)),
                    size=size,
                    start=start,
                    length=min(_PIECE_BYTES, size - start),
                )


def _share(pieces: Iterable[Piece], part: int, num_parts: int) -> list[Piece]:
    """Return every `num_parts`-th piece from `part` on, the longest first."""
    return sorted(pieces, key=lambda piece: (-piece.length, piece))[part::num_parts]


def _file_name(part: int, num_parts: int) -> str:
    name = Path(NAME)
    return NAME if num_parts == 1 else f"{name.stem}-{part}-of-{num_parts}{name.suffix}"


def _missing(noted: list[Path]) -> list[str]:
    """Return the names of missing files of checksums."""
    names = {path.name for path in noted}
    if NAME in names:
        return []
    found = [match for name in names if (match := _OF_PART.fullmatch(name))]
    num_parts = max((int(match[1]) for match in found), default=1)
    wanted = (_file_name(part, num_parts) for part in range(num_parts))
    return [name for name in wanted if name not in names] if names else []


def _noted_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{Path(NAME).stem}*{Path(NAME).suffix}"))


def _read(path: Path) -> dict[Piece, int]:
    noted = read_json(path, key="checkpoint.unreadable", most=_MOST_NOTED_BYTES)
    if isinstance(noted, dict):  # Of an earlier version: one piece a file.
        noted = [[name, size, 0, size, crc] for name, (size, crc) in noted.items()]
    return {
        Piece(
            name=_inside(name), size=int(size), start=int(start), length=int(length)
        ): crc
        for name, size, start, length, crc in noted
    }


def _inside(name: str) -> str:
    """Return the name of a file below the folder; what it says is not to be trusted."""
    path = Path(str(name))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is outside")
    return str(name)


def read_run(folder: Path) -> dict[str, Any]:
    """Return the description of the run in a checkpoint's folder.

    Raises:
        InputError: It cannot be read.
    """
    return read_json_object(
        folder / "run" / "metadata",
        key="checkpoint.unreadable",
        shape_key="checkpoint.unreadable",
    )


def move_aside(folder: Path) -> None:
    """Rename a step's folder to `damaged-STEP`, or -2 and so on after that."""
    if not folder.exists():
        return
    aside = folder.with_name(f"damaged-{folder.name}")
    others = (aside.with_name(f"{aside.name}-{n}") for n in itertools.count(2))
    folder.rename(next(p for p in itertools.chain([aside], others) if not p.exists()))


def remove_parts(directory: Path, step: str = "*") -> None:
    """Delete the parts of checkpoints that were never completed.

    Args:
        directory: Folder of the checkpoints of a run that is saving none of them now.
        step: The step; every step when absent.
    """
    for path in directory.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)
