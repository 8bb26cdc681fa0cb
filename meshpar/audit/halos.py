"""Halos: the places next to a device's part of space that a convolution reads.

A convolution over a split dim needs, of the device next to it, as many places as its
window reaches over the edge; its gradients need as many. What a permute delivers for a
convolution is held against that width: its bytes are the width times the other dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from meshpar.audit.collectives import Collective
from meshpar.audit.constraints import local_shape, sizes_of
from meshpar.audit.evidence import Evidence
from meshpar.audit.jaxprs import array_shape
from meshpar.audit.traced import Operation

CONVOLUTION = "conv_general_dilated"


def halo_of(row: Collective, evidence: Evidence) -> str | None:
    """The reason of a permute that delivers halos; None of anything else."""
    if row.kind != "collective-permute" or row.operation != CONVOLUTION:
        return None
    convolutions = evidence.served_by(row)
    for dims in row.dims:
        if not any(_fits(dims, one, evidence) for one in convolutions):
            return None
    reach = max((max(_reach(one.equation)) for one in convolutions), default=0)
    return f"halo of a convolution, {reach} places wide at most"


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
    numbers, reach = equation.params["dimension_numbers"], _reach(equation)
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


def _reach(equation: Any) -> tuple[int, ...]:
    """Places over the edge of a part that a convolution reads, along each dim.

    Of the gradient of a kernel, the window is as large as space itself, and the result
    as a kernel: its reach is that of the result.
    """
    numbers, params = equation.params["dimension_numbers"], equation.params
    window = [array_shape(equation.invars[1])[dim] for dim in numbers.rhs_spec[2:]]
    result = [array_shape(equation.outvars[0])[dim] for dim in numbers.out_spec[2:]]
    return tuple(
        (width - 1) * dilation if width <= size else (size - 1) * stride
        for width, size, dilation, stride in zip(
            window,
            result,
            params["rhs_dilation"],
            params["window_strides"],
            strict=True,
        )
    )
