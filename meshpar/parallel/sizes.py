"""Sizes that a step chooses by itself: chunks, attention tiles and rooms for experts.

Plain arithmetic without JAX, which the planner shares.

Of `n` devices that share the experts each sends every other `room` rows, filled or not,
so the bytes of a first round do not depend on the data. With `b` bytes a value, as the
payload of all-to-alls:

    forward   n room (embed b + 8)  rows there, each with its expert and its weight
              n room embed b        results back
    backward  n room embed b        gradients of results there
              n room (embed b + 4)  gradients of rows and of weights back

If the devices are on `h` hosts that a token is sent to once each, with `tokens` rows to
each host (`host_room`), each of these ways is h - 1 permutes of tokens embed b between
the hosts and an all-to-all of n room embed b inside of them; the numbers beside the
rows are sent by themselves, and h tokens top_k 4 bytes tell where they go.

`remat=full` keeps the rows that a device received; a policy of other names, such as
`save:block_input`, sends rows there once more.
"""

from __future__ import annotations

import math

from meshpar.hardware.platforms import Platform
from meshpar.layout import STAGE_REMATS, Layout

LOGITS_BYTES = 512 * 2**20
"""Default limit of bytes of logits (`meshpar.parallel.head_loss`). For a vocabulary of
128k that is a chunk of 1,024 tokens: enough for its matmuls to be bound by arithmetic,
not by the sum of the table's gradient that each chunk reads and writes."""

SCORE_BYTES = 256 * 2**20
"""Most bytes of attention's fp32 scores (`meshpar.models.layers.causal_attention`):
the softmax and its gradient are two more arrays of that size."""

COST_TOKENS = 8
"""Tokens of the sequence on which a layer's cost is counted (`splits=cost`): the FLOPs
of its forward's matmuls. Every model takes so short a one."""

HIDDEN_BYTES = 512 * 2**20
"""Most bytes of an MLP's hidden values if its backward recomputes them
(`meshpar.parallel.remat`): each matmul's gradient is one more array of that
size. At a hidden size of 2 x 12,288 in bf16 that is a chunk of 8,192 tokens:
enough for its matmuls to be bound by arithmetic, not by the weights' fp32 gradient that
each chunk reads and writes."""

TILE_BYTES = 64 * 2**20
"""Most bytes of a tile's fp32 scores, for all heads that a device takes at a time."""

SMALLEST_TILE = 128
"""Sequences are padded rather than cut into smaller tiles than this."""

PART_BYTES = 4 * 2**20
"""Least bytes of keys and values that a device sends at once: over a link of 50 GB/s
they take 84 us, many times its latency."""


