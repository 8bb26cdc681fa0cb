"""Where an instruction comes from: the user's file and line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshpar.audit.hlo_error import HloError

_ROWS = {
    "FileNames": re.compile(r'(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)\b.*\}$"),
    "StackFrames": re.compile(
        r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}$"
    ),
}
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
        """The tables at the head of a program's text; empty where it has none.

        Raises:
            HloError: A row cannot be read.
        """
        rows: dict[str, dict[int, tuple]] = {name: {} for name in _ROWS}
        section = ""
        for number, line in enumerate(text.splitlines(), start=1):
            if not line[:1].isdigit():
                section = line.strip()
            elif section in _ROWS:
                row = _ROWS[section].match(line)
                if not row:
                    raise HloError(number, line, f"no row of {section}")
                rows[section][int(row[1])] = row.groups()[1:]
        return cls(
            files={key: name for key, (name,) in rows["FileNames"].items()},
            locations={
                key: (int(file), int(line))
                for key, (file, line) in rows["FileLocations"].items()
            },
            frames=_frames(rows["StackFrames"]),
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


def _frames(rows: dict[int, tuple]) -> dict[int, tuple[int, int]]:
    # Some versions of XLA print a caller's id one too high, so that the outermost
    # frame seems to call itself.
    parents = {key: int(parent or 0) for key, (_, parent) in rows.items()}
    offset = 1 if any(parent >= key for key, parent in parents.items()) else 0
    return {key: (int(rows[key][0]), parents[key] - offset) for key in parents}
