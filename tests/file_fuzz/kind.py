"""A kind of file: examples of it, how one is changed, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.file_fuzz.mutations import Random, changed_bytes, changed_json


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Args:
        num: Cases of the slow test.
        examples: Writes folders, each an example, below a folder.
        change: Changes a file of a copy of one.
        read: Reads a copy, whose folder is the working directory too, as a command
            would; returns what it has read.
    """

    num: int
    examples: Callable[[Path], Iterable[Path]]
    change: Callable[[Random, Path], None]
    read: Callable[[Path], str]


def change_json(random: Random, file: Path) -> None:
    """Change the values of a JSON file, or its bytes in a fifth of all cases."""
    content = file.read_bytes()
    if random.random() < 0.2:
        file.write_bytes(changed_bytes(random, content))
    else:
        file.write_bytes(changed_json(random, content.decode()))


def change_lines(random: Random, file: Path) -> None:
    """Change one line of JSON, or the bytes of the file in half of all cases."""
    content = file.read_bytes()
    if random.random() < 0.5:
        file.write_bytes(changed_bytes(random, content))
        return
    lines = content.splitlines()
    at = int(random.integers(len(lines)))
    lines[at] = changed_json(random, lines[at].decode())
    file.write_bytes(b"\n".join(lines) + b"\n")


def change_one_of(random: Random, folder: Path, names: Iterable[str]) -> Path:
    """Change one of the files of a folder that are there, as its suffix asks for."""
    files = [folder / name for name in names if (folder / name).is_file()]
    file = files[random.integers(len(files))]
    if file.suffix in (".json", ""):
        try:
            json.loads(file.read_bytes())
        except ValueError:
            pass
        else:
            change_json(random, file)
            return file
    file.write_bytes(changed_bytes(random, file.read_bytes()))
    return file
