"""Time of single kernels: matmuls, attention, elementwise work."""

from __future__ import annotations

from meshpar.hardware import device as matmul_time
from meshpar.hardware.attention_kernels import (
    MATMULS_OF_BACKWARD,
    Kernel,
    backward_in_forwards,
)
from meshpar.planner.cost.run import Run

HOST_SHARE = 0.4
"""Fraction of the host link's data sheet that each of many copying devices achieves.

A copy alone reaches about 0.8 of PCIe (25 of 32 GB/s: NVIDIA's bandwidthTest on an
A100), and two devices share a switch's link to their processor in a DGX A100. An
assumption of ours, not measured.
"""


def matmul_s(
    run: Run,
    rows: float,
    inner: float,
    columns: float,
    *,
    count: float = 1,
    sum_bytes: float = 0,
) -> float:
    """Return the seconds of `count` matmuls (rows, inner) x (inner, columns).

    Args:
        run: Gives device and precision.
        rows: Rows of the first operand.
        inner: Columns of the first operand, rows of the second.
        columns: Columns of the second operand.
        count: Number of matmuls.
        sum_bytes: Bytes of each value of a sum that the matmul adds its result to, and
            reads and writes instead of a result.
    """
    flops = 2 * rows * inner * columns
    num_bytes = (rows * inner + inner * columns) * run.dtype_bytes
    num_bytes += rows * columns * (2 * sum_bytes or run.dtype_bytes)
    return count * matmul_time.matmul_s(
        run.cluster.device, run.layout.precision, flops, num_bytes
    )


def memory_s(run: Run, num_bytes: float) -> float:
    """Return the seconds to read or write so many bytes of memory."""
    return matmul_time.memory_s(run.cluster.device, num_bytes)


def host_s(run: Run, num_bytes: float) -> float:
    """Return the seconds to move bytes to the host's memory, at `HOST_SHARE`."""
    return num_bytes / (HOST_SHARE * run.cluster.device.host_bytes_per_s)


def fused_attention_s(run: Run, flops: float, head_dim: float) -> float:
    """Return the seconds of the forward of the execution's fused attention kernel.

    Softmax costs as much as matmuls of the kernel's own `head_dim`, whatever the
    head's size (`meshpar.hardware.attention_kernels`).
    """
    device, name = run.cluster.device, run.attention.kernel
    achieved = device.efficiency
    measured = Kernel(achieved.attention, achieved.attention_head_dim)
    kernel = device.attention_kernels.get(name, measured)
    fraction = kernel.whole * head_dim / (head_dim + kernel.head_dim)
    return flops / (run.peak_flops * fraction)


_FP32_BYTES = 4


def attention_forward_s(run: Run) -> float:
    """Return the seconds of attention of one microbatch: scores to mixed values."""
    if run.fused_attention:
        return _fused_s(run)
    scores_s = memory_s(run, _scores(run) * _forward_score_bytes(run))
    return _computed_share(run) * (_matmuls_s(run) + scores_s)


def attention_backward_s(run: Run) -> float:
    """Return the seconds of the gradients of queries, keys and values."""
    if run.fused_attention:
        return _fused_s(run) * backward_in_forwards(run.attention.kernel)
    scores_s = memory_s(run, _scores(run) * _backward_score_bytes(run))
    if run.tiled_attention:  # the scores are made again
        return _computed_share(run) * (MATMULS_OF_BACKWARD * _matmuls_s(run) + scores_s)
    return 2 * _matmuls_s(run) + scores_s


def _computed_share(run: Run) -> float:
    """Fraction of all scores that is computed: tiles skip what a causal mask hides."""
    return 0.5 if run.tiled_attention and run.workload.causal else 1.0


def _forward_score_bytes(run: Run) -> float:
    """Bytes that the forward reads and writes for each stored score."""
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
    """FLOPs of one forward on one device, masked scores included."""
    whole = run.tokens * run.workload.attention_flops(run.seq)
    return whole / run.layout.tensor


def _scores(run: Run) -> float:
    return run.tokens * run.seq * run.workload.heads / run.layout.tensor


def _matmuls_s(run: Run) -> float:
    return _flops(run) / (run.peak_flops * run.cluster.device.efficiency.matmul)


def _fused_s(run: Run) -> float:
    """Seconds of the fused kernel, which skips the half that a causal mask hides."""
    hidden = 2 if run.workload.causal else 1
    head_dim = (run.workload.query_dim + run.workload.value_dim) / 2
    return fused_attention_s(run, _flops(run) / hidden, head_dim)
