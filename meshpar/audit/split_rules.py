"""How the result of an operation is split, from how its operands are.

None stands for what is not known, and counts as whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

Split = tuple[frozenset[str], ...]
"""The mesh axes that split each dim of an array."""


def elementwise(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    """Of a result that has an operand's shape, but for dims of 1: that operand's."""
    shape = getattr(equation.outvars[0].aval, "shape", None)
    alike = [
        tuple(
            axes if size == wanted else frozenset()
            for axes, size, wanted in zip(operand, atom.aval.shape, shape, strict=True)
        )
        for operand, atom in zip(operands, equation.invars, strict=True)
        if operand is not None and _spreads(atom.aval.shape, shape)
    ]
    if not alike:
        return None
    return tuple(frozenset().union(*axes) for axes in zip(*alike, strict=True))


def _spreads(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> bool:
    return (
        wanted is not None
        and len(shape) == len(wanted)
        and all(size in (1, other) for size, other in zip(shape, wanted, strict=True))
    )


def _dot_general(
    equation: JaxprEqn, operands: tuple[Split | None, ...]
) -> Split | None:
    (contract, batch) = equation.params["dimension_numbers"]
    sides = []
    for side in (0, 1):
        shape = equation.invars[side].aval.shape
        sides.append(operands[side] or (frozenset(),) * len(shape))
    free = [
        [
            axes
            for dim, axes in enumerate(sides[side])
            if dim not in (*contract[side], *batch[side])
        ]
        for side in (0, 1)
    ]
    return (*(sides[0][dim] for dim in batch[0]), *free[0], *free[1])


def _transpose(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    if operands[0] is None:
        return None
    return tuple(operands[0][dim] for dim in equation.params["permutation"])


def _broadcast(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    if operands[0] is None:
        return None
    result = [frozenset()] * len(equation.outvars[0].aval.shape)
    for dim, axes in zip(
        equation.params["broadcast_dimensions"], operands[0], strict=True
    ):
        result[dim] = axes
    return tuple(result)


def _reduce(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    if operands[0] is None:
        return None
    gone = equation.params["axes"]
    return tuple(axes for dim, axes in enumerate(operands[0]) if dim not in gone)


def _slice(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    if operands[0] is None:
        return None
    sizes = zip(
        equation.invars[0].aval.shape, equation.outvars[0].aval.shape, strict=True
    )
    return tuple(
        axes if before == after else frozenset()
        for axes, (before, after) in zip(operands[0], sizes, strict=True)
    )


def _squeeze(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    if operands[0] is None:
        return None
    gone = equation.params["dimensions"]
    return tuple(axes for dim, axes in enumerate(operands[0]) if dim not in gone)


def _reshape(equation: JaxprEqn, operands: tuple[Split | None, ...]) -> Split | None:
    """The first and the last dims that stay as they are keep their mesh axes."""
    if operands[0] is None:
        return None
    before = equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    shortest = min(len(before), len(after))
    first = _num_alike(before, after)
    last = min(_num_alike(before[::-1], after[::-1]), shortest - first)
    middle = (frozenset(),) * (len(after) - first - last)
    return (*operands[0][:first], *middle, *operands[0][len(before) - last :])


def _num_alike(left: Sequence[int], right: Sequence[int]) -> int:
    return len(
        list(
            itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(left, right, strict=False)
            )
        )
    )


RULES: dict[str, Callable[..., Split | None]] = {
    "dot_general": _dot_general,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _slice),
    "squeeze": _squeeze,
    "reshape": _reshape,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"), _reduce
    ),
}
