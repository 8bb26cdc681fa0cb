"""What a matmul, or a table's lookup, says about the collectives that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshpar.audit.collectives import Collective
from meshpar.audit.constraints import sizes_of
from meshpar.audit.evidence import Evidence
from meshpar.audit.jaxprs import array_shape
from meshpar.audit.traced import Operation

MATMUL = "dot_general"


def gathers_tokens(row: Collective, evidence: Evidence) -> bool:
    """Whether the tokens of one operand arrive whole, split over mesh axes before.

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
    """Whether what arrives is added to the gradient of a table of weights.

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
    """Values of the partial sums over those of both operands, where none is a weight.

    0 where a weight is multiplied, or its gradient computed: its layout is asked for.
    Where weights are not known, what has no batch dims may be one.
    """
    matmuls = evidence.served_by(row)
    summed = [
        matmul
        for matmul in matmuls
        if _may_contract(matmul, frozenset(row.mesh_axes or ()))
    ]
    ratios = [
        _ratio(matmul)
        if not _is_of_weight(matmul, matmuls) and (knows_weights or _dims(matmul)[1][0])
        else 0.0
        for matmul in summed
    ]
    return min(ratios, default=0.0)


def _dims(matmul: Operation) -> Any:
    """(contracted dims, batch dims), each of the left and of the right operand."""
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


def _may_contract(matmul: Operation, axes: frozenset[str]) -> bool:
    contracted, _ = _dims(matmul)
    return any(_may_split(matmul, side, contracted[side], axes) for side in (0, 1))


def _is_of_weight(matmul: Operation, matmuls: Sequence[Operation]) -> bool:
    multiplied = any(operand.weight for operand in matmul.operands)
    return multiplied or _is_gradient(matmul, matmuls)


def _is_gradient(matmul: Operation, matmuls: Sequence[Operation]) -> bool:
    """Whether its result has the shape of a weight that its line multiplies."""
    shape = sizes_of(array_shape(matmul.equation.outvars[0]))
    return any(
        operand.weight and sizes_of(array_shape(atom)) == shape
        for other in matmuls
        for operand, atom in other.given
    )


def _ratio(matmul: Operation) -> float:
    read = sum(math.prod(array_shape(atom)) for atom in matmul.equation.invars)
    return math.prod(array_shape(matmul.equation.outvars[0])) / max(read, 1)
