"""Broken lines: a stop at the first, or a count of them."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.data.errors import DataError


@dataclass(kw_only=True)
class Skipped:
    """Takes broken lines and rows, or refuses them.

    Args:
        policy: "stop" or "skip".
    """

    policy: str = "stop"
    count: int = 0
    first: str = ""

    def take(self, what: str, *, key: str) -> None:
        """Counts one.

        Args:
            what: The file, the line, and what is wrong with it.
            key: Of the error that refuses it.

        Raises:
            DataError: None is to be skipped.

        Example:
            >>> skipped = Skipped(policy="skip")
            >>> skipped.take("'a.jsonl', line 3: no JSON", key="data.not_json")
            >>> skipped.count, skipped.first
            (1, "'a.jsonl', line 3: no JSON")
        """
        if self.policy == "stop":
            raise DataError(f"{what}; mend it, or --on-bad-line skip", key=key)
        self.first = self.first or what
        self.count += 1
