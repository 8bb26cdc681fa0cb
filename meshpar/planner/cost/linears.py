"""The matmuls with weights of a block, by their sizes on one device."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.planner.cost.run import Run


@dataclass(frozen=True)
class Linears:
    """One half of a block: the matmuls into and out of it, on one device."""

    columns: tuple[tuple[float, float, float, float], ...]
    """(rows, inner, columns, count) of those that read the residual stream."""
    rows: tuple[tuple[float, float, float, float], ...]
    """Of those that write it."""


def attention_linears(run: Run) -> Linears:
    """Of attention: queries, keys and values in, the output out."""
    workload, tensor, tokens = run.workload, run.layout.tensor, run.tokens
    heads, hidden = workload.heads / tensor, workload.hidden
    out = ((tokens, heads * workload.value_dim, hidden, 1.0),)
    if not workload.kv_lora_rank:
        kv_heads = max(1.0, workload.kv_heads / tensor)
        wide = (heads + 2 * kv_heads) * workload.head_dim
        return Linears(((tokens, hidden, wide, 1.0),), out)
    down = workload.q_lora_rank + workload.kv_lora_rank + workload.qk_rope_head_dim
    query_inner = workload.q_lora_rank or hidden
    expanded = heads * (workload.qk_nope_head_dim + workload.v_head_dim)
    columns = (
        (tokens, hidden, down, 1.0),
        (tokens, query_inner, heads * workload.query_dim, 1.0),
        (tokens, workload.kv_lora_rank, expanded, 1.0),
    )
    return Linears(columns, out)


def mlp_linears(run: Run, moe: bool) -> Linears:
    """Of the MLP, or of the experts that a device has, and their router."""
    workload, tensor, tokens = run.workload, run.layout.tensor, run.tokens
    hidden, wide = workload.hidden, 2 if workload.gated else 1
    if workload.traced:
        return _traced_linears(run)
    if not moe:
        ffn = workload.ffn / tensor
        return Linears(
            ((tokens, hidden, wide * ffn, 1.0),), ((tokens, ffn, hidden, 1.0),)
        )
    ffn, experts = workload.expert_ffn / tensor, workload.experts / run.layout.expert
    # Every expert takes its tokens from all devices of `expert`, evenly.
    rows = tokens * run.layout.expert * workload.top_k / workload.experts
    columns = [(rows, hidden, wide * ffn, experts)]
    out = [(rows, ffn, hidden, experts)]
    if workload.shared_experts:
        shared = workload.shared_experts * ffn
        columns.append((tokens, hidden, wide * shared, 1.0))
        out.append((tokens, shared, hidden, 1.0))
    columns.append((tokens, hidden, float(workload.experts), 1.0))
    return Linears(tuple(columns), tuple(out))


def _traced_linears(run: Run) -> Linears:
    """What a traced block multiplies besides the attention of its sizes.

    As one matmul in and one out, of as many FLOPs.
    """
    workload = run.workload
    rest = (
        workload.active_block_parameters(moe=False)
        - workload.attention_matrix_parameters
    )
    columns = max(0.0, rest) / 2 / workload.hidden / run.layout.tensor
    return Linears(
        ((run.tokens, workload.hidden, columns, 1.0),),
        ((run.tokens, columns, workload.hidden, 1.0),),
    )
