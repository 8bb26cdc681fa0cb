"""Activations that one block keeps for its backward.

The count of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (section 4.1 and Table 2), for s tokens of b sequences, h = embed, a
heads, t = tensor, in 16 bits: sbh (34 + 5 as/h) without remat, of which dropout masks
are 2 sbh and those of the scores as^2 b, and their dropped copy 2 as^2 b. Our blocks
drop no scores, and keep a mask for each branch only where the model drops values. So a
GELU block with ffn = 4h keeps

    remat      one device          tensor t                     and sequence parallel
    none       sbh (32 + 2 as/h)   sbh (8 + 24/t + 2 as/(ht))   sbh/t (32 + 2 as/h)
    selective  sbh 32              sbh (8 + 24/t)               sbh 32/t
    full       sbh 2               sbh 2                        sbh 2/t

and 2 sbh more with dropout and `none`; other blocks as `block_residuals` lists them.

Two arrays have no name: the softmax inside of attention, and the
residual stream between the two halves, which takes attention's output, summed over
`tensor`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshpar.layout import STAGE_REMATS
from meshpar.layout.layout import ATTENTION_MIXED, BLOCK_INPUT, named_residuals
from meshpar.parallel.sizes import first_parts, first_room, host_room, most_room
from meshpar.planner.cost.run import Run


class Residual(NamedTuple):
    """An array that a block makes.

    Args:
        name: Name in `remat=save:NAME`, if it has one there.
        bytes_per_token: Bytes of one token, on one device alone.
        along: Axis that splits it: `tensor`, or `residual` for the tensor axis under
            sequence parallelism only.
    """

    name: str
    bytes_per_token: float
    along: str


def block_residuals(run: Run, *, moe: bool) -> tuple[Residual, ...]:
    """Return all that a block keeps without remat, in the order in which it is made.

    Routed experts count as one MLP of the size that a token uses; norms on queries and
    keys, and the order of tokens by experts, are not counted.
    """
    workload, execution, value = run.workload, run.execution, run.dtype_bytes
    eager, hidden = execution.eager, workload.hidden * value
    # What matmuls alone take is kept as they take it; what others take too, twice.
    taken = run.taken_bytes
    cast = taken if taken < value else 0
    mixed, ffn = workload.heads * workload.value_dim, active_ffn(run, moe)
    qkv, wide = projections(run), 0.0
    if workload.kv_lora_rank:
        qkv, wide = 3 * mixed, qkv - 3 * mixed
    # A fused kernel keeps the fp32 log of each softmax's sum instead of the softmax
    # (Dao et al. 2022, section 3.1).
    softmax = "log_sums", float(_FP32_BYTES)
    if run.stores_softmax:
        # An eager program's dropout of scores has a mask and a dropped copy.
        dropped = value + _MASK_BYTES if eager and execution.dropout else 0
        softmax = "scores", run.seq * (value + dropped)
    activation = 2 if eager and workload.gated and not execution.fused_activation else 1
    rows = [
        Residual("x", hidden, "residual"),
        Residual("attention_normed", workload.hidden * taken, "residual"),
        Residual("attention_qkv", qkv * value, "tensor"),
        Residual("latent_heads", wide * value, "tensor"),
        Residual(softmax[0], workload.heads * softmax[1], "tensor"),
        Residual(ATTENTION_MIXED, mixed * (value + cast), "tensor"),
        Residual("attention_out", hidden, "residual"),
        Residual("mlp_normed", _mlp_normed_bytes(run, moe, cast), "residual"),
        Residual(
            "mlp_gate_up" if workload.gated else "mlp_up",
            gate_up_values(run, moe) * value,
            "tensor",
        ),
        Residual("mlp_hidden", ffn * (taken + (activation - 1) * value), "tensor"),
    ]
    if execution.dropout if eager else workload.dropout:
        rows.append(Residual("masks", 2 * _MASK_BYTES * workload.hidden, "residual"))
    if eager and execution.keeps_gathered:
        others = 1 / run.residual_share - 1
        rows.append(Residual("gathered", 2 * hidden * others, "residual"))
    if workload.modulations and not eager:
        # Gates need the outputs of both branches, of which one is counted.
        rows.append(Residual("gate_outputs", hidden, "residual"))
        rows.append(Residual("gate_inputs", hidden, "residual"))
    return tuple(rows)


def _mlp_normed_bytes(run: Run, moe: bool, cast: int) -> float:
    """Bytes of the MLP's input of one token; a router takes it whole, experts later."""
    if not moe:
        return run.workload.hidden * run.taken_bytes
    shared = cast if run.workload.shared_experts else 0
    return run.workload.hidden * (run.dtype_bytes + shared)


