"""Fused attention kernels: which one runs, its FLOPs, its share of the peak.

A kernel's softmax takes as long as matmuls of `head_dim` would, so that it achieves

    share = whole * size / (size + head_dim)

of the peak with heads of some size, half of all scores being masked. A backward on a
GPU achieves `Kernel.backward` of the forward's FLOP/s; of splash attention's see
`meshpar.hardware.splash_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshpar.errors import InputError, nearest
from meshpar.hardware.platforms import platform_named
from meshpar.hardware.splash_kernels import SPLASH_LANES
from meshpar.layout.context_method import CONTEXT_METHODS, merges_softmaxes

MATMULS_OF_BACKWARD = 2.5
"""Matmuls of a backward for each of the forward's: five to its two (Dao 2023, section
3.1)."""

BACKWARD = 0.84
"""A backward's FLOP/s over its forward's: 310 of 368 TFLOP/s (FlashAttention-2), 499
of 609 (cuDNN), 542 of 638 (FlashAttention-3), with heads of 128 and 4,096 tokens on an
H100 (Shah et al. 2024, figures 5 and 6); 63 of 73 % of an A100's peak (Dao 2023,
section 4.1)."""


class Kernel(NamedTuple):
    """Speed of a kernel on one device.

    Args:
        whole: Share of the peak with very large heads.
        head_dim: Head size at which it achieves half of that.
        backward: FLOP/s of its backward on a GPU over those of its forward.
    """

    whole: float
    head_dim: float
    backward: float = BACKWARD

    @property
    def backward_in_forwards(self) -> float:
        """Time of a backward on a GPU over that of the forward."""
        return MATMULS_OF_BACKWARD / self.backward


def is_number(value: object) -> bool:
    """Return True if a value of a device's file is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_kernel(device: str, name: str) -> None:
    """Check the name of a kernel in a device's file.

    Raises:
        InputError: No such kernel.
    """
    if name not in KERNELS:
        raise InputError(
            f"hardware {device!r}: no attention kernel {name!r}; "
            f"{nearest(name, KERNELS)}",
            key="hardware.unknown_attention_kernel",
        )


def parse_kernel(device: str, name: str, value: object) -> Kernel:
    """Parse an entry of a device's table of kernels: two numbers, or a `Kernel`.

    Raises:
        InputError: No such kernel, or numbers that it cannot have.
    """
    check_kernel(device, name)
    numbers: list[Any] = list(value) if isinstance(value, Sequence) else [value]
    numbers = numbers[:2] if isinstance(value, Kernel) else numbers
    good = len(numbers) == 2 and all(map(is_number, numbers))
    if not (good and 0 < numbers[0] <= 1 and 0 <= numbers[1] < math.inf):
        raise InputError(
            f"hardware {device!r}: attention_kernels {name} = {value!r} must be two "
            "numbers: a share of the peak above 0 and at most 1, and a head size of at "
            "least 0",
            key="hardware.wrong_attention_kernel",
        )
    return value if isinstance(value, Kernel) else Kernel(*numbers)


KERNELS = {
    "flash-attention-1": "gpu",
    "flash-attention-2": "gpu",
    "flash-attention-3": "gpu",
    "cudnn": "gpu",
    "composable-kernel": "gpu",
    "splash": "tpu",
}
"""Name of each kernel -> the platform that has it."""

OWN_KERNEL = "own"
"""Name of the kernel that `attention_choice` chooses."""

PLATFORM_KERNEL = "platform"
"""Name of a platform's kernel, whatever its limits here (`Platform.fused_attention`).
"""

# 50 to 73 % of an A100 (Dao 2023, abstract); heads of 64 against 128: its figure 4.
# FlashAttention: 30 to 50 % forward, 25 to 35 % backward (its section 1). Within that,
# its Triton kernel is fitted to two rows of LLM Foundry on an A100 (those that
# `meshpar plan --validate` marks); it is as fast with heads of 64 as of 128.
AMPERE = {
    "flash-attention-1": Kernel(0.5, 0, backward=0.27 / 0.5),
    "flash-attention-2": Kernel(0.71, 24),
}

