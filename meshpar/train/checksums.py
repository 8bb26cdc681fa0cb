"""Checksums of a folder's files, by which one finds what a disk has changed since."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

NAME = "checksums.json"
_CHUNK_BYTES = 1 << 22


def write_checksums(folder: Path) -> None:
    """Writes size and CRC-32 of every file below a folder into `NAME` there.

    The file appears at once and whole, or not at all.
    """
    sums = {
        str(path.relative_to(folder)): [path.stat().st_size, _crc32(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME
    }
    unfinished = folder / f"{NAME}.unfinished"
    unfinished.write_text(json.dumps(sums), encoding="utf-8")
    os.replace(unfinished, folder / NAME)


def has_checksums(folder: Path) -> bool:
    """Whether what changes in a folder can be found."""
    return (folder / NAME).is_file()


def damage(folder: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """What is not as it was written, one line; None where all is, or none was noted.

    Args:
        folder: Of `write_checksums`.
        part: Which files are read: every `num_parts`-th from this one on.
        num_parts: Among how many readers they are shared.
    """
    try:
        sums = json.loads((folder / NAME).read_text(encoding="utf-8"))
        noted = sorted(
            (str(name), int(size), int(crc)) for name, (size, crc) in sums.items()
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError):
        return f"its file {NAME} cannot be read"
    for name, size, crc in noted[part::num_parts]:
        told = _damage_of(folder / name, size, crc)
        if told:
            return f"its file {name} {told}"
    return None


def _damage_of(path: Path, size: int, crc: int) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found:,} bytes, not {size:,}"
        if _crc32(path) != crc:
            return "has other bytes than were written"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
