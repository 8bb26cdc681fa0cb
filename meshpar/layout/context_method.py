"""How attention crosses `context`: the methods, and how a layout's text names them.

attention=ring
attention=ulysses:4+ring:2

A new method is an entry of `CONTEXT_METHODS` and its program in `parallel/context`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshpar.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ContextMethod:
    """A way for a device's queries to meet the keys of other devices' tokens.

    Args:
        name: Its name in a layout.
        trades_heads: True if devices trade tokens for heads, which must divide, and
            then have whole sequences; else keys and values move, and each device merges
            the softmaxes of parts.
        gathers: True if all keys of some heads are gathered at once; else they go
            round, a device's keys after another's.
        kernels: The fused kernels that can make its scores
            (`hardware.attention_kernels`).
    """

    name: str
    trades_heads: bool = False
    gathers: bool = False
    kernels: tuple[str, ...] = ()


RING = ContextMethod(name="ring", kernels=("splash",))
CONTEXT_METHODS = {
    method.name: method
    for method in (
        RING,
        ContextMethod(name="allgather", gathers=True),
        ContextMethod(name="ulysses", trades_heads=True, kernels=("cudnn", "splash")),
    )
}
"""Name -> method: each takes all devices of `context` together."""

_BOTH = re.compile(r"ulysses:(\d+)\+(ring|allgather):(\d+)")


@dataclass(frozen=True, kw_only=True)
class ContextAttention:
    """Neighbouring devices trade tokens for heads; keys move between such groups.

    Args:
        heads: Devices of a group, which split the heads while they attend (Ulysses).
        groups: Groups that the sequence is split over meanwhile.
        across: How keys and values move between groups.
    """

    heads: int
    groups: int
    across: ContextMethod = RING

    @classmethod
    def parse(cls, attention: str, context: int) -> ContextAttention:
        """Return the method of a layout, whose `context` may be open: -1.

        Raises:
            InputError: The text is not of that form, or its degrees do not multiply to
                the devices of `context`.

        Example:
            >>> both = ContextAttention.parse("ulysses:4+ring:2", 8)
            >>> both.heads, both.groups, both.across.name
            (4, 2, 'ring')
            >>> both.text, ContextAttention.parse("ulysses", 8).heads
            ('ulysses:4+ring:2', 8)
        """
        method = CONTEXT_METHODS.get(attention)
        if method is not None and method.trades_heads:
            return cls(heads=context, groups=1)
        if method is not None:
            return cls(heads=1, groups=context, across=method)
        parts = _BOTH.fullmatch(attention)
        if parts is None:
            raise InputError(
                f"attention={attention}: must be one of {', '.join(CONTEXT_METHODS)}, "
                "or both degrees, each at least 2: ulysses:4+ring:2",
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
        return cls(heads=heads, groups=groups, across=CONTEXT_METHODS[parts[2]])

    @property
    def text(self) -> str:
        """The method as a layout names it."""
        if self.heads == 1:
            return self.across.name
        if self.groups == 1:
            return "ulysses"
        return f"ulysses:{self.heads}+{self.across.name}:{self.groups}"

    @property
    def permutes(self) -> bool:
        """True if keys and values go round between groups of devices."""
        return self.groups > 1 and not self.across.gathers


def merges_softmaxes(attention: str) -> bool:
    """Return True if one method alone moves the keys, met part by part, not heads."""
    method = CONTEXT_METHODS.get(attention)
    return method is not None and not method.trades_heads
