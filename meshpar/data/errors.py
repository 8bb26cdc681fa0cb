"""The error of data that cannot be trained on, and the policy for broken lines."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.errors import InputError


class DataError(InputError):
    """A file, or its content, cannot be trained on."""


@dataclass(kw_only=True)
class Skipped:
    """Broken lines and rows: an error at the first, or their number.

    Args:
        policy: "stop" or "skip".
        count: Lines skipped so far.
        first: Description of the first of them.
    """

    policy: str = "stop"
    count: int = 0
    first: str = ""

    def take(self, what: str, *, key: str) -> None:
        """Skip a broken line, or raise.

        Args:
            what: The file, the line, and the fault.
            key: Key of the error.

        Raises:
            DataError: The policy is "stop".

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