def score_parts(score_bytes: int, kv_heads: int) -> int:
    """Return the number of parts of the kv heads that attend one after another.

    Args:
        score_bytes: Bytes of the fp32 scores of one of them.
        kv_heads: Their number, which the parts divide.

    Example:
        >>> score_parts(2**27, 8), score_parts(2**29, 8)
        (4, 8)
    """
    most = max(1, SCORE_BYTES // max(1, score_bytes))
    enough = range(-(-kv_heads // most), kv_heads + 1)
    return next(num for num in enough if kv_heads % num == 0)


def tile_tokens(tokens: int, rows: int, *, zigzag: bool, largest: int) -> int:
    """Return the tokens of a tile; they divide a device's chunks if that costs little.

    Args:
        tokens: Tokens of a device.
        rows: Examples times heads that it takes at once.
        zigzag: True if the tokens are two chunks of the sequence.
        largest: Most tokens of a tile (`Platform.largest_tile`).

    Example:
        >>> tile_tokens(4096, 8, zigzag=True, largest=1024)
        1024
        >>> tile_tokens(300, 8, zigzag=False, largest=1024)
        300
    """
    chunk = tokens // 2 if zigzag else tokens
    most = int((TILE_BYTES / 4 / max(rows, 1)) ** 0.5)
    most = max(min(most, largest, chunk), 1)
    divides = next(size for size in range(most, 0, -1) if chunk % size == 0)
    return divides if divides >= min(most, SMALLEST_TILE) else most


def head_parts(
    kv_heads: int, key_bytes: float, num_devices: int, *, gathers: bool
) -> int:
    """Return the number of parts of the kv heads that are moved one after another.

    Parts bound memory: gathered keys are `num_devices` times larger; a ring holds two
    copies of a part, and of its gradients.

    Args:
        kv_heads: Heads of keys of a device.
        key_bytes: Bytes of all its keys.
        num_devices: Devices that the sequence is split over.
        gathers: True if their keys are gathered, False if they go round.
    """
    if num_devices == 1:
        return 1
    most = int(2 * key_bytes // PART_BYTES)
    if gathers:
        most = max(most, num_devices)
    few = range(1, min(max(most, 1), kv_heads) + 1)
    return max(num for num in few if kv_heads % num == 0)


def head_copies(heads: int, kv_heads: int, num_devices: int) -> int:
    """Return how often Ulysses sends each kv head, so that they divide over devices.

    It is the least number that gives each device the kv heads of its queries in order.

    Args:
        heads: Query heads of a device, a multiple of `num_devices` and of `kv_heads`.
        kv_heads: Heads of keys of a device.
        num_devices: Devices that trade tokens for heads.

    Example:
        >>> head_copies(12, 4, 6), head_copies(8, 4, 4)
        (3, 1)
    """
    group = heads // kv_heads
    return next(
        times
        for times in range(1, group + 1)
        if group % times == 0 and kv_heads * times % num_devices == 0
    )


SPARE = 1.25
"""Room of the first round, as a multiple of the mean rows that a device gets."""

MORE = 0.25
"""Room of each further round, as a part of that of the first."""

ROUTE_BYTES = 8
"""Bytes sent with each row: its expert and its weight, both fp32."""

WEIGHT_BYTES = 4
"""Bytes sent with each gradient of a row: that of its weight."""

PICK_BYTES = 4
"""Bytes sent with each token to a host and each of its choices: the place of its row
among those to the expert's device."""

_MULTIPLE = 8
"""Rows that a device gets are padded to a multiple of this."""


def most_room(
    tokens: int, choices: int, experts: int, most_of_one: int | None = None
) -> int:
    """Return the most rows that a device can send another.

    Args:
        tokens: Tokens of the sender.
        choices: Experts of a token, all different.
        experts: Experts of the receiver.
        most_of_one: Most rows that one expert takes from a sender, if routers bound it.
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
    """Return the rows to each device in the first round.

    It is `most_room` if nothing is sent or routers bound it; then no round follows.

    Args:
        tokens: As for `most_room`.
        choices: As for `most_room`.
        experts: As for `most_room`.
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
    """Return the rows to each device in a further round, after a first of `room`."""
    return padded(math.ceil(MORE * room))


BY_HOST = 0.8
"""Most rows to a host, of those that would go to its devices, if each token is sent to
a host once. Inside of hosts, whose links are about eight times faster than the network,
rows then move once more: sending all rows takes 1.14 times as long."""


def host_room(
    tokens: int, choices: int, num_hosts: int, rows: int, *, is_most: bool = False
) -> int:
    """Return the tokens to each host in the first round; 0 to send each row by itself.

    A host whose experts get a quarter more than their share fits: it gets the tokens
    that have any of their choices there.

    Args:
        tokens: As for `most_room`.
        choices: As for `most_room`.
        num_hosts: Hosts of the devices that share the experts.
        rows: Rows to all devices of a host.
        is_most: Whether no round may follow.

    Example:
        >>> host_room(4096, 8, num_hosts=8, rows=8 * 640)
        3048
        >>> host_room(4096, 2, num_hosts=8, rows=8 * 160)
        0
    """
    if num_hosts == 1:
        return 0
    load = min(SPARE / num_hosts, 1.0)
    fair = padded(math.ceil(tokens * (1 - (1 - load) ** choices)))
    room = tokens if is_most else min(tokens, fair)
    return room if room <= BY_HOST * rows else 0


LEAST_ROWS = 2048
"""Least rows of an expert in a part of a round. Below them its matmuls no longer fill
the device."""

LEAST_BACKWARD_ROWS = 8192
"""The same of the backward: each of its tiles, an eighth of them, adds to the fp32
gradients of the expert's weights."""

LEAST_BACKWARD_ROWS_BY_HOST = 4096
"""The same if rows are sent by host, whose way is longer: with more parts, matmuls hide
more of it."""

MOST_PARTS = 4
MOST_PARTS_BY_HOST = 8


def expert_parts(
    rows: int, room: int, least_rows: int, most_parts: int = MOST_PARTS
) -> int:
    """Return the number of parts in which rows are sent and multiplied.

    While one part is multiplied, others are sent: of `n` parts one n-th is exposed.

    Args:
        rows: Rows of one expert.
        room: Rows from each device, or hosts, which the parts divide.
        least_rows: Least rows of an expert in a part.
        most_parts: Most parts, a power of two.

    Example:
        >>> expert_parts(10_240, 1280, LEAST_ROWS), expert_parts(3000, 1280, LEAST_ROWS)
        (4, 1)
        >>> expert_parts(20_480, 8, LEAST_ROWS, MOST_PARTS_BY_HOST)
        8
    """
    parts = most_parts
    while parts > 1 and (rows < parts * least_rows or room % parts):
        parts //= 2
    return parts


def first_parts(rows: int, room: int, *, num_hosts: int = 0) -> tuple[int, int]:
    """Return the parts of the first round, forward and backward (`expert_parts`).

    Args:
        rows: Rows of one expert.
        room: Rows from each device.
        num_hosts: Hosts that a token is sent to once each; 0 if rows go by themselves.
    """
    divided, most_parts, least = room, MOST_PARTS, LEAST_BACKWARD_ROWS
    if num_hosts:
        divided, most_parts = num_hosts, MOST_PARTS_BY_HOST
        least = LEAST_BACKWARD_ROWS_BY_HOST
    parts = expert_parts(rows, divided, LEAST_ROWS, most_parts)
    return parts, expert_parts(rows, parts, least)


def pairs_ticks(layout: Layout, platform: Platform, expert_hosts: int) -> bool:
    """Return True if a tick's forward and backward of experts run side by side.

    In lock step, where XLA starts what experts send ahead of its use; rows then go in
    one part. Not where experts are on several hosts: parts hide more of their rows
    (`docs/guides/experts.md`). Not with `tensor`, in whose regions sends are not
    ordered.

    Args:
        layout: The layout.
        platform: Of its devices.
        expert_hosts: Hosts of the devices that share experts.
    """
    return (
        layout.stage > 1
        and layout.expert > 1
        and layout.tensor == 1
        and expert_hosts == 1
        and not layout.divergent
        and layout.remat not in STAGE_REMATS
        and platform.overlaps_all_to_alls
    )


def padded(rows: int) -> int:
    """Round rows up to a multiple of eight."""
    return -(-rows // _MULTIPLE) * _MULTIPLE
