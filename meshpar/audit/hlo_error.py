"""The error of a text that is no compiled program."""

from __future__ import annotations

from meshpar.errors import InputError


class HloError(InputError):
    """A text that is no compiled program; the message names the line."""

    def __init__(self, line: int, text: str, problem: str) -> None:
        super().__init__(
            f"line {line} of the program: {problem}: {text.strip()[:120]}",
            key="audit.unreadable_program",
        )
