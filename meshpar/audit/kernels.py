"""Convolutions and matmuls of a trace as the planner counts them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshpar.audit.halos import CONVOLUTION, reach_of
from meshpar.audit.jaxprs import array_dtype, array_shape
from meshpar.audit.traced import Operation
from meshpar.planner.workload.volume import SPACE, Kernel

MATMUL = "dot_general"


def kernels_of(operations: Iterable[Operation]) -> tuple[Kernel, ...]:
    """Every convolution and matmul: its FLOPs, its bytes, and what halos it reads.

    Args:
        operations: Of a traced step (`traced.operations`).
    """
    return tuple(
        _kernel(operation)
        for operation in operations
        if operation.name in (CONVOLUTION, MATMUL)
    )


def _kernel(operation: Operation) -> Kernel:
    equation = operation.equation
    left, right = (array_shape(one) for one in equation.invars[:2])
    result = array_shape(equation.outvars[0])
    num_bytes = sum(
        math.prod(array_shape(one)) * array_dtype(one).itemsize
        for one in (*equation.invars[:2], equation.outvars[0])
    )
    if operation.name == MATMUL:
        (contracted, _), _ = equation.params["dimension_numbers"]
        each = math.prod(left[dim] for dim in contracted)
        return Kernel(flops=2.0 * math.prod(result) * each, num_bytes=num_bytes)
    numbers, params = equation.params["dimension_numbers"], equation.params
    window = [right[dim] for dim in numbers.rhs_spec[1:]]
    # Zeros between places are no work.
    each = math.prod(window) / math.prod(params["lhs_dilation"])
    space = [left[dim] for dim in numbers.lhs_spec[2:]]
    first, second, third = space if len(space) == len(SPACE) else (1, 1, 1)
    reach = reach_of(equation) if len(space) == len(SPACE) else (0, 0, 0)
    return Kernel(
        flops=2.0 * math.prod(result) * each,
        num_bytes=num_bytes,
        sizes=(first, second, third),
        reach=(reach[0], reach[1], reach[2]),
        place_bytes=math.prod(left)
        // math.prod(space)
        * array_dtype(equation.invars[0]).itemsize,
    )
