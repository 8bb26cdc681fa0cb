"""A mutant: the library with a one-line fault in it, and the tests that claim it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault that a maintainer could introduce.

    Args:
        name: What is wrong, in a few words with hyphens between them.
        effect: What the library then does wrong, in a few words.
        file: The file that it is in, from the root of the checkout.
        old: Text that the file has exactly once.
        new: What the fault has in its place.
        tests: Files or node ids of tests, as few and as fast as possible; at least one
            has to fail.
        missed_at_first: Whether no test found it when it was first tried, so that one
            of `tests` was written for it.
    """

    name: str
    effect: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    missed_at_first: bool = False

    @property
    def room(self) -> str:
        """The folder of the library that the fault is in: `parallel/context`."""
        return str(PurePosixPath(self.file).parent).removeprefix("meshpar/")

    def applied(self, text: str) -> str:
        """The text of the file with the fault in it.

        Raises:
            ValueError: The file does not have `old` exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} has its text {count} times, not once")
        return text.replace(self.old, self.new)
