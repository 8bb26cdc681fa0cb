"""Fused attention kernels: what each achieves of which device's peak.

A kernel's softmax takes as long as matmuls of `head_dim` would, so that of the peak

    share = whole * size / (size + head_dim)

is achieved with heads of some size, half of all scores being masked; a backward
achieves `BACKWARD` of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """What a kernel achieves on one device.

    Args:
        whole: Share of the peak with very large heads.
        head_dim: Head size at which it achieves half of that.
    """

    whole: float
    head_dim: float


KERNELS = {
    "flash-attention-2": "gpu",
    "flash-attention-3": "gpu",
    "cudnn": "gpu",
    "splash": "tpu",
}
"""Name of each kernel -> the platform that has it."""

BACKWARD = 0.84
"""Of a forward's FLOP/s, what a backward's achieve: 310 of 368 TFLOP/s
(FlashAttention-2), 499 of 609 (cuDNN), 542 of 638 (FlashAttention-3), heads of 128, 4,096
tokens on an H100 (Shah et al. 2024, figures 5 and 6); 63 of 73 % on an A100 (Dao 2023,
abstract)."""

# 50 to 73 % of an A100 (Dao 2023, abstract); heads of 64 against 128: its figure 4.
AMPERE = {"flash-attention-2": Kernel(0.71, 24)}

# Shah et al. 2024, figure 5: causal, 4,096 tokens on an H100: TFLOP/s with heads of 64
# and of 128 are 284 and 319 (FlashAttention-2), 363 and 518 (cuDNN), 420 and 579
# (FlashAttention-3), of 989.
HOPPER = {
    "flash-attention-2": Kernel(0.37, 18),
    "cudnn": Kernel(0.91, 95),
    "flash-attention-3": Kernel(0.94, 78),
}
