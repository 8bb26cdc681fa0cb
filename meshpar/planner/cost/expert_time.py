"""Matmuls, kernels and elementwise traffic of a block's routed experts."""

from __future__ import annotations

import math

from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import Cost, matmul_s

# Kernels that routing adds to a forward, as NVIDIA counts them in Megatron-Core with a
# fused router ("Optimizing DeepSeek-V3 Training Performance on NVIDIA GB200 NVL72",
# 2025, section 2.1.4); those behind it that no CUDA graph takes, as the number of rows
# changes: rows in order by device and by expert, and back, 4; matmuls, activation, sum.
_ROUTING_KERNELS, _UNGRAPHED_KERNELS = 31, 8

# Bytes for each value of an expert's output that adding its bias moves, where each
# expert's rows are a tensor of their own and the router's weights in fp32. Forward: the
# weighted bias written (4), added to the rows (2, 4, 4), sums put together (4, 4) and
# cast (4, 2). Backward: cast (2, 4), cut (4, 4), cast for the rows (4, 2), times the
# weights and summed (4, 4, 4), times the bias (4). Counted in Megatron-Core's grouped
# experts (`TEGroupedMLP._apply_bias`, 2026).
_EXPERT_BIAS_BYTES = (28, 36)

# Bytes for each value of rows that are padded for fp8, and cut again (read, write):
# inputs and outputs of experts, gradients the same way.
_PADDING_BYTES = 2 * 4

# Kernels of one block: matmuls, attention's, norms, elementwise; in the backward twice
# the matmuls, and additions. Counted in Megatron-LM's layer.
FORWARD_KERNELS, BACKWARD_KERNELS = 24, 48

# Rows of a tile of a matmul: half of each expert's last one is empty on average.
_TILE_ROWS = 128


def expert_axes(run: Run) -> tuple[str, ...]:
    """Return the mesh axes whose devices have other experts each."""
    together = run.layout.expert * run.layout.tensor
    divides = run.workload.experts % together == 0
    if run.execution.whole_experts and divides:
        return "expert", "tensor"
    return ("expert",)


def expert_devices(run: Run) -> int:
    """Return the number of devices that have other experts each."""
    return math.prod(getattr(run.layout, axis) for axis in expert_axes(run))


Matmuls = tuple[tuple[float, float, float, float], ...]
"""(rows, inner, columns, count) of each."""


def routed_linears(run: Run) -> tuple[Matmuls, Matmuls]:
    """Return the matmuls of a device's experts, in and out, as `Linears` has them.

    Every expert takes its tokens from all devices that share the experts, evenly, or
    its whole capacity. Where each has matmuls of its own, the last tile of rows is half
    empty.
    """
    workload, devices = run.workload, expert_devices(run)
    sharing = run.layout.expert * run.layout.tensor / devices
    ffn, wide = workload.expert_ffn / sharing, 2 if workload.gated else 1
    rows = run.tokens * run.layout.expert * workload.top_k / workload.experts
    rows *= run.execution.expert_capacity
    count = workload.experts / devices
    rows += _TILE_ROWS / 2 if run.execution.eager and count > 1 else 0
    return (
        ((rows, workload.hidden, wide * ffn, count),),
        ((rows, ffn, workload.hidden, count),),
    )


def biased_grad(run: Run, moe: bool) -> Cost:
    """Cost above other matmuls' of experts' weight gradients that sum a bias's too."""
    workload, rate = run.workload, run.execution.biased_grad_flops
    if not (moe and workload.biases and rate):
        return Cost()
    routed = [
        (rows, inner, columns, count)
        for half in routed_linears(run)
        for rows, inner, columns, count in half
    ]
    flops = sum(
        2 * rows * inner * columns * count for rows, inner, columns, count in routed
    )
    usual_s = sum(
        matmul_s(run, inner, rows, columns, count=count)
        for rows, inner, columns, count in routed
    )
    return Cost(max(0.0, flops / rate - usual_s))


def routed_kernels(run: Run, moe: bool) -> int:
    """Number of kernels that experts add to an eager forward: two matmuls of each.

    Transformer Engine's grouped matmuls are a kernel an expert. A compiled program's
    loop over tiles is not counted.
    """
    if not (moe and run.execution.eager):
        return 0
    return _ROUTING_KERNELS + 2 * (run.workload.experts // expert_devices(run) - 1)


def host_work_s(run: Run, moe: bool, again: int) -> float:
    """Return the host's seconds to launch a block's forward and backward.

    Matmuls of experts are launched from one call each way, without Python. What CUDA
    graphs hold takes none; they hold all but what routing gives a changing size.

    Args:
        run: The run.
        moe: Whether the block has routed experts.
        again: Kernels that the backward recomputes.
    """
    execution = run.execution
    forward, backward = FORWARD_KERNELS, BACKWARD_KERNELS + again
    forward += _ROUTING_KERNELS if moe else 0
    backward += 2 * _ROUTING_KERNELS if moe else 0
    if execution.graphs:
        forward = _UNGRAPHED_KERNELS if moe else 0
        backward = 2 * forward
    experts = run.workload.experts / expert_devices(run) if moe else 0
    return (forward + backward) * execution.kernel_host_s + (
        6 * experts * execution.launch_s
    )


def routed_bytes(run: Run, moe: bool) -> float:
    """Bytes to put one token in the order of experts, and back (read, write).

    Twice where devices share the experts: by device, and received rows by expert; the
    first is part of sending where a token goes once to a host. Devices of `tensor` that
    have whole experts each do so with their part of the tokens.
    """
    if not moe:
        return 0.0
    devices = expert_devices(run)
    orders = 2 if devices > 1 and not run.execution.sends_once else 1
    values = run.workload.top_k * run.workload.hidden * run.layout.expert / devices
    padded = _PADDING_BYTES * values if run.layout.scales_matmuls else 0
    return 4 * orders * values * run.dtype_bytes + padded


def bias_bytes(run: Run, moe: bool, backward: int) -> float:
    """Bytes to add the biases of one token's experts, or of the backward."""
    if not (moe and run.workload.biases and run.execution.adds_biases_apart):
        return 0.0
    values = run.workload.top_k * run.workload.hidden
    return values * _EXPERT_BIAS_BYTES[backward] / run.layout.tensor
