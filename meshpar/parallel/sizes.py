"""Sizes that a step chooses by itself: chunks, attention tiles and rooms for experts.

Plain arithmetic without JAX, which the planner shares.

Of `n` devices that share the experts each sends every other `room` rows, filled or not,
so the bytes of a first round do not depend on the data. With `b` bytes a value, as the
payload of all-to-alls:

    forward   n room (embed b + 8)  rows there, each with its expert and its weight
              n room embed b        results back
    backward  n room embed b        gradients of results there
              n room (embed b + 4)  gradients of rows and of weights back

A recomputed block sends its rows once more.
"""

from __future__ import annotations

import math

LOGITS_BYTES = 512 * 2**20
"""Most bytes of logits, by default (`meshpar.parallel.head_loss`). For a vocabulary of
128k that is a chunk of 1,024 tokens: enough for its matmuls to be bound by arithmetic,
not by the sum of the table's gradient that each chunk reads and writes."""

SCORE_BYTES = 256 * 2**20
"""Most bytes of attention's fp32 scores (`meshpar.models.layers.causal_attention`),
while heads are many: the softmax and its gradient are arrays of that size beside the
one kept."""

LONGEST_SCORES = 8192
"""Tokens of the longest sequence whose softmax is kept for the backward on one device;
longer ones are attended to in tiles (`meshpar.parallel.context.tiles`), whose memory is
linear in the sequence."""

HIDDEN_BYTES = 512 * 2**20
"""Most bytes of an MLP's hidden values, where its backward makes them again anyway
(`meshpar.parallel.token_chunks`): each matmul's gradient is an array of that size
beside them. At a hidden size of 2 x 12,288 in bf16 that is a chunk of 8,192 tokens:
enough for its matmuls to be bound by arithmetic, not by the weights' fp32 gradient that
each chunk reads and writes."""

TILE_BYTES = 64 * 2**20
"""Most bytes of a tile's fp32 scores, over all heads that a device takes at a time."""


LARGEST_TILE = 1024
"""Queries or keys of a tile at most: at head_dim 128 a tile then does 4 x 128 x 1024
FLOPs for each score's row of 512 KiB, enough to be bound by arithmetic."""

SMALLEST_TILE = 128
"""Sequences are padded rather than cut into smaller tiles than this."""

PART_BYTES = 4 * 2**20
"""Keys and values that a device sends at once at least: over a link of 50 GB/s they
take 84 us, many times its latency."""


def tile_tokens(tokens: int, rows: int, *, zigzag: bool) -> int:
    """Tokens of a tile: they divide a device's chunks where that costs little.

    Args:
        tokens: Of a device.
        rows: Examples times heads that it takes at once.
        zigzag: Whether the tokens are two chunks of the sequence.

    Example:
        >>> tile_tokens(4096, 8, zigzag=True), tile_tokens(300, 8, zigzag=False)
        (1024, 300)
    """
    chunk = tokens // 2 if zigzag else tokens
    most = int((TILE_BYTES / 4 / max(rows, 1)) ** 0.5)
    most = max(min(most, LARGEST_TILE, chunk), 1)
    divides = next(size for size in range(most, 0, -1) if chunk % size == 0)
    return divides if divides >= min(most, SMALLEST_TILE) else most


def head_parts(kv_heads: int, key_bytes: float, num_devices: int, method: str) -> int:
    """Parts that the kv heads are taken in, so that what is moved takes little memory.

    Gathered they are as many times larger as there are devices; on their way round a
    ring there are two of them, and of their gradients.

    Args:
        kv_heads: Of a device.
        key_bytes: Of all its keys.
        num_devices: That the sequence is split over.
        method: `ring` or `allgather`.
    """
    if num_devices == 1:
        return 1
    most = int(2 * key_bytes // PART_BYTES)
    if method == "allgather":
        most = max(most, num_devices)
    few = range(1, min(max(most, 1), kv_heads) + 1)
    return max(num for num in few if kv_heads % num == 0)


def copies_of_heads(heads: int, kv_heads: int, num_devices: int) -> int:
    """How often each kv head is sent, so that they divide over devices that trade.

    As seldom as lets each device's queries find theirs in order.

    Args:
        heads: Of a device, that divide over the devices.
        kv_heads: Of a device, that divide the heads.
        num_devices: That trade tokens for heads.

    Example:
        >>> copies_of_heads(12, 4, 6), copies_of_heads(8, 4, 4)
        (3, 1)
    """
    group = heads // kv_heads
    return next(
        times
        for times in range(1, group + 1)
        if group % times == 0 and kv_heads * times % num_devices == 0
    )


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
