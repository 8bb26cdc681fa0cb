"""One rank's order, woven from its forwards and its backwards."""

from __future__ import annotations

from collections.abc import Sequence

from meshpar.schedules.base import Action


def one_for_one(
    forwards: Sequence[Action], backwards: Sequence[Action], *, num_warmup: int
) -> tuple[Action, ...]:
    """`num_warmup` forwards, then one forward and one backward in turn, then the rest.

    Example:
        >>> forwards = [Action.parse(f"0F{i}") for i in range(3)]
        >>> backwards = [Action.parse(f"0B{i}") for i in range(3)]
        >>> " ".join(map(str, one_for_one(forwards, backwards, num_warmup=1)))
        '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    order = list(forwards[:num_warmup])
    for index, backward in enumerate(backwards, start=num_warmup):
        order.extend(forwards[index : index + 1])
        order.append(backward)
    return tuple(order)
