"""Convolutions and matmuls of a trace as the planner counts them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from meshpar.audit.needs import CONVOLUTION, MATMUL, window_reach
from meshpar.planner.workload.volumes import SPACE, Kernel
from meshpar.trace.costs import equation_flops
from meshpar.trace.operations import Operation
from meshpar.trace.walk import array_dtype, array_shape


def traced_kernels(operations: Iterable[Operation]) -> tuple[Kernel, ...]:
    """Every convolution and matmul: its FLOPs, its bytes, and what halos it reads.

    One in a scan is there once for each time that it runs.

    Args:
        operations: Of a traced step (`traced.operations`).
    """
    return tuple(
        kernel
        for operation in operations
        if operation.name in (CONVOLUTION, MATMUL)
        for kernel in (_kernel(operation),) * operation.times
    )


def _kernel(operation: Operation) -> Kernel:
    equation = operation.equation
    left = array_shape(equation.invars[0])
    num_bytes = sum(
        math.prod(array_shape(one)) * array_dtype(one).itemsize
        for one in (*equation.invars[:2], equation.outvars[0])
    )
    flops = equation_flops(equation)
    if operation.name == MATMUL:
        return Kernel(flops=flops, num_bytes=num_bytes)
    numbers = equation.params["dimension_numbers"]
    space = [left[dim] for dim in numbers.lhs_spec[2:]]
    if len(space) != len(SPACE):  # of no volume, so that no halo is sent
        return Kernel(flops=flops, num_bytes=num_bytes)
    reach = window_reach(equation)
    return Kernel(
        flops=flops,
        num_bytes=num_bytes,
        sizes=(space[0], space[1], space[2]),
        reach=(reach[0], reach[1], reach[2]),
        window=_window(equation),
        place_bytes=math.prod(left)
        // math.prod(space)
        * array_dtype(equation.invars[0]).itemsize,
    )


def _window(equation: Any) -> tuple[int, int, int]:
    """Places that a step's check of parts counts: of what reads between places, one.

    Of a kernel's gradient, the result is as large as the window.
    """
    numbers, params = equation.params["dimension_numbers"], equation.params
    if max(params["lhs_dilation"]) > 1:
        return 1, 1, 1
    right, result = array_shape(equation.invars[1]), array_shape(equation.outvars[0])
    first, second, third = (
        min(right[one], result[other])
        for one, other in zip(numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    )
    return first, second, third
