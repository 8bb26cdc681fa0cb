"""Fused attention kernels: the share of a device's peak that each achieves, its FLOPs.

A kernel's softmax takes as long as matmuls of `head_dim` would, so that it achieves

    share = whole * size / (size + head_dim)

of the peak with heads of some size, half of all scores being masked; for a backward see
`backward_in_forwards`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from meshpar.errors import InputError, nearest


class Kernel(NamedTuple):
    """Speed of a kernel on one device.

    Args:
        whole: Share of the peak with very large heads.
        head_dim: Head size at which it achieves half of that.
    """

    whole: float
    head_dim: float


def is_number(value: object) -> bool:
    """Return True if a value of a device's file is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_kernel(device: str, name: str, value: object) -> Kernel:
    """Parse an entry of a device's table of kernels: two numbers.

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
"""An execution's kernel that `meshpar.hardware.attention_choice` chooses."""

MATMULS_OF_BACKWARD = 2.5
"""Matmuls of a backward for each of the forward's: five to its two (Dao 2023, section
3.1)."""

SPLASH_BACKWARD_MATMULS = 3.5
"""The same of splash attention's two backward kernels: seven to the forward's two."""

BACKWARD = 0.84
"""A backward's FLOP/s over its forward's: 310 of 368 TFLOP/s (FlashAttention-2), 499
of 609 (cuDNN), 542 of 638 (FlashAttention-3), with heads of 128 and 4,096 tokens on an
H100 (Shah et al. 2024, figures 5 and 6); 63 of 73 % of an A100's peak (Dao 2023,
section 4.1)."""


def backward_in_forwards(kernel: str) -> float:
    """Return a kernel's backward time over its forward's.

    Splash attention's backward is two kernels of seven matmuls and two softmaxes, which
    are taken to run as the forward's two and one do.
    """
    if kernel == "splash":
        return SPLASH_BACKWARD_MATMULS
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


_SCOPE = re.compile(r"splash_pairs_(\d+)_(\d+)_(\d+)")

# Matmuls over each pair of a query and a key: (of the query's size, of the value's).
# Forward: scores; mixed values. Queries' gradient: scores and it; the softmax's
# gradient. Keys' and values': scores and keys'; the softmax's gradient and values'.
_MATMULS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
_KERNEL = re.compile(rf"splash_mha_({'|'.join(_MATMULS)})_")


def splash_scope(pairs: int, query_dim: int, value_dim: int) -> str:
    """Return a scope's name that tells the FLOPs of the splash kernels called in it.

    The compiled text of these kernels does not show them; `splash_flops` reads the
    name from the calls' paths.

    Args:
        pairs: Pairs of a query and a key that have a score, of all examples and heads.
        query_dim: Size of a query.
        value_dim: Size of a value.
    """
    return f"splash_pairs_{pairs}_{query_dim}_{value_dim}"


def splash_flops(path: str) -> int | None:
    """Return the FLOPs of the splash kernel at a path of operations; None if none is.

    Example:
        >>> splash_flops("splash_pairs_10_4_4/splash_mha_fwd_no_residuals/pallas_call")
        160
    """
    scope, kernel = _SCOPE.search(path), _KERNEL.search(path)
    if not scope or not kernel:
        return None
    pairs, query_dim, value_dim = map(int, scope.groups())
    queries, values = _MATMULS[kernel[1]]
    return 2 * pairs * (queries * query_dim + values * value_dim)
