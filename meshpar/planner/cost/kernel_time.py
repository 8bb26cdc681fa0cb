"""Time of single kernels: matmuls, attention, elementwise work."""

from __future__ import annotations

from meshpar.hardware import matmul_time
from meshpar.planner.cost.run import Run


def matmul_s(
    run: Run,
    rows: float,
    inner: float,
    columns: float,
    *,
    count: float = 1,
    sum_bytes: float = 0,
) -> float:
    """Time of `count` matmuls (rows, inner) x (inner, columns).

    Args:
        run: Its device and precision.
        rows, inner, columns: Of each matmul.
        count: Of them.
        sum_bytes: Of each value of a sum that the matmul adds its result to, which it
            reads and writes instead of a result.
    """
    flops = 2 * rows * inner * columns
    num_bytes = (rows * inner + inner * columns) * run.dtype_bytes
    num_bytes += rows * columns * (2 * sum_bytes or run.dtype_bytes)
    return count * matmul_time.matmul_s(
        run.cluster.device, run.layout.precision, flops, num_bytes
    )


def memory_s(run: Run, num_bytes: float) -> float:
    """Time to read or write so many bytes of memory."""
    return matmul_time.memory_s(run.cluster.device, num_bytes)


def host_s(run: Run, num_bytes: float) -> float:
    """Time to move so many bytes to the host's memory, or from there."""
    return num_bytes / run.cluster.device.host_bytes_per_s


def fused_attention_s(run: Run, flops: float, head_dim: float) -> float:
    """Time of a fused attention kernel.

    Softmax costs as much as matmuls of `attention_head_dim`, whatever the head's size:

        fraction = attention * head_dim / (head_dim + attention_head_dim)
    """
    achieved = run.cluster.device.efficiency
    fraction = achieved.attention * head_dim / (head_dim + achieved.attention_head_dim)
    return flops / (run.peak_flops * fraction)
