"""How attention over a split or long sequence is cut: tiles of scores, parts of heads.

Plain arithmetic, for the program (`meshpar.parallel.context`) and for who plans it.
"""

from __future__ import annotations

from meshpar.chunk_bytes import TILE_BYTES

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
