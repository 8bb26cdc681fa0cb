"""Uses of the dims of a traced function's parameters, and which dims are split alike.

A domain of the walk in which each dim of each array has a class (`DimClasses`): an
elementwise operation joins the classes of its operands, a matmul those of contracted
dims, and a transpose, broadcast, reduction or reshape hands them on. A use is what an
operation does with a dim: contract it with a weight, look up its rows, cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from meshpar.trace.primitives import ELEMENTWISE, UNCHANGED
from meshpar.trace.splits import DimClasses, dim_groups
from meshpar.trace.walk import (
    Loop,
    Program,
    array_shape,
    called_program,
    sources,
    walk,
)

Classes = tuple[int, ...]
"""The class of each dim of an array."""


@dataclass(frozen=True)
class Dims:
    """One array of a traced function.

    Args:
        classes: The class of each dim.
        from_parameters: Whether it depends on parameters.
        from_batch: Whether it depends on any other argument.
    """

    classes: Classes
    from_parameters: bool = False
    from_batch: bool = False

    @property
    def is_weight(self) -> bool:
        """True if it is made of parameters and constants alone."""
        return self.from_parameters and not self.from_batch


@dataclass(frozen=True, eq=False)
class Use:
    """One operation that tells what a dim is for.

    Args:
        kind: `contracted` or `free` of a weight in a matmul with an activation;
            `experts`, the place of a weight's matrix, also where the batch chooses one
            matrix; `shared` by two activations that
            are multiplied, or `inner` to one of them; `looked_up` by an index from the
            batch, `placed` by any other; `cut` into pieces; `added`, where
            two activations are that had another class; `convolved`, or `window` of a
            convolution's kernel; `looped`, which a loop runs over; or `piece`, which a
            slice makes of another dim.
        equation: The operation.
        piece: Start and end of the piece that a slice cuts; None for any other use.
        whole: The dim that a piece is cut from; None for any other use.
    """

    kind: str
    equation: JaxprEqn
    piece: tuple[int | None, int | None] | None = None
    whole: int | None = None


class DimUses:
    """The classes of the dims of a traced function, and all uses of each.

    Attributes:
        arguments: Classes of the dims of each argument.

    Args:
        program: The function.
        is_parameter: For each argument whether it is a parameter.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def mlp(up, down, x):
        ...     return jnp.tanh(x @ up) @ down
        >>> shapes = [jnp.zeros(shape) for shape in ((4, 8), (8, 4), (2, 4))]
        >>> uses = DimUses(jax.make_jaxpr(mlp)(*shapes), [True, True, False])
        >>> up, down, _ = uses.arguments
        >>> uses.classes.find(up[1]) == uses.classes.find(down[0])
        True
        >>> sorted(use.kind for use in uses.in_class(up[1]))
        ['contracted', 'free']
    """

    def __init__(self, program: Program, is_parameter: Sequence[bool]) -> None:
        self.classes = DimClasses()
        self._uses: list[tuple[int, Use]] = []
        self._by_class: dict[int, list[Use]] = {}
        jaxpr: Any = getattr(program, "jaxpr", program)
        given = [
            Dims(self.fresh(array_shape(var)), own, not own)
            for var, own in zip(jaxpr.invars, is_parameter, strict=True)
        ]
        self.arguments = [one.classes for one in given]
        walk(program, given, self._apply, self._literal)

    def in_class(self, dim: int) -> list[Use]:
        """Return all uses of the dims of a class."""
        if not self._by_class:
            for used, use in self._uses:
                self._by_class.setdefault(self.classes.find(used), []).append(use)
        return self._by_class.get(self.classes.find(dim), [])

    def fresh(self, shape: Sequence[int]) -> Classes:
        """Return a class of its own for each dim of an array."""
        return tuple(map(self.classes.new, shape))

    def add(self, dim: int, kind: str, equation: JaxprEqn) -> None:
        """Keep a use of a dim."""
        self._uses.append((dim, Use(kind, equation)))

    def cut(self, dim: int, start: int | None, size: int, equation: JaxprEqn) -> int:
        """Return the dim that a slice makes of another one."""
        piece, end = self.classes.new(size), None if start is None else start + size
        self._uses.append((dim, Use("cut", equation, (start, end))))
        self._uses.append((piece, Use("piece", equation, whole=dim)))
        return piece

    def join(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Join the classes of the dims of two arrays."""
        for dim, like in zip(one, other, strict=False):
            self.classes.join(dim, like)

    def _literal(self, value: Any) -> Dims:
        return Dims(self.fresh(np.shape(value)))

    def _apply(self, equation: JaxprEqn, operands: list[Dims]) -> list[Dims]:
        inner, loop = called_program(equation), Loop.parse(equation)
        if inner is not None:
            return walk(inner, operands, self._apply, self._literal)
        if loop is not None:
            return self._loop(equation, loop, operands)
        if equation.primitive.name == "cond":
            return self._branches(equation.params["branches"], operands)
        rule = RULES.get(equation.primitive.name, _elementwise)
        found = rule(self, equation, operands)
        made_of = sources(equation, operands)
        from_parameters = any(one.from_parameters for one in made_of)
        from_batch = any(one.from_batch for one in made_of)
        return [Dims(classes, from_parameters, from_batch) for classes in found]

    def _loop(self, equation: JaxprEqn, loop: Loop, operands: list[Dims]) -> list[Dims]:
        consts, carried, slices = loop.split(operands)
        for one in slices:
            self.add(one.classes[0], "looped", equation)
        each = [replace(one, classes=one.classes[1:]) for one in slices]
        made: list[Dims] = []

        def run(carried: list[Dims]) -> list[Dims]:
            given = [*consts, *carried, *each]
            return walk(loop.body, given, self._apply, self._literal)

        carried, made = loop.carried(run, carried, self._joined)
        length = 0 if loop.length is None else loop.length
        stacked = [
            replace(one, classes=(*self.fresh((length,)), *one.classes)) for one in made
        ]
        return [*carried, *stacked]

    def _branches(self, branches: Sequence[Program], operands: list[Dims]) -> list:
        results = [
            walk(branch, operands[1:], self._apply, self._literal)
            for branch in branches
        ]
        found = results[0]
        for other in results[1:]:
            found = self._joined(found, other)
        return found

    def _joined(self, some: list[Dims], others: list[Dims]) -> list[Dims]:
        for one, other in zip(some, others, strict=True):
            self.join(one.classes, other.classes)
        return [
            Dims(
                one.classes,
                one.from_parameters or other.from_parameters,
                one.from_batch or other.from_batch,
            )
            for one, other in zip(some, others, strict=True)
        ]


