"""In how many parts a block takes its batch, so that one hides another's traffic.

The arithmetic alone, which the step (`model.batch_parts`) and the planner share.
"""

from __future__ import annotations

NUM_PARTS = {"gpu": 4, "tpu": 4}
"""Platform -> parts at most. At the ends of a block the first part's gather and the
last's scatter stay exposed: of two parts a half, of four a quarter. XLA:CPU starts no
collective ahead, so that there parts would be in vain."""

LEAST_TOKENS = 2048
"""Of a part. Below it the 7 hops of a gather over 8 H100 (24 us) take as long as its
bytes do (2048 x 4096 in bf16: 42 us), and its matmuls no longer fill the device."""


def num_parts(platform: str, num_examples: int, tokens: int) -> int:
    """As many as the platform has use for, examples divide into and have tokens for.

    Args:
        platform: `gpu`, `tpu` or another, which has use for one.
        num_examples: Of a device and microbatch.
        tokens: Of all these examples.

    Example:
        >>> num_parts("gpu", 4, 4 * 4096), num_parts("gpu", 1, 4096)
        (4, 1)
    """
    most = min(NUM_PARTS.get(platform, 1), tokens // LEAST_TOKENS)
    divide = (parts for parts in range(most, 1, -1) if num_examples % parts == 0)
    return next(divide, 1)
