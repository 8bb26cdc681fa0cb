"""Work that the backward of one block does again, under each remat policy.

A residual that is kept, or comes back from the host, is not recomputed, nor is what
only it needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshpar.layout.layout import ATTENTION_MIXED, named_residuals
from meshpar.planner.cost.activations import NAMED, OF_EXPERTS, OF_MATMULS
from meshpar.planner.cost.run import Run

# Kernels of one forward of a block (24 in Megatron-LM's layer): four matmuls with
# weights; of attention two matmuls, softmax, dropout and a transposition; the rest.
_ATTENTION_KERNELS, _ELEMENTWISE_KERNELS = 5, 15


class Again(NamedTuple):
    """Times that one backward of a block repeats each part of its forward.

    Args:
        qkv, out, up, down: The matmuls with weights, in order; a fraction of one that
            is several in the execution.
        attention: Scores to mixed values, with the keys that move over `context`.
        trades: Heads for tokens over `context`, and back.
        elementwise: Norms, positions, activation.
        sums: Sums of the residual stream over `tensor`.
        gathers: Gathers of its sequence before a matmul.
        exchanges: Tokens to their experts and back.
        moved_bytes: Bytes of a token that parts of the elementwise work read and write.
    """

    qkv: float = 0
    attention: int = 0
    trades: int = 0
    out: int = 0
    up: float = 0
    down: int = 0
    elementwise: int = 0
    sums: int = 0
    gathers: int = 0
    exchanges: int = 0
    moved_bytes: float = 0.0

    @property
    def kernels(self) -> int:
        """Number of kernels launched for them."""
        matmuls = sum(map(math.ceil, (self.qkv, self.out, self.up, self.down)))
        attention = _ATTENTION_KERNELS * self.attention
        return matmuls + attention + _ELEMENTWISE_KERNELS * self.elementwise


_WHOLE = Again(*(1,) * 6, elementwise=1, sums=2, gathers=2, exchanges=1)


def recomputation(run: Run, *, moe: bool, remat: str = "") -> Again:
    """Return what a remat policy repeats, as counted in compiled programs."""
    remat, eager = remat or run.layout.remat, run.execution.eager
    if remat == "none":
        return _modules(run, moe)
    if remat == "stage":
        # In a loop over the stage's blocks, which reads the output of each.
        return _WHOLE
    if remat == "full":
        return _whole(run) if eager else _named(run, _RECEIVED, moe)
    if remat == "stage_full":
        last = _whole(run) if eager else _named(run, _RECEIVED, moe)
        return Again(*map(sum, zip(_WHOLE, last, strict=True)))  # type: ignore
    if remat == "selective" and eager:
        if run.execution.selects_matmuls:
            return _every_second(run)
        scores = 0 if run.fused_attention else 1
        modules = _modules(run, moe)
        attention = max(scores, modules.attention)
        return modules._replace(attention=attention, trades=attention)
    return _named(run, kept_names(remat), moe)


def _modules(run: Run, moe: bool) -> Again:
    """Recomputation of the parts that the execution names (`Execution.recomputes`)."""
    workload, modules = run.workload, run.execution.modules
    values, up, moved, normed = run.dtype_bytes, 0.0, 0.0, 0.0
    attention = int("core_attn" in modules)
    if "mla_up_proj" in modules and workload.kv_lora_rank:
        query = workload.q_lora_rank * workload.heads * workload.query_dim
        wide = workload.heads * (workload.qk_nope_head_dim + workload.v_head_dim)
        out = workload.heads * workload.v_head_dim * workload.hidden
        expanded = query + workload.kv_lora_rank * wide
        up = expanded / (workload.attention_matrix_parameters - out)
        moved += 2 * 2 * workload.heads * workload.query_dim * values
    if "layernorm" in modules:
        normed = 2 * 2 * workload.hidden * values * run.residual_share
    if "moe_act" in modules and moe:
        moved += 3 * workload.top_k * workload.expert_ffn * values
    return Again(
        qkv=up,
        attention=attention,
        trades=attention,
        up=int("mlp" in modules and not moe),
        moved_bytes=normed + moved / run.layout.tensor,
    )


def _whole(run: Run) -> Again:
    """Recomputation of an eager block, without its last matmul if it stops early."""
    return _WHOLE._replace(down=0) if run.execution.stops_early else _WHOLE


def _every_second(run: Run) -> Again:
    """Recomputation of every second matmul: keys, attention's output, one of a gate."""
    workload = run.workload
    heads, kv_heads = workload.heads, workload.kv_heads
    return Again(
        qkv=kv_heads / (heads + 2 * kv_heads),
        out=1,
        up=0.5 if workload.gated else 0,
        elementwise=1,
        sums=1,
    )


_RECEIVED = OF_EXPERTS[:1]
"""Residuals that compiled programs keep under `full` and `dots` too."""


def kept_names(remat: str) -> tuple[str, ...]:
    """Return the names of the residuals that are kept besides the block's input."""
    names = named_residuals(remat)
    if names is not None:
        return names.every
    if remat == "dots":
        return (*OF_MATMULS, *_RECEIVED)
    return (*NAMED, *OF_EXPERTS) if remat == "selective" else ()


def _named(run: Run, kept: tuple[str, ...], moe: bool) -> Again:
    """Recomputation if the residuals of these names are kept.

    No gradient needs the MLP's output, but a router's and that of a gate on it. The
    sequence is gathered for the weights' gradients anyway, which serves here too: equal
    collectives merge.
    """
    qkv, out = int("attention_qkv" not in kept), int("attention_out" not in kept)
    tiled = moe and not run.execution.eager
    wide = {"experts_gate_up"} if tiled else {"mlp_up", "mlp_gate_up"}
    up = int(not wide & set(kept))
    gated = int(run.workload.modulations > 0)
    # The kernel's queries, keys and values are traded again, and what it left.
    attended = ATTENTION_MIXED in kept and run.keeps_log_sums
    return Again(
        qkv=qkv,
        attention=int(not attended),
        trades=1,
        out=out,
        up=up,
        down=gated or int(moe) * up,
        elementwise=1,
        sums=out + gated,
        exchanges=int("experts_in" not in kept) if tiled else int(moe) * up,
    )
