"""Fused attention kernels: what each achieves of which device's peak.

A kernel's softmax takes as long as matmuls of `head_dim` would, so that of the peak

    share = whole * size / (size + head_dim)

is achieved with heads of some size, half of all scores being masked; for a backward
see `backward_in_forwards`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from meshpar.errors import InputError
from meshpar.hardware.efficiency import is_number
from meshpar.hardware.splash_flops import BACKWARD_MATMULS
from meshpar.layout import nearest


class Kernel(NamedTuple):
    """What a kernel achieves on one device.

    Args:
        whole: Share of the peak with very large heads.
        head_dim: Head size at which it achieves half of that.
    """

    whole: float
    head_dim: float


def kernel_of(device: str, name: str, value: object) -> Kernel:
    """A kernel of a device's table: two numbers, as a file has them.

    Raises:
        InputError: No such kernel, or numbers that it cannot have.
    """
    if name not in KERNELS:
        raise InputError(
            f"hardware {device!r}: no attention kernel {name!r}; "
            f"{nearest(name, KERNELS)}",
            key="hardware.unknown_attention_kernel",
        )
    numbers: list[Any] = list(value) if isinstance(value, Sequence) else [value]
    good = len(numbers) == 2 and all(map(is_number, numbers))
    if not (good and 0 < numbers[0] <= 1 and 0 <= numbers[1] < math.inf):
        raise InputError(
            f"hardware {device!r}: attention_kernels {name} = {value!r} must be two "
            "numbers: a share of the peak above 0 and at most 1, and a head size of at "
            "least 0",
            key="hardware.wrong_attention_kernel",
        )
    return Kernel(*numbers)


KERNELS = {
    "flash-attention-2": "gpu",
    "flash-attention-3": "gpu",
    "cudnn": "gpu",
    "splash": "tpu",
}
"""Name of each kernel -> the platform that has it."""

OWN_KERNEL = "own"
"""Of an execution: what this library takes (`meshpar.hardware.attention_choice`)."""

MATMULS_OF_BACKWARD = 2.5
"""For each of the forward's: five to its two (Dao 2023, section 3.1)."""

BACKWARD = 0.84
"""Of a forward's FLOP/s, what a backward's achieve: 310 of 368 TFLOP/s
(FlashAttention-2), 499 of 609 (cuDNN), 542 of 638 (FlashAttention-3), with heads of 128
and 4,096 tokens on an H100 (Shah et al. 2024, figures 5 and 6); 63 of 73 % of an A100's
peak (Dao 2023, section 4.1)."""


def backward_in_forwards(kernel: str) -> float:
    """How many times the forward's time a kernel's backward takes.

    Splash attention's is two kernels of seven matmuls and two softmaxes, which are
    taken to run as the forward's two and one do.
    """
    if kernel == "splash":
        return BACKWARD_MATMULS
    return MATMULS_OF_BACKWARD / BACKWARD


# 50 to 73 % of an A100 (Dao 2023, abstract); heads of 64 against 128: its figure 4.
AMPERE = {"flash-attention-2": Kernel(0.71, 24)}

# What `Efficiency` says of a device is the kernel that this library runs there: cuDNN's
# on a GPU, which `meshpar calibrate` measures, splash attention on a TPU.
CUDNN_AMPERE = AMPERE["flash-attention-2"]  # taken to be the same

# Shah et al. 2024, figure 5: causal, 4,096 tokens on an H100: TFLOP/s with heads of 64
# and of 128 are 284 and 319 (FlashAttention-2), 363 and 518 (cuDNN), 420 and 579
# (FlashAttention-3), of 989.
HOPPER = {
    "flash-attention-2": Kernel(0.37, 18),
    "flash-attention-3": Kernel(0.94, 78),
}
CUDNN_HOPPER = Kernel(0.91, 95)