def kept_bytes(run: Run, *, moe: bool, remat: str = "", fullest: bool = False) -> float:
    """Return the bytes a block keeps of one microbatch, under a remat policy.

    That of the run's layout when absent, here and below; of traced blocks the mean, or
    the fullest.

    Example:
        >>> from meshpar.planner.cost.estimate import estimate
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.machine.execution import MESHPAR_CPU
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["175b"],
        ...     cluster_of("h100-80gb", devices=8),
        ...     "tensor=8,remat=selective,precision=bf16",
        ...     global_batch=1,
        ...     execution=MESHPAR_CPU,
        ... )
        >>> kept_bytes(plan.run, moe=False) / (2048 * 1 * 12288)
        11.0
    """
    remat = remat or run.layout.remat
    if remat in STAGE_REMATS:
        return 0.0  # the stage's input alone: `stage_input_bytes`
    return _policy_bytes(run, remat, moe, fullest=fullest)


def everything_bytes(run: Run, *, moe: bool) -> float:
    """Return the bytes of a microbatch that the fullest block keeps without remat."""
    return _policy_bytes(run, "none", moe, fullest=True)


def input_bytes(run: Run) -> float:
    """Return the bytes of the batch on one device; text is too little to count."""
    traced = run.workload.traced
    if not traced:
        return 0.0
    gathered = run.layout.data if run.layout.data_splits else 0
    return traced.input_bytes * run.tokens * run.layout.microbatches * (1 + gathered)


def embedding_bytes(run: Run) -> float:
    """Return the bytes that a traced embedding keeps of a step that runs no ticks."""
    traced = run.workload.traced
    if not traced or run.layout.runs_in_ticks:
        return 0.0
    return traced.embedding_bytes * run.tokens


def offloaded_bytes(run: Run, *, moe: bool, remat: str = "") -> float:
    """Return the bytes of one microbatch that a block moves to the host and back."""
    names = named_residuals(remat or run.layout.remat)
    if names is None or not names.offload:
        return 0.0
    saved = _residual_bytes(run, "save:" + "/".join(names.offload), moe)
    inside = max(0.0, saved - _residual_bytes(run, "full", moe))
    whole = stage_input_bytes(run) if BLOCK_INPUT in names.offload else 0.0
    return inside + whole


def _policy_bytes(run: Run, remat: str, moe: bool, *, fullest: bool = False) -> float:
    """Bytes of one microbatch that a policy keeps: as traced, or by sizes."""
    traced = run.workload.traced
    if not traced or remat not in traced.needed.mean:
        return _residual_bytes(run, remat, moe)
    needed = traced.needed if run.stores_softmax else traced.kernel_needed()
    kept = needed.fullest if fullest else needed.mean
    # The residual stream is whole over `tensor`.
    each = kept[remat] * run.dtype_bytes / traced.residual_dtype_bytes
    stream = run.workload.hidden * run.dtype_bytes
    split = max(0.0, each - stream) / run.layout.tensor
    return run.tokens * split + stage_input_bytes(run)


def _residual_bytes(run: Run, remat: str, moe: bool) -> float:
    """Bytes of `block_residuals` of one microbatch that a policy keeps on a device."""
    tokens, tensor, eager = run.tokens, run.layout.tensor, run.execution.eager
    if remat == "selective" and run.execution.selects_matmuls:
        return tokens * _selected_bytes(run, moe)
    degrees = {"tensor": tensor, "residual": 1}
    if run.layout.sequence_parallel:
        degrees["residual"] = tensor
    kept = _kept_residuals(
        remat, eager=eager, dense=eager or not moe, log_sums=run.keeps_log_sums
    )
    key = "residuals", moe
    if key not in run.known:
        run.known[key] = {
            one.name: tokens * one.bytes_per_token / degrees[one.along]
            for one in block_residuals(run, moe=moe)
        }
    total = sum(size for name, size in run.known[key].items() if name in kept)
    total -= _dropped_bytes(run, moe, kept)
    if moe and (remat in ("none", "selective") or "experts_in" in remat):
        # Tokens in the order of their experts, in and out, and the router's scores.
        values = run.workload.top_k * run.workload.hidden
        routed = values * run.taken_bytes
        if run.execution.keeps_expert_outputs:
            routed += values * run.dtype_bytes
        total += tokens * (routed + 4 * run.workload.experts) / tensor
    elif moe and remat in ("full", "dots") and run.layout.expert > 1 and not eager:
        total += room_rows(run) * run.workload.hidden * run.dtype_bytes
    return total


