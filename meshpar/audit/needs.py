"""Collectives that matmuls, table lookups and convolutions over split dims need.

A convolution over a split dim reads halos: as many places of the neighbour's part as
its window reaches over the edge. Its gradients need as many. A permute serves a
convolution if it delivers that width times the other dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshpar.audit.collectives import Collective
from meshpar.audit.evidence import Evidence, local_shape, sorted_sizes
from meshpar.planner.workload.volumes import Exchange
from meshpar.trace.operations import Operation
from meshpar.trace.walk import array_dtype, array_shape

MATMUL = "dot_general"


def gathers_tokens(row: Collective, evidence: Evidence) -> bool:
    """Return True if the tokens of one operand arrive whole that were split before.

    That is so where these mesh axes split the other operand's own dim too, such as a
    weight's output dim: a device then multiplies its part of the weight by all tokens.
    """
    matmuls = evidence.served_by(row)
    return row.operation == MATMUL and any(
        _meets_all_tokens(matmul, side, row, matmuls)
        and evidence.arrives(row, *matmul.given[side])
        for matmul in matmuls
        for side in (0, 1)
    )


def gathers_for_table(row: Collective, evidence: Evidence) -> bool:
    """Return True if what arrives is added to the gradient of a table of weights.

    The rows that its line looks up lie split, and each device adds all of them.
    """
    tables = {
        array_shape(lookup.equation.invars[0])
        for lookup in evidence.named("gather", row.source)
        if lookup.operands[0].weight
    }
    return any(
        array_shape(scatter.equation.outvars[0]) in tables
        and any(evidence.arrives(row, value, atom) for value, atom in scatter.given)
        for scatter in evidence.served_by(row)
    )


def sum_per_operand(
    row: Collective, evidence: Evidence, *, knows_weights: bool
) -> float:
    """Return values of the partial sums over those of both operands, weights aside.

    0 where a weight is multiplied, or its gradient computed: its layout is asked for.
    Where weights are not known, what has no batch dims may be one.
    """
    matmuls, axes = evidence.served_by(row), frozenset(row.mesh_axes or ())
    summed = [
        matmul
        for matmul in matmuls
        if any(
            _may_split(matmul, side, _dims(matmul)[0][side], axes) for side in (0, 1)
        )
    ]
    ratios = []
    for matmul in summed:
        has_weight = (
            any(operand.weight for operand in matmul.operands)
            or _is_gradient(matmul, matmuls)
            or not (knows_weights or _dims(matmul)[1][0])
        )
        read = sum(math.prod(array_shape(atom)) for atom in matmul.equation.invars)
        made = math.prod(array_shape(matmul.equation.outvars[0]))
        ratios.append(0.0 if has_weight else made / max(read, 1))
    return min(ratios, default=0.0)


def _dims(matmul: Operation) -> Any:
    """Return (contracted dims, batch dims), each for the left and right operand."""
    return matmul.equation.params["dimension_numbers"]


def _meets_all_tokens(
    matmul: Operation, side: int, row: Collective, matmuls: Sequence[Operation]
) -> bool:
    axes = frozenset(row.mesh_axes or ())
    contracted, batch = _dims(matmul)
    other = 1 - side

    def free(side: int) -> list[int]:
        num_dims = len(array_shape(matmul.equation.invars[side]))
        taken = (*contracted[side], *batch[side])
        return [dim for dim in range(num_dims) if dim not in taken]

    if matmul.operands[other].weight:
        tokens = free(side)
    elif _is_gradient(matmul, matmuls):
        tokens = list(contracted[side])
    else:
        return False
    known = matmul.operands[side].split or matmul.operands[other].split
    return (
        known is not None
        and _may_split(matmul, side, tokens, axes)
        and _may_split(matmul, other, free(other), axes)
    )


def _may_split(
    matmul: Operation, side: int, dims: Sequence[int], axes: frozenset[str]
) -> bool:
    split = matmul.operands[side].split
    return split is None or axes <= frozenset().union(*(split[dim] for dim in dims))


def _is_gradient(matmul: Operation, matmuls: Sequence[Operation]) -> bool:
    """Return True if its result has the shape of a weight that its line multiplies."""
    shape = sorted_sizes(array_shape(matmul.equation.outvars[0]))
    return any(
        operand.weight and sorted_sizes(array_shape(atom)) == shape
        for other in matmuls
        for operand, atom in other.given
    )


CONVOLUTION = "conv_general_dilated"


def halo_reason(row: Collective, evidence: Evidence) -> str | None:
    """Return the reason of a permute that delivers halos; None of any other."""
    if row.kind != "collective-permute" or row.operation != CONVOLUTION:
        return None
    convolutions = evidence.served_by(row)
    for dims in row.dims:
        halos = (_halos(one, evidence.mesh_shape) for one in convolutions)
        sizes = map(sorted_sizes, itertools.chain.from_iterable(halos))
        if sorted_sizes(dims) not in sizes:
            return None
    reach = max((max(window_reach(one.equation)) for one in convolutions), default=0)
    return f"halo of a convolution, {reach} places wide at most"


def exchanges(
    operations: Iterable[Operation], mesh_shape: dict[str, int]
) -> tuple[Exchange, ...]:
    """Return the halos of every convolution of a trace, forward and backward.

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
    """Return the left operand's halo: dims in sequence, each with the halos before."""
    equation, split = convolution.equation, convolution.operands[0].split or ()
    shape, spec = array_shape(equation.invars[0]), equation.params["dimension_numbers"]
    here = list(local_shape(shape, split, mesh_shape))
    value_bytes = array_dtype(equation.invars[0]).itemsize
    sent = 0
    for dim, places in zip(spec.lhs_spec[2:], window_reach(equation), strict=True):
        if split[dim] and places:
            sent += places * math.prod(here) // here[dim] * value_bytes
            here[dim] += places
    return Exchange(sent_bytes=sent)


def _halos(
    convolution: Operation, mesh_shape: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Yield the local shapes that halos of an operand may have.

    Dims are exchanged one after another, so that one along another dim may bring along
    the halos that are there.
    """
    equation = convolution.equation
    numbers, reach = equation.params["dimension_numbers"], window_reach(equation)
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


def window_reach(equation: Any) -> tuple[int, ...]:
    """Return the places past a part's edge that a convolution reads, along each dim.

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
