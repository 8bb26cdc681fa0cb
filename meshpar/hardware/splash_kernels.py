"""Splash attention's kernels on TPUs: their FLOPs, and when one kernel is the backward.

The fused backward computes scores once, for the gradients of queries, keys and values:
five matmuls. It adds up the gradient of queries over blocks of keys outside the kernel,
so it writes a *partial sum* of it for each block. Where these take too much memory, or
are mostly zero, two kernels of seven matmuls are the backward.
"""

from __future__ import annotations

import re

SPLASH_LANES = 128
"""Splash attention takes sequences of whole tiles, whose rows are a TPU's lanes."""

LARGEST_BLOCK = 1024
"""Queries or keys of a kernel's tile at most, of heads up to 128; of larger ones half
as many. The more, the less is read, but 2,048 exceed the VMEM that XLA gives a kernel
on a v5e, and 1,024 with heads of 256 that on a v4 (jax 0.10.2). The fused backward
takes twice as many keys: 4,096 exceed the VMEM on a v4."""

LARGEST_PARTIAL_BYTES = 512 << 20
"""Most bytes of the partial sums of one kv head's queries in a fused backward."""

_WINDOWS = 4
"""Most windows in a sequence whose backward is fused. Of a longer one most partial sums
are zero, and the fused kernel visits them all, which takes longer than two matmuls."""

# Matmuls over each pair of a query and a key: (of the query's size, of the value's).
# Forward: scores; mixed values. Queries' gradient: scores and it; the softmax's
# gradient. Keys' and values': scores and keys'; the softmax's gradient and values'.
# Fused: all of these once.
_MATMULS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "fused": (3, 2)}

_SCOPE = re.compile(r"splash_(pairs|fused)_(\d+)_(\d+)_(\d+)")
_KERNEL = re.compile(r"splash_mha_(fwd|dq|dkv)_")


def largest_block(head_dim: int) -> int:
    """Return the most queries or keys of a tile."""
    return LARGEST_BLOCK if head_dim <= SPLASH_LANES else LARGEST_BLOCK // 2


def largest_key_block(keys: int, head_dim: int, *, masked: bool) -> int:
    """Return the most keys of a tile of the fused backward.

    A mask's tiles are computed whole, so that larger ones cost more along its edge than
    they spare, but for long sequences.

    Args:
        keys: Keys of a sequence.
        head_dim: Size of a head.
        masked: True if some scores are left out by their places.
    """
    most = largest_block(head_dim)
    return most if masked and keys <= 8 * most else 2 * most


def partial_bytes(
    queries: int, keys: int, *, group: int, head_dim: int, key_block: int
) -> int:
    """Return the bytes of the bf16 partial sums of one kv head's queries' gradient.

    Args:
        queries: Queries of a sequence.
        keys: Keys of it.
        group: Query heads of a kv head.
        head_dim: Size of a head.
        key_block: Keys of a tile.
    """
    lanes = -(-head_dim // SPLASH_LANES) * SPLASH_LANES
    return 2 * group * queries * lanes * -(-keys // key_block)


def fuses_backward(
    queries: int,
    keys: int,
    *,
    group: int,
    head_dim: int,
    masked: bool,
    window: int | None = None,
) -> bool:
    """Return True if one kernel is the backward of these queries and keys in bf16.

    Args:
        queries: Queries of a sequence.
        keys: Keys of it.
        group: Query heads of a kv head.
        head_dim: Size of a head.
        masked: True if some scores are left out by their places.
        window: A query sees keys less than so many places away; None for no limit.

    Example:
        >>> shape = dict(group=4, head_dim=128, masked=True)
        >>> fuses_backward(8192, 8192, **shape), fuses_backward(65536, 65536, **shape)
        (True, False)
    """
    if window is not None and keys > _WINDOWS * window:
        return False
    key_block = largest_key_block(keys, head_dim, masked=masked)
    sizes = {"group": group, "head_dim": head_dim, "key_block": key_block}
    # Keys that all queries see can come in pieces.
    at_once = keys if masked else min(keys, key_block)
    return partial_bytes(queries, at_once, **sizes) <= LARGEST_PARTIAL_BYTES


def num_key_pieces(
    queries: int, keys: int, *, group: int, head_dim: int, key_block: int
) -> int:
    """Return the pieces of keys, which all queries see, that a fused backward takes.

    One after another, so that the partial sums of a kv head fit in
    `LARGEST_PARTIAL_BYTES`.
    """
    sizes = {"group": group, "head_dim": head_dim, "key_block": key_block}
    blocks = keys // key_block
    return next(
        num
        for num in range(1, blocks + 1)
        if blocks % num == 0
        and (
            num == blocks
            or partial_bytes(queries, keys // num, **sizes) <= LARGEST_PARTIAL_BYTES
        )
    )


def splash_backward_in_forwards(*, fused: bool) -> float:
    """Return the time of a backward over its forward's, both at the same FLOP/s.

    Matmuls are counted: five of a fused kernel, seven of two, to the forward's two. A
    softmax's share of them is taken to be the forward's.
    """
    return 2.5 if fused else 3.5


def splash_scope(
    pairs: int, query_dim: int, value_dim: int, *, fused: bool = False
) -> str:
    """Return a scope's name that tells the FLOPs of the splash kernels called in it.

    The compiled text of these kernels does not show them; `splash_flops` reads the
    name from the calls' paths.

    Args:
        pairs: Pairs of a query and a key that have a score, of all examples and heads.
        query_dim: Size of a query.
        value_dim: Size of a value.
        fused: True if the kernel of keys' gradients makes those of queries too.
    """
    kind = "fused" if fused else "pairs"
    return f"splash_{kind}_{pairs}_{query_dim}_{value_dim}"


def splash_flops(path: str) -> int | None:
    """Return the FLOPs of the splash kernel at a path of operations; None if none is.

    Example:
        >>> splash_flops("splash_pairs_10_4_4/splash_mha_fwd_no_residuals/pallas_call")
        160
        >>> splash_flops("splash_fused_10_4_4/splash_mha_dkv_no_residuals/pallas_call")
        400
    """
    scope, kernel = _SCOPE.search(path), _KERNEL.search(path)
    if not scope or not kernel:
        return None
    kind, *numbers = scope.groups()
    pairs, query_dim, value_dim = map(int, numbers)
    queries, values = _MATMULS["fused" if kind == "fused" else kernel[1]]
    return 2 * pairs * (queries * query_dim + values * value_dim)