# What `Efficiency` says of a device is the kernel that this library runs there: cuDNN's
# on a GPU, which `meshpar calibrate` measures, splash attention on a TPU.
CUDNN_AMPERE = AMPERE["flash-attention-2"]  # taken to be the same

# Shah et al. 2024, figure 5: causal, 4,096 tokens on an H100: TFLOP/s with heads of 64
# and of 128 are 284 and 319 (FlashAttention-2), 363 and 518 (cuDNN), 420 and 579
# (FlashAttention-3), of 989.
# FlashAttention has the share there that FlashAttention-2 has of its own on an A100:
# 0.324 of 0.598 with heads of 128.
HOPPER = {
    "flash-attention-1": Kernel(0.5 * 0.54, 0, backward=0.27 / 0.5),
    "flash-attention-2": Kernel(0.37, 18),
    "flash-attention-3": Kernel(0.94, 78),
}
CUDNN_HOPPER = Kernel(0.91, 95)


HEAD_DIM_MULTIPLE = 8
"""Both kernels take heads whose size is a multiple of this. Splash attention was
compiled for a v5e with 8 to 256; `jax.nn.dot_product_attention` gives cuDNN no others
(jax 0.10.2)."""

CUDNN_HEAD_DIM, HOPPER_HEAD_DIM = 128, 256
"""Largest heads for cuDNN, before and from compute capability 9.0 on."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """Attention of one device, without the collectives that move keys or heads.

    Args:
        platform: Kind of device: `cpu`, `gpu` or `tpu`.
        half: True if queries, keys and values have 16 bits.
        queries, keys: Tokens of a whole sequence.
        head_dim: Size of a query and a key.
        method: How attention crosses `context`; empty where sequences lie whole.
        in_order: True if devices hold causal sequences in their own order, not zigzag.
        chunks: Equal parts that a sequence is cut into, each with its own tiles.
        documents: True if several documents share a sequence.
        window: True if a query sees only keys up to some distance.
        hidden: True if no query sees some keys, for other reasons than documents.
        padded: True if sequences are padded so that devices can share them.
        absent: True if the device is not present, so its kernel cannot be compiled.
        capability: Compute capability of a GPU; 0 if unknown.
        probing: True if the program is only traced.
        idle_axis: A mesh axis that splits neither examples nor heads; empty for none.
    """

    platform: str
    half: bool
    queries: int
    keys: int
    head_dim: int
    method: str = ""
    in_order: bool = False
    chunks: int = 1
    documents: bool = False
    window: bool = False
    hidden: bool = False
    padded: bool = False
    absent: bool = False
    capability: float = 0.0
    probing: bool = False
    idle_axis: str = ""


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A kernel, or the reason for none.

    Args:
        kernel: Name in `attention_kernels.KERNELS`; empty for our own forms.
        method: How attention with it crosses `context`; empty where nothing does.
        wanted: The platform's kernel; empty if it has none.
        obstacle: Key of `OBSTACLES` that rules the kernel out; empty if none does.
        value: The size or name that the obstacle's sentence mentions.
    """

    kernel: str = ""
    method: str = ""
    wanted: str = ""
    obstacle: str = ""
    value: str = ""

    @property
    def runs_in_hops(self) -> bool:
        """True if the kernel meets the keys of one device after another's."""
        return bool(self.kernel) and merges_softmaxes(self.method)

    @property
    def scope_name(self) -> str:
        """Name scope of the operations that run instead, for `obstacle_words`."""
        parts = ("no", self.wanted, self.obstacle, self.value)
        return ".".join(filter(None, parts)) if self.obstacle else ""

    @property
    def words(self) -> str:
        """Sentence for reports; empty on a platform without fused attention."""
        if self.kernel:
            return f"attention runs in one kernel ({self.kernel})"
        if not self.obstacle:
            return ""
        why = OBSTACLES[self.obstacle].format(value=self.value)
        return f"attention runs without {self.wanted}: {why}"