def _dropped_bytes(run: Run, moe: bool, kept: frozenset[str]) -> float:
    """Bytes of `kept` that `Execution.recomputes` makes again instead."""
    workload, modules, values = run.workload, run.execution.modules, 0.0
    names = {"log_sums"} if "core_attn" in modules else set()
    if "layernorm" in modules:
        names |= {"attention_normed", "mlp_normed"}
    if "mlp" in modules and not moe:
        names |= {"mlp_gate_up", "mlp_up", "mlp_hidden"}
    if "mla_up_proj" in modules and workload.kv_lora_rank:
        names.add("attention_qkv")
        if "latent_heads" in kept:
            wider = 2 * (workload.query_dim - workload.value_dim)
            values += workload.heads * wider * run.dtype_bytes
    if "moe_act" in modules and moe and "mlp_hidden" in kept:
        values += workload.top_k * workload.expert_ffn * run.taken_bytes
    sizes: dict[str, float] = run.known["residuals", moe]
    whole = sum(sizes[name] for name in names & kept & sizes.keys())
    return whole + run.tokens * values / run.layout.tensor


def _selected_bytes(run: Run, moe: bool) -> float:
    """Bytes that a block keeps of one token if it recomputes every second matmul.

    Its input, queries and values, attention's output and log-sums, the MLP's first
    output, half of which is its gate's; and its last, in a table of what was selected
    that is not dropped before the backward.
    """
    workload, value = run.workload, run.dtype_bytes
    qkv = (workload.heads + workload.kv_heads) * workload.query_dim
    inside = qkv + workload.heads * workload.value_dim + active_ffn(run, moe)
    stream = 2 * workload.hidden * run.residual_share
    sums = _FP32_BYTES * workload.heads
    return value * stream + (value * inside + sums) / run.layout.tensor


def stash_bytes(run: Run, *, moe: bool, remat: str = "") -> float:
    """Return the bytes that a block's I leaves for its W, of one microbatch.

    The smallest that `meshpar.parallel.minimum_stash` finds: of each matmul with
    weights its input and the gradient of its output, or what follows by cheap
    operations from others. Per token of a dense block, with a residual stream of h
    values and MLPs of f:

        5 h    stream: both norms' inputs and gradients, and the output's gradient
        2 h    more where the forward's own stream is kept, not computed again
        qkv    gradients of queries, keys and values
        mixed  attention's output
        qk     more with norms on queries and keys
        2 f    MLP's first output and a gradient; 3 f with a gate

    Under sequence parallelism the stream is split, and what its matmuls take of it is
    gathered: 4 h, both inputs and the gradients of both outputs, of which one takes
    the place of the output's gradient above.

    Routed experts are a loop that is not cut: the gradients of their weights wait
    whole, in fp32. Programs that run operation by operation keep all until W instead.
    """
    workload, remat = run.workload, remat or run.layout.remat
    if not run.splits_backward or run.execution.eager:
        return 0.0
    tensor, value = run.layout.tensor, run.dtype_bytes
    if workload.traced:
        cut = workload.traced.cut(remat)
        each = cut.stash_bytes * value / workload.traced.residual_dtype_bytes
        return run.tokens * each / tensor
    recomputed = remat in ("full", "stage_full")
    streams = (5 if recomputed else 7) * workload.hidden * run.residual_share
    if run.layout.sequence_parallel:
        streams += (4 - run.residual_share) * workload.hidden
    split = projections(run) + workload.heads * workload.value_dim
    if workload.qk_norm:
        split += (workload.heads + workload.kv_heads) * workload.query_dim
    experts = 0.0
    if not moe:
        split += (3 if workload.gated else 2) * workload.ffn
    else:
        shared = workload.shared_experts * workload.expert_ffn
        split += (3 if workload.gated else 2) * shared
        streams += _FP32_BYTES / value * workload.experts
        routed = workload.expert_parameters(moe=True)
        experts = _FP32_BYTES * routed / run.layout.expert / tensor
    return run.tokens * value * (streams + split / tensor) + experts


def room_rows(run: Run) -> int:
    """Return the rows that a device has room for in the first round of its experts."""
    devices, top_k = run.layout.expert, run.workload.top_k
    own = run.workload.experts // devices
    return devices * first_room(run.tokens, top_k, own, devices)


def tokens_to_hosts(run: Run) -> tuple[int, int]:
    """Return the hosts of devices that share experts, and a device's tokens to each.

    The tokens are 0 if each row goes to its experts' devices by itself.
    """
    devices, top_k, hosts = run.layout.expert, run.workload.top_k, run.expert_hosts
    own = run.workload.experts // devices
    room = room_rows(run) // devices
    is_most = room >= most_room(run.tokens, top_k, own)
    rows = devices // hosts * room
    return hosts, host_room(run.tokens, top_k, hosts, rows, is_most=is_most)


