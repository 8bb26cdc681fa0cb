"""Time of single kernels: matmuls, attention, elementwise work."""

from __future__ import annotations

import math

from meshpar.planner.cost.run import Run


def matmul_s(
    run: Run, rows: float, inner: float, columns: float, *, count: float = 1
) -> float:
    """Time of `count` matmuls (rows, inner) x (inner, columns).

        time = hypot(2 rows inner columns / (peak * matmul), operand bytes / memory)

    Traffic hides behind arithmetic as far as there is less of it. So the achieved
    fraction saturates with the arithmetic intensity `I` of the shape:
    `matmul / sqrt(1 + (I0 / I)^2)`, with `I0` the FLOPs per byte that the device
    achieves.
    """
    device = run.cluster.device
    flops = 2 * rows * inner * columns
    values = rows * inner + inner * columns + rows * columns
    arithmetic_s = flops / (run.peak_flops * device.efficiency.matmul)
    return count * math.hypot(arithmetic_s, memory_s(run, values * run.dtype_bytes))


def memory_s(run: Run, num_bytes: float) -> float:
    """Time to read or write so many bytes of memory."""
    device = run.cluster.device
    return num_bytes / (device.memory_bytes_per_s * device.efficiency.memory)


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