OBSTACLES = {
    "dtype": "the kernel takes bf16; set precision=bf16",
    "method": "attention={value} merges softmaxes of parts, which our tiles do; "
    "attention=ulysses takes the kernel, on TPUs attention=ring too",
    "order": "a ring in the sequence's own order runs in tiles",
    "documents": "it takes no packed documents; tiles do",
    "window": "it takes no sliding window here; tiles do",
    "hidden": "it takes no keys that all queries leave out",
    "padding": "sequences are padded to divide over context",
    "absent": "no such device is here to compile the kernel on",
    "vendor": "the kernel is NVIDIA's, and this device another's",
    "length": f"it takes a multiple of {SPLASH_LANES} tokens at a time, not {{value}}",
    "head_dim": f"it takes heads of a multiple of {HEAD_DIM_MULTIPLE} values, not "
    "{value}",
    "large_heads": f"it takes heads of up to {CUDNN_HEAD_DIM} values, of up to "
    f"{HOPPER_HEAD_DIM} from compute capability 9.0 on, not {{value}}",
    "mesh_axis": "mesh axis {value!r} splits neither the batch nor the heads, and a "
    "kernel is not split by XLA",
}
"""Name of an obstacle -> its sentence."""


def attention_choice(request: AttentionRequest) -> AttentionChoice:
    """Choose the kernel that attention runs in, or say why none does.

    Example:
        >>> request = AttentionRequest(
        ...     platform="tpu", half=True, queries=8192, keys=8192, head_dim=100
        ... )
        >>> attention_choice(request).words
        'attention runs without splash: it takes heads of a multiple of 8 values, \
not 100'
    """
    wanted = platform_named(request.platform).fused_attention
    if not wanted or request.probing:
        return AttentionChoice()
    limits = _cudnn_limits(request) if wanted == "cudnn" else _splash_limits(request)
    for obstacle, value in {**_limits(request, wanted), **limits}.items():
        if value:
            # True stands for an obstacle without a value.
            about = "" if value is True else str(value)
            return AttentionChoice(wanted=wanted, obstacle=obstacle, value=about)
    return AttentionChoice(kernel=wanted, wanted=wanted, method=request.method)


def obstacle_words(path: str) -> str:
    """Return the sentence of a `scope_name` in an operation's path; empty if none."""
    for name in path.split("/"):
        no, *parts = name.strip("()").rpartition("(")[2].split(".")
        if no == "no" and len(parts) >= 2 and parts[1] in OBSTACLES:
            wanted, obstacle, *value = parts
            return AttentionChoice(
                wanted=wanted, obstacle=obstacle, value=".".join(value)
            ).words
    return ""


def _limits(request: AttentionRequest, kernel: str) -> dict[str, str | bool]:
    method = CONTEXT_METHODS.get(request.method)
    fits = method is not None and kernel in method.kernels
    return {
        "dtype": not request.half,
        "method": bool(request.method) and not fits and request.method,
        "order": merges_softmaxes(request.method) and request.in_order,
        "hidden": request.hidden,
        "padding": request.padded,
    }


def _cudnn_limits(request: AttentionRequest) -> dict[str, str | bool]:
    largest = HOPPER_HEAD_DIM if request.capability >= 9 else CUDNN_HEAD_DIM
    return {
        "documents": request.documents,
        "window": request.window,
        "absent": request.absent,
        **_odd_heads(request),
        "large_heads": request.head_dim > largest and str(request.head_dim),
    }


def _splash_limits(request: AttentionRequest) -> dict[str, str | bool]:
    lengths = (request.queries / request.chunks, request.keys / request.chunks)
    odd = [f"{length:g}" for length in lengths if length % SPLASH_LANES]
    return {
        "window": request.window and merges_softmaxes(request.method),
        "length": bool(odd) and odd[0],
        **_odd_heads(request),
        "mesh_axis": request.idle_axis,
    }


def _odd_heads(request: AttentionRequest) -> dict[str, str | bool]:
    odd = request.head_dim % HEAD_DIM_MULTIPLE
    return {"head_dim": odd != 0 and str(request.head_dim)}
