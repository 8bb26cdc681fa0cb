"""Time of attention: scores, softmax, mixed values; what `context` sends left out."""

from __future__ import annotations

from meshpar.hardware.attention_kernels import (
    MATMULS_OF_BACKWARD,
    backward_in_forwards,
)
from meshpar.planner.cost.kernel_time import fused_attention_s, memory_s
from meshpar.planner.cost.run import Run

_FP32_BYTES = 4


def attention_forward_s(run: Run) -> float:
    """Scores to mixed values of one microbatch."""
    if run.fused_attention:
        return _fused_s(run)
    scores_s = memory_s(run, _scores(run) * _forward_score_bytes(run))
    return _made(run) * (_matmuls_s(run) + scores_s)


def attention_backward_s(run: Run) -> float:
    """Gradients of queries, keys and values."""
    if run.fused_attention:
        return _fused_s(run) * backward_in_forwards(run.attention.kernel)
    scores_s = memory_s(run, _scores(run) * _backward_score_bytes(run))
    if run.tiled_attention:  # the scores are made again
        return _made(run) * (MATMULS_OF_BACKWARD * _matmuls_s(run) + scores_s)
    return 2 * _matmuls_s(run) + scores_s


def _made(run: Run) -> float:
    """The share of all scores that is made: tiles leave out those that a causal mask
    hides."""
    return 0.5 if run.tiled_attention and run.workload.causal else 1.0


def _forward_score_bytes(run: Run) -> float:
    """Of each stored score, all that the forward reads and writes of it."""
    if not run.execution.eager:
        # `causal_attention`: in fp32 written, read for the maximum, the sum and the
        # quotient; that in the compute dtype written, and read.
        return 4 * _FP32_BYTES + 2 * run.dtype_bytes
    masked = 1 if run.execution.dropout else 0
    # Written, read and written by the softmax, read; and by dropout, with its mask.
    return (4 + 2 * masked) * run.dtype_bytes + masked


def _backward_score_bytes(run: Run) -> float:
    if not run.execution.eager:
        # The softmax's gradient in fp32 written, read for its mean and to be combined;
        # the softmax read by both and by a matmul; the scores' gradient written, and
        # read by two.
        return 3 * _FP32_BYTES + 6 * run.dtype_bytes
    masked = 1 if run.execution.dropout else 0
    # Read by three matmuls, written by one, three times by the softmax's derivative,
    # twice by dropout's, with its mask.
    return (7 + 2 * masked) * run.dtype_bytes + masked


def _flops(run: Run) -> float:
    """Of one forward of this device, masked scores included."""
    whole = run.tokens * run.workload.attention_flops(run.seq)
    return whole / run.layout.tensor


def _scores(run: Run) -> float:
    return run.tokens * run.seq * run.workload.heads / run.layout.tensor


def _matmuls_s(run: Run) -> float:
    return _flops(run) / (run.peak_flops * run.cluster.device.efficiency.matmul)


def _fused_s(run: Run) -> float:
    """A causal mask hides half of the scores, which the kernel skips."""
    hidden = 2 if run.workload.causal else 1
    head_dim = (run.workload.query_dim + run.workload.value_dim) / 2
    return fused_attention_s(run, _flops(run) / hidden, head_dim)
