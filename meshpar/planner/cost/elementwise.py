"""Bytes that the elementwise kernels of one block read and write, on one device.

Norms, residual additions, positions, activations, biases, and rows put in the order of
their experts.
"""

from __future__ import annotations

from typing import NamedTuple

from meshpar.planner.cost.activations import active_ffn
from meshpar.planner.cost.expert_time import bias_bytes, routed_bytes
from meshpar.planner.cost.run import Run


def forward_bytes(run: Run, *, moe: bool) -> float:
    """Return the bytes of a forward of one microbatch."""
    workload, tensor, values = run.workload, run.layout.tensor, run.dtype_bytes
    reference = _reference_bytes(run)
    # Two norms (read, write) and two residual additions (read both, write).
    stream = (2 * 2 + 2 * 3) * workload.hidden * values + reference.norm_forward
    stream += 2 * workload.hidden if run.drops else 0  # masks
    heads = (workload.heads + workload.kv_heads) * workload.query_dim
    # Rotary positions, or heads brought to the front and back.
    inside = 2 * heads * values + reference.heads
    inside += _activation_reads(run, moe) * values
    if workload.biases and run.execution.eager:
        # That of queries, keys and values is a kernel of its own; the others' are part
        # of dropout's and the activation's.
        inside += 2 * (heads + workload.kv_heads * workload.value_dim) * values
    routed = routed_bytes(run, moe) + bias_bytes(run, moe, 0)
    share = run.residual_share
    return run.tokens * (stream * share + inside / tensor + routed)


def backward_bytes(run: Run, *, moe: bool) -> float:
    """Return the bytes of a backward of one microbatch, without recomputation."""
    workload, tensor, values = run.workload, run.layout.tensor, run.dtype_bytes
    reference = _reference_bytes(run)
    # Two norms (read input and gradient, write; read both again for the scale's
    # gradient), two sums of gradients.
    stream = (2 * 5 + 2 * 3) * workload.hidden * values + reference.norm_backward
    if run.drops:
        stream += 2 * (2 * values + 1) * workload.hidden
    heads = (workload.heads + workload.kv_heads) * workload.query_dim
    activation = 5 / 3 * _activation_reads(run, moe)
    inside = 2 * heads * values + reference.heads + activation * values
    if workload.biases:
        # Each bias's gradient sums the output's over all tokens.
        stream += 2 * workload.hidden * values
        inside += (heads + workload.kv_heads * workload.value_dim) * values
        inside += workload.ffn * values
    routed = routed_bytes(run, moe) + bias_bytes(run, moe, 1)
    return run.tokens * (stream * run.residual_share + inside / tensor + routed)


class _Reference(NamedTuple):
    """Bytes of one token that Llama's reference code moves besides fused kernels.

    Args:
        norm_forward, norm_backward: Of a block's two norms.
        heads: Of its rotary positions and repeated keys and values, each way.
    """

    norm_forward: float = 0.0
    norm_backward: float = 0.0
    heads: float = 0.0


# Bytes that one value of a norm's input takes, operation by operation: to fp32 (read 2,
# write 4), squared (4, 4), averaged (4), scaled (4, 4), to 16 bits (4, 2), weighted
# (2, 2). Backward: the weight's (2, 2) and its own gradient (2 and 2, 2; 2), to fp32
# (2, 4), the scale's (4, 4; 4 and 4, 4; 4), the square's (three times 4, 4), their sum
# (4 and 4, 4), to 16 bits (4, 2). One kernel: 4 and 10.
_NORM_FORWARD, _NORM_BACKWARD = 36 - 4, 84 - 10

# Of queries and keys, either way: to fp32 (2, 4), turned (4, 4), to 16 bits (4, 2). One
# kernel: 4.
_TURNED = 20 - 4


def _reference_bytes(run: Run) -> _Reference:
    """Return what the reference code's operations move besides fused ones.

    It repeats shared keys and values for each of their heads, and adds up their
    gradients.
    """
    workload = run.workload
    if run.execution.fused_norms or not workload.gated:
        return _Reference()
    turned = (workload.heads + workload.kv_heads) * workload.query_dim
    repeats = workload.kv_heads < workload.heads
    repeated = 2 * repeats * workload.heads * workload.query_dim * run.dtype_bytes
    return _Reference(
        norm_forward=2 * _NORM_FORWARD * workload.hidden,
        norm_backward=2 * _NORM_BACKWARD * workload.hidden,
        heads=_TURNED * turned + repeated,
    )


def _activation_reads(run: Run, moe: bool) -> float:
    """Values that the activation of the MLP reads and writes for one token."""
    if not run.workload.gated:
        return 2 * active_ffn(run, moe)
    return (3 if run.execution.fused_activation else 5) * active_ffn(run, moe)
