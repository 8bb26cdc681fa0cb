"""Time of a matmul on a device: its arithmetic, and the traffic of its operands."""

from __future__ import annotations

import math

from meshpar.hardware.device import Device


def matmul_s(device: Device, dtype: str, flops: float, num_bytes: float) -> float:
    """Time of matmuls of so many FLOPs that read and write so many bytes.

        time = hypot(flops / (peak * matmul), bytes / (memory bandwidth * memory))

    Traffic hides behind arithmetic as far as there is less of it. So the achieved
    fraction saturates with the arithmetic intensity `I` of the shape:
    `matmul / sqrt(1 + (I0 / I)^2)`, with `I0` the FLOPs per byte that the device
    achieves.

    Args:
        device: With what it achieves of its peaks (`Efficiency`).
        dtype: A key of its `peak_flops`.
        flops: Two for each multiply and add.
        num_bytes: Of the operands and the result.
    """
    arithmetic_s = flops / (device.peak_flops[dtype] * device.efficiency.matmul)
    return math.hypot(arithmetic_s, memory_s(device, num_bytes))


def memory_s(device: Device, num_bytes: float) -> float:
    """Time to read or write so many bytes of a device's memory."""
    return num_bytes / (device.memory_bytes_per_s * device.efficiency.memory)
