"""How attention crosses `context`, as a layout's text says it.

attention=ring
attention=ulysses:4+ring:2
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshpar.errors import InputError

ONE_WORD = ("ring", "allgather", "ulysses")
"""The methods that take all devices of `context` together."""

_BOTH = re.compile(r"ulysses:(\d+)\+(ring|allgather):(\d+)")


@dataclass(frozen=True, kw_only=True)
class AttentionMethod:
    """Devices next to each other trade tokens for heads; keys move between such groups.

    Args:
        heads: Devices of a group, which split the heads while they attend (Ulysses).
        groups: Groups that the sequence is split over while they do.
        across: How keys and values move between groups: `ring` or `allgather`.
    """

    heads: int
    groups: int
    across: str = "ring"

    @classmethod
    def of(cls, attention: str, context: int) -> AttentionMethod:
        """That of a layout, whose `context` may be open: -1.

        Raises:
            InputError: The text is not of that form, or its degrees do not multiply to
                the devices of `context`.

        Example:
            >>> AttentionMethod.of("ulysses:4+ring:2", 8)
            AttentionMethod(heads=4, groups=2, across='ring')
            >>> AttentionMethod.of("ulysses", 8)
            AttentionMethod(heads=8, groups=1, across='ring')
        """
        if attention == "ulysses":
            return cls(heads=context, groups=1)
        if attention in ONE_WORD:
            return cls(heads=1, groups=context, across=attention)
        parts = _BOTH.fullmatch(attention)
        if parts is None:
            raise InputError(
                f"attention={attention}: must be one of {', '.join(ONE_WORD)}, or both "
                "degrees, each at least 2: ulysses:4+ring:2",
                key="attention.unknown_method",
            )
        heads, groups = int(parts[1]), int(parts[3])
        if min(heads, groups) < 2:
            raise InputError(
                f"attention={attention}: degrees are at least 2; write "
                f"{parts[2] if heads < 2 else 'ulysses'}",
                key="attention.degree_too_small",
            )
        if context not in (-1, heads * groups):
            raise InputError(
                f"attention={attention} is for context={heads * groups}, but context="
                f"{context}; change one of them",
                key="attention.degrees_not_context",
            )
        return cls(heads=heads, groups=groups, across=parts[2])


def has_degrees(attention: object) -> bool:
    """Whether a layout's `attention` names degrees, and is not one word."""
    return isinstance(attention, str) and ":" in attention
