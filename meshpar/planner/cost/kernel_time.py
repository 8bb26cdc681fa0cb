"""Time of single kernels: matmuls, attention, elementwise work."""

from __future__ import annotations

from meshpar.hardware import device as matmul_time
from meshpar.hardware.attention_kernels import Kernel
from meshpar.planner.cost.run import Run

HOST_SHARE = 0.4
"""Of the host link's data sheet, what a device achieves while its neighbours copy too.

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
    """Time of `count` matmuls (rows, inner) x (inner, columns).

    Args:
        run: Its device and precision.
        rows: Of the first operand.
        inner: Its columns, the other's rows.
        columns: Of the other.
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
    """Time to move so many bytes to the host's memory or back, at `HOST_SHARE`."""
    return num_bytes / (HOST_SHARE * run.cluster.device.host_bytes_per_s)


def fused_attention_s(run: Run, flops: float, head_dim: float) -> float:
    """Time of the forward of the execution's fused attention kernel.

    Softmax costs as much as matmuls of the kernel's own `head_dim`, whatever the
    head's size (`meshpar.hardware.attention_kernels`).
    """
    device, name = run.cluster.device, run.attention.kernel
    achieved = device.efficiency
    measured = Kernel(achieved.attention, achieved.attention_head_dim)
    kernel = device.attention_kernels.get(name, measured)
    fraction = kernel.whole * head_dim / (head_dim + kernel.head_dim)
    return flops / (run.peak_flops * fraction)
