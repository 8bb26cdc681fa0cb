"""Time of attention: scores, softmax, mixed values, and its `context` traffic."""

from __future__ import annotations

from meshpar.planner.cost.context_traffic import context_traffic
from meshpar.planner.cost.cost import Cost, waiting
from meshpar.planner.cost.kernel_time import fused_attention_s, memory_s
from meshpar.planner.cost.run import Run

# The backward's five matmuls over the forward's two (Dao 2023, section 3.1).
_BACKWARD_MATMULS = 2.5
_FP32_BYTES = 4


def attention_forward(run: Run) -> Cost:
    """Scores to mixed values of one microbatch."""
    if run.fused_attention:
        own_s = _fused_s(run)
        return Cost(own_s) + _context_exposed(run, own_s, forward=True)
    own_s = _matmuls_s(run) + memory_s(run, _scores(run) * _forward_score_bytes(run))
    return Cost(own_s) + _context_exposed(run, own_s, forward=True)


def attention_backward(run: Run) -> Cost:
    """Gradients of queries, keys and values."""
    if run.fused_attention:
        own_s = _fused_s(run) * _BACKWARD_MATMULS
        return Cost(own_s) + _context_exposed(run, own_s, forward=False)
    scores_s = memory_s(run, _scores(run) * _backward_score_bytes(run))
    own_s = 2 * _matmuls_s(run) + scores_s
    return Cost(own_s) + _context_exposed(run, own_s, forward=False)


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


def _context_exposed(run: Run, attention_s: float, *, forward: bool) -> Cost:
    """What `context` adds; in a ring one part moves while another is attended to."""
    if run.layout.context == 1:
        return Cost()
    traffic = context_traffic(run)
    passes = 1 if forward else traffic.backward_passes
    hidden_s = attention_s if run.layout.attention == "ring" else 0.0
    return waiting("context", passes * traffic.seconds, hidden_s=hidden_s)


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
    head_dim = (run.workload.query_dim + run.workload.value_dim) / 2
    return fused_attention_s(run, _flops(run) / 2, head_dim)