def round_parts(run: Run) -> int:
    """Return the parts in which the first round of experts goes forward."""
    devices = run.layout.expert
    overlaps = run.platform.overlaps_all_to_alls and not run.pairs_ticks
    if devices == 1 or not overlaps:
        return 1
    hosts, tokens = tokens_to_hosts(run)
    own = run.workload.experts // devices
    rows = room_rows(run)
    room = rows // devices
    return first_parts(rows // own, room, num_hosts=hosts if tokens else 0)[0]


@lru_cache(maxsize=1024)
def _kept_residuals(
    remat: str, *, eager: bool, dense: bool, log_sums: bool
) -> frozenset[str]:
    """Return the names of `block_residuals` that a policy keeps on the device.

    Compiled routed experts (not `dense`) are a loop over tiles, of which `dots` keeps
    no matmul; an MLP's names are then those of shared experts. `log_sums` are those
    that attention names as it does its output (`Run.keeps_log_sums`).
    """
    if remat == "none":
        return frozenset(_RESIDUALS)
    if remat == "selective":
        without = {"scores"} if eager else {"scores", "masks"}
        if not (eager or log_sums):
            without.add("log_sums")
        return frozenset(_RESIDUALS).difference(
            without, ("gate_outputs", "gate_inputs")
        )
    if remat == "full":
        return frozenset(("x",))
    if remat == "dots":
        matmuls = OF_MATMULS if dense else ("attention_qkv", "attention_out")
        return frozenset(("x", "latent_heads", "gate_outputs", *matmuls))
    names = named_residuals(remat)
    assert names is not None  # It is no word of `REMATS`.
    saved = set(names.save)
    if not dense:
        saved = {name for name in saved if not name.startswith("mlp_")}
        saved |= {"mlp_gate_up"} if "experts_gate_up" in saved else set()
    if log_sums and ATTENTION_MIXED in saved:
        saved.add("log_sums")
    entry = () if BLOCK_INPUT in names.offload else ("x",)
    return frozenset((*entry, "latent_heads", *saved))


def stage_input_bytes(run: Run) -> float:
    """Return the bytes of the input of a block, or of a stage."""
    return run.residual_bytes * run.residual_share


def projections(run: Run) -> float:
    """Return the number of values of queries, keys and values of one token."""
    workload = run.workload
    if not workload.kv_lora_rank:
        return (workload.heads + 2 * workload.kv_heads) * workload.head_dim
    # Each head has its own once expanded, and the compressed ones are kept too.
    wide = workload.heads * (2 * workload.query_dim + workload.value_dim)
    narrow = workload.q_lora_rank + workload.kv_lora_rank + workload.qk_rope_head_dim
    return wide + narrow * run.layout.tensor


def active_ffn(run: Run, moe: bool) -> int:
    """Return the hidden size of the MLPs that one token uses, experts together."""
    workload = run.workload
    if not moe:
        return workload.ffn
    return workload.expert_ffn * (workload.top_k + workload.shared_experts)


def gate_up_values(run: Run, moe: bool) -> float:
    """Return the number of values that an MLP's first matmul makes of one token."""
    return active_ffn(run, moe) * (2 if run.workload.gated else 1)


def mlp_values(run: Run, moe: bool) -> float:
    """Return the number of values around an MLP's activation, of one token.

    Its input and output; the gate's own output where not fused.
    """
    hidden = 1.0
    if run.workload.gated and not run.execution.fused_activation:
        hidden = 2.0
    return gate_up_values(run, moe) + hidden * active_ffn(run, moe)


OF_MATMULS = ("attention_qkv", "attention_out", "mlp_up", "mlp_gate_up")
"""The named residuals that a matmul with weights makes."""

_FP32_BYTES = 4
_MASK_BYTES = 1

NAMED = (
    "attention_normed",
    "attention_qkv",
    ATTENTION_MIXED,
    "attention_out",
    "mlp_normed",
    "mlp_gate_up",
    "mlp_up",
    "mlp_hidden",
)
"""Residuals that blocks name with `Scope.save`; gated blocks have no `mlp_up`, others
no `mlp_gate_up`."""

_RESIDUALS = (
    *("x", *NAMED, "scores", "log_sums", "masks", "gathered"),
    *("latent_heads", "gate_outputs", "gate_inputs"),
)
"""Names of `block_residuals`; those that are not in `NAMED` are never saved by name."""

OF_EXPERTS = ("experts_in", "experts_gate_up")
"""Residuals of routed experts: rows that a device received, and their first matmul.

They are made in a loop over tiles, none of whose matmuls `dots` keeps.
"""
