"""Halos: the places next to a device's part of space that a convolution reads.

A convolution over a split dim needs, of the device next to it, as many places as its
window reaches over the edge; its gradients need as many. What a permute delivers for a
convolution is held against that width: its bytes are the width times the other dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from meshpar.audit.collectives import Collective
from meshpar.audit.constraints import local_shape, sizes_of
from meshpar.audit.evidence import Evidence
from meshpar.audit.jaxprs import array_dtype, array_shape
from meshpar.audit.traced import Operation
from meshpar.planner.workload.space import Exchange

CONVOLUTION = "conv_general_dilated"


def halo_of(row: Collective, evidence: Evidence) -> str | None:
    """The reason of a permute that delivers halos; None of anything else."""
    if row.kind != "collective-permute" or row.operation != CONVOLUTION:
        return None
    convolutions = evidence.served_by(row)
    for dims in row.dims:
        if not any(_fits(dims, one, evidence) for one in convolutions):
            return None
    reach = max((max(reach_of(one.equation)) for one in convolutions), default=0)
    return f"halo of a convolution, {reach} places wide at most"


def exchanges(
    operations: Iterable[Operation], mesh_shape: dict[str, int]
) -> tuple[Exchange, ...]:
    """The halos of every convolution of a trace, forward and backward.

    Of one in a scan, once for each time that it runs.

    Args:
        operations: Of a traced step (`traced.operations`).
        mesh_shape: Size of each mesh axis.
    """
    return tuple(
        exchange
        for operation in operations
        if operation.name == CONVOLUTION and operation.operands[0].split
        for exchange in (_exchange(operation, mesh_shape),) * operation.times
    )


def _exchange(convolution: Operation, mesh_shape: dict[str, int]) -> Exchange:
    """Of the left operand: dims one after another, the second with the first's halo."""
    equation, split = convolution.equation, convolution.operands[0].split or ()
    shape, spec = array_shape(equation.invars[0]), equation.params["dimension_numbers"]
    here = list(local_shape(shape, split, mesh_shape))
    value_bytes = array_dtype(equation.invars[0]).itemsize
    sent = 0
    for dim, places in zip(spec.lhs_spec[2:], reach_of(equation), strict=True):
        if split[dim] and places:
            sent += places * math.prod(here) // here[dim] * value_bytes
            here[dim] += places
    return Exchange(sent_bytes=sent)


def _fits(dims: tuple[int, ...], convolution: Operation, evidence: Evidence) -> bool:
    """Whether an array of those dims is a halo of an operand."""
    sizes = sizes_of(dims)
    return any(
        sizes == sizes_of(halo) for halo in _halos(convolution, evidence.mesh_shape)
    )


def _halos(
    convolution: Operation, mesh_shape: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Local shapes that halos of an operand may have.

    Dims are exchanged one after another, so that one along another dim may bring along
    the halos that are there.
    """
    equation = convolution.equation
    numbers, reach = equation.params["dimension_numbers"], reach_of(equation)
    for side, spec in ((0, numbers.lhs_spec), (1, numbers.rhs_spec)):
        split = convolution.operands[side].split
        shape = array_shape(equation.invars[side])
        if split is None:
            continue
        here = local_shape(shape, split, mesh_shape)
        widths = dict(zip(spec[2:], reach, strict=True))
        for along in (dim for dim in widths if split[dim]):
            sizes = [
                range(1, widths[dim] + 1)
                if dim == along
                else range(size, size + (widths[dim] if split[dim] else 0) + 1)
                if dim in widths
                else (size,)
                for dim, size in enumerate(here)
            ]
            yield from itertools.product(*sizes)


def reach_of(equation: Any) -> tuple[int, ...]:
    """Places over the edge of a part that a convolution reads, along each dim.

    Windows side by side read none. Of the gradient of a kernel, the window is as large
    as space itself, and the result as a kernel: its reach is that of the result.
    """
    numbers, params = equation.params["dimension_numbers"], equation.params
    window = [array_shape(equation.invars[1])[dim] for dim in numbers.rhs_spec[2:]]
    result = [array_shape(equation.outvars[0])[dim] for dim in numbers.out_spec[2:]]
    places = [
        ((width - 1) * dilation - (stride - 1)) // spread
        if width <= size
        else (size - 1) * stride - (dilation - 1)
        for width, size, dilation, stride, spread in zip(
            window,
            result,
            params["rhs_dilation"],
            params["window_strides"],
            params["lhs_dilation"],
            strict=True,
        )
    ]
    return tuple(max(0, one) for one in places)