Rule = Callable[[DimUses, JaxprEqn, list[Dims]], list[Classes]]
"""(uses, operation, its operands) -> classes of each of its results."""


def _elementwise(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    """Join the operands that broadcast to the result; others hand on their dims."""
    name, found = equation.primitive.name, []
    for var in equation.outvars:
        shape = getattr(var.aval, "shape", ())
        classes = list(uses.fresh(shape))
        alike = [one for one in operands if len(one.classes) == len(shape)]
        if name not in ELEMENTWISE | UNCHANGED:
            alike = [one for one in alike if _sizes(uses, one) == shape][:1]
        elif len(alike) == 2:
            _mark_sums(uses, equation, *alike)
        for one in alike:
            for place, dim in enumerate(one.classes):
                if uses.classes.size(dim) == shape[place]:
                    uses.classes.join(dim, classes[place])
        found.append(tuple(classes))
    return found


def _mark_sums(uses: DimUses, equation: JaxprEqn, one: Dims, other: Dims) -> None:
    """Keep which dims of two activations are added that were not of one class before.

    Sums inside an activation function, as in GELU, are of one class.
    """
    if equation.primitive.name not in ("add", "add_any"):
        return
    if all(some.from_parameters and some.from_batch for some in (one, other)):
        for dim, like in zip(one.classes, other.classes, strict=True):
            if uses.classes.find(dim) != uses.classes.find(like):
                uses.add(dim, "added", equation)


def _sizes(uses: DimUses, one: Dims) -> tuple[int, ...]:
    return tuple(map(uses.classes.size, one.classes))


def _dot_general(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    contracted, batched = equation.params["dimension_numbers"]
    left, right = (one.classes for one in operands)
    for dims in (contracted, batched):
        uses.join([left[dim] for dim in dims[0]], [right[dim] for dim in dims[1]])
    free = [
        [
            one
            for dim, one in enumerate(operands[side].classes)
            if dim not in (*contracted[side], *batched[side])
        ]
        for side in (0, 1)
    ]
    shared = [left[dim] for dim in batched[0]]
    summed = [left[dim] for dim in contracted[0]]
    weights = [one.is_weight for one in operands]
    kinds: tuple[tuple[str, list[int]], ...] = ()
    if all(one.from_batch for one in operands):
        kinds = (("shared", shared), ("inner", [*summed, *free[0], *free[1]]))
    elif any(weights) and any(one.from_batch for one in operands):
        own = free[weights.index(True)]
        kinds = (("experts", shared), ("contracted", summed), ("free", own))
    for kind, dims in kinds:
        for dim in dims:
            uses.add(dim, kind, equation)
    return [(*shared, *free[0], *free[1])]


def _ragged_dot(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    """Rows of groups by each group's matrix: (rows, in), (experts, in, out)."""
    left, right = (one.classes for one in operands[:2])
    shape = array_shape(equation.outvars[0])
    if (len(left), len(right), len(shape)) != (2, 3, 2):
        return [uses.fresh(shape)]
    uses.join([left[1]], [right[1]])
    for dim, kind in zip(right, ("experts", "contracted", "free"), strict=True):
        uses.add(dim, kind, equation)
    return [(left[0], right[2])]


def _convolution(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    numbers, params = equation.params["dimension_numbers"], equation.params
    found = list(uses.fresh(array_shape(equation.outvars[0])))
    left, right = (one.classes for one in operands)
    found[numbers.out_spec[0]] = left[numbers.lhs_spec[0]]
    if params["feature_group_count"] == params["batch_group_count"] == 1:
        uses.join([left[numbers.lhs_spec[1]]], [right[numbers.rhs_spec[1]]])
        found[numbers.out_spec[1]] = right[numbers.rhs_spec[0]]
        for dim in (right[numbers.rhs_spec[1]], right[numbers.rhs_spec[0]]):
            uses.add(dim, "convolved", equation)
    for place in numbers.rhs_spec[2:]:
        uses.add(right[place], "window", equation)
    return [tuple(found)]


def _transpose(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    return [tuple(operands[0].classes[d] for d in equation.params["permutation"])]


def _broadcast(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    found = list(uses.fresh(array_shape(equation.outvars[0])))
    places = equation.params["broadcast_dimensions"]
    for dim, place in zip(operands[0].classes, places, strict=True):
        if uses.classes.size(dim) == uses.classes.size(found[place]):
            found[place] = dim
    return [tuple(found)]


def _without(parameter: str) -> Rule:
    """Return the rule of an operation whose results lack the dims that it names."""

    def rule(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
        gone = equation.params[parameter]
        kept = [dim for at, dim in enumerate(operands[0].classes) if at not in gone]
        return [tuple(kept)] * len(equation.outvars)

    return rule


def _reshape(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    before = _sizes(uses, operands[0])
    after = array_shape(equation.outvars[0])
    found = list(uses.fresh(after))
    if 0 in before:
        return [tuple(found)]
    for olds, news in dim_groups(before, after):
        given = [operands[0].classes[dim] for dim in olds]
        sizes = [after[dim] for dim in news]
        for place, dim in zip(news, uses.classes.reshaped(given, sizes), strict=True):
            found[place] = dim
    return [tuple(found)]


def _slice(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    """Keep dims that are taken whole; the others are cut.

    Where the batch chooses one place of a weight, its dim holds experts.
    """
    shape, params = array_shape(equation.outvars[0]), equation.params
    if equation.primitive.name == "slice":
        starts = list(params["start_indices"])
    else:
        starts = [
            int(atom.val) if isinstance(atom, Literal) else None
            for atom in equation.invars[1 : 1 + len(shape)]
        ]
    found = []
    by_batch = operands[0].is_weight and any(one.from_batch for one in operands[1:])
    for dim, start, size in zip(operands[0].classes, starts, shape, strict=True):
        if uses.classes.size(dim) == size:
            found.append(dim)
        elif by_batch and size == 1:
            uses.add(dim, "experts", equation)
            found.append(uses.classes.new(size))
        else:
            found.append(uses.cut(dim, start, size, equation))
    return [tuple(found)]


def _split(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    axis, start, found = equation.params["axis"], 0, []
    for size in equation.params["sizes"]:
        piece = list(operands[0].classes)
        piece[axis] = uses.cut(piece[axis], start, size, equation)
        start += size
        found.append(tuple(piece))
    return found


def _same_sizes(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    """Keep dims of the first operand whose size the result has at the same place."""
    found = list(uses.fresh(array_shape(equation.outvars[0])))
    for place, dim in enumerate(operands[0].classes):
        if uses.classes.size(dim) == uses.classes.size(found[place]):
            found[place] = dim
    return [tuple(found)] * len(equation.outvars)


def _concatenate(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    joined = equation.params["dimension"]
    found = list(operands[0].classes)
    found[joined] = uses.classes.new(array_shape(equation.outvars[0])[joined])
    for other in operands[1:]:
        uses.join(found, other.classes)  # Of other sizes, the joined dim stays.
    return [tuple(found)]


def _stack(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    found = list(operands[0].classes)
    for other in operands[1:]:
        uses.join(found, other.classes)
    found.insert(equation.params["axis"], uses.classes.new(len(operands)))
    return [tuple(found)]


def _unstack(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    axis, results = equation.params["axis"], equation.outvars
    kept = list(operands[0].classes)
    gone = kept.pop(axis)
    for place in range(len(results)):
        uses.cut(gone, place, 1, equation)
    return [tuple(kept)] * len(results)


def _update(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    """Put a slice into an array: dims that it fills are those of the slice."""
    uses.join(operands[0].classes, operands[1].classes)
    return [operands[0].classes]


def _gather(uses: DimUses, equation: JaxprEqn, operands: list[Dims]) -> list:
    table, index = operands
    numbers, sizes = (
        equation.params["dimension_numbers"],
        equation.params["slice_sizes"],
    )
    shape, offsets = array_shape(equation.outvars[0]), numbers.offset_dims
    batched = numbers.operand_batching_dims
    uses.join(
        [table.classes[dim] for dim in batched],
        [index.classes[dim] for dim in numbers.start_indices_batching_dims],
    )
    gone = {*numbers.collapsed_slice_dims, *batched}
    kept = iter(dim for dim in range(len(sizes)) if dim not in gone)
    places = iter(index.classes)
    found = []
    for place, size in enumerate(shape):
        if place not in offsets:
            found.append(next(places))
            continue
        dim = table.classes[next(kept)]
        whole = uses.classes.size(dim) == size
        found.append(dim if whole else uses.classes.new(size))
    if table.is_weight:
        for dim in numbers.start_index_map:
            if sizes[dim] < uses.classes.size(table.classes[dim]):
                kind = "looked_up" if index.from_batch else "placed"
                uses.add(table.classes[dim], kind, equation)
    return [tuple(found)]


RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), _ragged_dot),
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _without("dimensions"),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"),
        _without("axes"),
    ),
    **dict.fromkeys(("reduce_or", "reduce_xor", "argmax", "argmin"), _without("axes")),
    **dict.fromkeys(("slice", "dynamic_slice"), _slice),
    "split": _split,
    **dict.fromkeys(("pad", "top_k"), _same_sizes),
    "concatenate": _concatenate,
    "dynamic_update_slice": _update,
    "stack": _stack,
    "unstack": _unstack,
    "gather": _gather,
}
