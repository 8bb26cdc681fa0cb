"""Where an instruction comes from: the user's file and line."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECTION = re.compile(r"^(FileNames|FileLocations|StackFrames)\s*$")
_NAME = re.compile(r'^(\d+) "(.*)"$')
_NUMBERS = re.compile(r"(\w+)=(\d+)")
_THIRD_PARTY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|^<|[/\\]lib[/\\]python3")


@dataclass(frozen=True)
class SourceTable:
    """The program's tables of files, lines and stack frames.

    Args:
        files: File id -> path.
        locations: Location id -> (file id, line).
        frames: Frame id -> (location id, id of the caller's frame or 0).
    """

    files: dict[int, str]
    locations: dict[int, tuple[int, int]]
    frames: dict[int, tuple[int, int]]

    @classmethod
    def parse(cls, text: str) -> SourceTable:
        """The tables at the head of a program's text; empty where it has none."""
        rows: dict[str, dict[int, str]] = {}
        section = ""
        for line in text.splitlines():
            heading = _SECTION.match(line)
            if heading:
                section = heading[1]
            elif not line.strip() or not line[0].isdigit():
                section = ""
            elif section:
                number, _, rest = line.partition(" ")
                rows.setdefault(section, {})[int(number)] = rest
        names = rows.get("FileNames", {})
        locations = _numbers(rows.get("FileLocations", {}))
        frames = _numbers(rows.get("StackFrames", {}))
        return cls(
            files={key: name.strip('"') for key, name in names.items()},
            locations={
                key: (row["file_name_id"], row["line"])
                for key, row in locations.items()
            },
            frames=_frames(frames),
        )

    def of(self, attributes: str) -> str:
        """`file:line` of an instruction's own code, by its attributes; may be empty.

        The innermost frame outside of installed packages; if there is none, the
        innermost.
        """
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes)
        if direct:
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", attributes)
        lines = self._stack(int(frame[1])) if frame else []
        own = [line for line in lines if not _THIRD_PARTY.search(line)]
        return (own or lines or [""])[0]

    def _stack(self, frame: int) -> list[str]:
        lines, seen = [], set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            if file in self.files:
                lines.append(f"{self.files[file]}:{line}")
        return lines


def _numbers(rows: dict[int, str]) -> dict[int, dict[str, int]]:
    return {
        key: {name: int(value) for name, value in _NUMBERS.findall(row)}
        for key, row in rows.items()
    }


def _frames(rows: dict[int, dict[str, int]]) -> dict[int, tuple[int, int]]:
    # Some versions of XLA print a caller's id one too high, so that the outermost
    # frame seems to call itself.
    parents = {key: row.get("parent_frame_id", 0) for key, row in rows.items()}
    offset = 1 if any(parent >= key for key, parent in parents.items()) else 0
    return {
        key: (rows[key]["file_location_id"], parents[key] - offset) for key in parents
    }
