"""Time of single kernels: matmuls, attention, elementwise work."""

from __future__ import annotations

from meshpar.planner.run import Run


def matmul_s(
    run: Run, rows: float, inner: float, columns: float, *, count: float = 1
) -> float:
    """Time of `count` matmuls (rows, inner) x (inner, columns).

        time = 2 rows inner columns / (peak * matmul) + operand bytes / memory

    so that the achieved fraction saturates with the arithmetic intensity `I`:
    `matmul / (1 + I0 / I)`, with `I0` the device's FLOPs per byte.
    """
    device = run.cluster.device
    flops = 2 * rows * inner * columns
    values = rows * inner + inner * columns + rows * columns
    return count * (
        flops / (run.peak_flops * device.efficiency.matmul)
        + memory_s(run, values * run.dtype_bytes)
    )


def memory_s(run: Run, num_bytes: float) -> float:
    """Time to read or write so many bytes of memory."""
    device = run.cluster.device
    return num_bytes / (device.memory_bytes_per_s * device.efficiency.memory)


def fused_attention_s(run: Run, flops: float, head_dim: float) -> float:
    """Time of a fused attention kernel.

    Softmax costs as much as matmuls of `attention_head_dim`, whatever the head's size:

        fraction = attention * head_dim / (head_dim + attention_head_dim)
    """
    achieved = run.cluster.device.efficiency
    fraction = achieved.attention * head_dim / (head_dim + achieved.attention_head_dim)
    return flops / (run.peak_flops * fraction)
