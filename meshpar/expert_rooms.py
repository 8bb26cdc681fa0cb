"""Rows that devices send one another's experts: closed forms of step and planner.

Of `n` devices that share the experts each sends every other `room` rows, filled or not,
so that the bytes of a first round are no value of the data:

    forward   n room (embed b + 8)  rows there, each with its expert and its weight
              n room embed b        results back
    backward  n room embed b        gradients of results there
              n room (embed b + 4)  of rows and of weights back

with b bytes a value, as payload of an all-to-all. What recomputes a block sends rows
there once more.
"""

from __future__ import annotations

import math

SPARE = 1.25
"""Room of the first round over the rows that each device gets on average."""

MORE = 0.25
"""Room of each further round over that of the first."""

ROUTE_BYTES = 8
"""Beside each row there: its expert and its weight, both fp32."""

WEIGHT_BYTES = 4
"""Beside each gradient of a row: that of its weight."""

_MULTIPLE = 8
"""Rows that a device gets are padded to a multiple of this."""


def most_room(
    tokens: int, choices: int, experts: int, most_of_one: int | None = None
) -> int:
    """The most rows that a device can send another.

    Args:
        tokens: Of the sender.
        choices: Experts of a token, which goes to an expert once.
        experts: Of the receiver.
        most_of_one: The most that one expert takes of a sender, where routers bound it.
    """
    most = tokens * min(choices, experts)
    return most if most_of_one is None else min(most, experts * most_of_one)


def first_room(
    tokens: int,
    choices: int,
    experts: int,
    num_devices: int,
    most_of_one: int | None = None,
) -> int:
    """Rows to each device in the first round.

    All that can be, where nothing is sent or routers bound it; then no round follows.

    Args:
        tokens: As for `most_room`.
        choices: Likewise.
        experts: Likewise.
        num_devices: Devices that share the experts.
        most_of_one: As for `most_room`.

    Example:
        >>> first_room(4096, 2, 1, num_devices=8)
        1280
    """
    most = most_room(tokens, choices, experts, most_of_one)
    if num_devices == 1 or most_of_one is not None:
        return most
    fair = math.ceil(SPARE * tokens * choices / num_devices)
    return min(most, padded(fair))


def further_room(room: int) -> int:
    """Rows to each device in a further round, behind a first one of `room`."""
    return padded(math.ceil(MORE * room))


def padded(rows: int) -> int:
    """As many rows, or up to seven more."""
    return -(-rows // _MULTIPLE) * _MULTIPLE
