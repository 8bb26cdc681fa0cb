"""Which fused kernel does attention on a device, or what stands in its way.

The program (`meshpar.models.layers.attention`) and the planner (`planner.cost.run`) ask
the same function, so that a plan counts the kernel that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.attention_method import has_degrees
from meshpar.hardware.platforms import platform_named

SPLASH_LANES = 128
"""Splash attention takes sequences of whole tiles, whose rows are a TPU's lanes."""

HEAD_DIM_MULTIPLE = 8
"""Both kernels take heads whose size is a multiple of this: of splash attention 8 to
256 were compiled for a v5e; of cuDNN's `jax.nn.dot_product_attention` refuses others
(jax 0.10.2)."""

CUDNN_HEAD_DIM, HOPPER_HEAD_DIM = 128, 256
"""The largest heads that it gives cuDNN, before and from compute capability 9.0 on."""


@dataclass(frozen=True, kw_only=True)
class AttentionAsked:
    """One device's attention, between whatever moves keys or heads.

    Args:
        platform: Kind of device: `cpu`, `gpu` or `tpu`.
        half: Whether queries, keys and values are of 16 bits.
        queries, keys: Tokens of a whole sequence.
        head_dim: Of a query and a key.
        method: How attention crosses `context`; empty where sequences lie whole.
        in_order: Whether devices have causal sequences in their own order: no zigzag.
        chunks: Equal parts that a sequence is cut into, whose tiles are their own.
        documents: Whether several share a sequence, told apart by their numbers.
        window: Whether a query sees keys up to some distance alone.
        hidden: Whether no query sees some keys, of other reasons than documents.
        padded: Whether sequences are padded so that devices can share them.
        absent: Whether the device is not there to be asked what it has.
        capability: Compute capability of a GPU; 0 where that is not known.
        probing: Whether nothing runs, and a trace is made to look at alone.
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
    """A kernel, or none and why.

    Args:
        kernel: Of `attention_kernels.KERNELS`; empty for our own forms.
        method: How attention with it crosses `context`; empty where nothing does.
        wanted: The kernel of that platform; empty where it has none.
        obstacle: Why it is not taken: a key of `OBSTACLES`; empty where it is.
        value: What the obstacle is about.
    """

    kernel: str = ""
    method: str = ""
    wanted: str = ""
    obstacle: str = ""
    value: str = ""

    @property
    def scope_name(self) -> str:
        """A name for the operations that run instead; empty where none do.

        `words_of_scope` reads it.
        """
        parts = ("no", self.wanted, self.obstacle, self.value)
        return ".".join(filter(None, parts)) if self.obstacle else ""

    @property
    def words(self) -> str:
        """A sentence for people; empty on a platform without fused attention."""
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
    "absent": "no such device is here to be asked for it",
    "length": f"it takes a multiple of {SPLASH_LANES} tokens at a time, not {{value}}",
    "head_dim": f"it takes heads of a multiple of {HEAD_DIM_MULTIPLE} values, not "
    "{value}",
    "large_heads": f"it takes heads of up to {CUDNN_HEAD_DIM} values, of up to "
    f"{HOPPER_HEAD_DIM} from compute capability 9.0 on, not {{value}}",
    "mesh_axis": "mesh axis {value!r} splits neither the batch nor the heads, and a "
    "kernel is not split by XLA",
}
"""Name -> the sentence of it."""


def attention_choice(asked: AttentionAsked) -> AttentionChoice:
    """The kernel that does attention there, or why none does.

    Example:
        >>> asked = AttentionAsked(
        ...     platform="tpu", half=True, queries=8192, keys=8192, head_dim=100
        ... )
        >>> attention_choice(asked).words
        'attention runs without splash: it takes heads of a multiple of 8 values, \
not 100'
    """
    wanted = platform_named(asked.platform).fused_attention
    if not wanted or asked.probing:
        return AttentionChoice()
    limits = _cudnn_limits(asked) if wanted == "cudnn" else _splash_limits(asked)
    found = {**_limits(asked), **limits}
    for obstacle, value in found.items():
        if value:
            # True stands for an obstacle that says all by itself.
            about = "" if value is True else str(value)
            return AttentionChoice(wanted=wanted, obstacle=obstacle, value=about)
    return AttentionChoice(kernel=wanted, wanted=wanted, method=asked.method)


def words_of_scope(path: str) -> str:
    """The sentence of a `scope_name` in an operation's path; empty if it has none."""
    for name in path.split("/"):
        no, *parts = name.strip("()").rpartition("(")[2].split(".")
        if no == "no" and len(parts) >= 2 and parts[1] in OBSTACLES:
            wanted, obstacle, *value = parts
            return AttentionChoice(
                wanted=wanted, obstacle=obstacle, value=".".join(value)
            ).words
    return ""


def _limits(asked: AttentionAsked) -> dict[str, str | bool]:
    has_ring = platform_named(asked.platform).fused_attention == "splash"
    tiles = ("allgather",) if has_ring else ("ring", "allgather")
    return {
        "dtype": not asked.half,
        "method": (asked.method in tiles or has_degrees(asked.method)) and asked.method,
        "order": asked.method == "ring" and asked.in_order,
        "hidden": asked.hidden,
        "padding": asked.padded,
    }


def _cudnn_limits(asked: AttentionAsked) -> dict[str, str | bool]:
    largest = HOPPER_HEAD_DIM if asked.capability >= 9 else CUDNN_HEAD_DIM
    return {
        "documents": asked.documents,
        "window": asked.window,
        "absent": asked.absent,
        **_odd_heads(asked),
        "large_heads": asked.head_dim > largest and str(asked.head_dim),
    }


def _splash_limits(asked: AttentionAsked) -> dict[str, str | bool]:
    lengths = (asked.queries / asked.chunks, asked.keys / asked.chunks)
    odd = [f"{length:g}" for length in lengths if length % SPLASH_LANES]
    return {
        "window": asked.window and asked.method == "ring",
        "length": bool(odd) and odd[0],
        **_odd_heads(asked),
        "mesh_axis": asked.idle_axis,
    }


def _odd_heads(asked: AttentionAsked) -> dict[str, str | bool]:
    odd = asked.head_dim % HEAD_DIM_MULTIPLE
    return {"head_dim": odd != 0 and str(asked.head_dim)}
