"""Choose the fused kernel that attention runs in on a device, or say why none does.

The program (`meshpar.models.layers.attention`) and the planner (`planner.cost.run`)
call the same function, so that a plan counts the kernel that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.hardware.platforms import platform_named
from meshpar.layout.context_method import CONTEXT_METHODS, merges_softmaxes

SPLASH_LANES = 128
"""Splash attention takes sequences of whole tiles, whose rows are a TPU's lanes."""

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
