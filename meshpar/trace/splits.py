"""Rules of how GSPMD splits the result of an operation, from the operands' splits.

None stands for an unknown split, and counts as whole. `DimClasses` has the dims that
an operation makes equal, and how a reshape cuts and joins them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.rules.rules import entry_axes
from meshpar.trace.walk import array_shape

Split = tuple[frozenset[str], ...]
"""The mesh axes that split each dim of an array."""

Splits = tuple[Split | None, ...]
"""Splits of the operands of an operation."""

_WHOLE: frozenset[str] = frozenset()


def sharding_split(sharding: Any, num_dims: int) -> Split | None:
    """Return the split by a `NamedSharding`; None for any other sharding."""
    if not isinstance(sharding, NamedSharding):
        return None
    return split_by(sharding.spec, num_dims, dict(sharding.mesh.shape))


def split_by(spec: PartitionSpec, num_dims: int, sizes: Mapping[str, int]) -> Split:
    """Return the split by a spec, over the mesh axes that are longer than 1."""
    named = [
        () if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
        for entry in spec
    ]
    named += [()] * (num_dims - len(named))
    return tuple(
        frozenset(axis for axis in axes if sizes.get(axis, 1) > 1) for axes in named
    )


def elementwise(equation: JaxprEqn, operands: Splits) -> Split | None:
    """Return the split of the operands that broadcast to the result."""
    shape = getattr(equation.outvars[0].aval, "shape", None)
    if shape is None:
        return None
    alike = [
        tuple(
            axes if size == wanted else _WHOLE
            for axes, size, wanted in zip(
                operand, array_shape(atom), shape, strict=True
            )
        )
        for operand, atom in zip(operands, equation.invars, strict=True)
        if operand is not None
        and len(operand) == len(shape)
        and all(
            size in (1, wanted)
            for size, wanted in zip(array_shape(atom), shape, strict=True)
        )
    ]
    if not alike:
        return None
    return tuple(_WHOLE.union(*axes) for axes in zip(*alike, strict=True))


def _dot_general(equation: JaxprEqn, operands: Splits) -> Split | None:
    (contract, batch) = equation.params["dimension_numbers"]
    sides = []
    for side in (0, 1):
        shape = array_shape(equation.invars[side])
        sides.append(operands[side] or (_WHOLE,) * len(shape))
    free = [
        [
            axes
            for dim, axes in enumerate(sides[side])
            if dim not in (*contract[side], *batch[side])
        ]
        for side in (0, 1)
    ]
    # A mesh axis splits one dim of an array: here those of the right operand stay.
    right = _WHOLE.union(*free[1])
    left = [axes - right for axes in free[0]]
    return (*(sides[0][dim] for dim in batch[0]), *left, *free[1])


def _transpose(equation: JaxprEqn, operands: Splits) -> Split | None:
    if operands[0] is None:
        return None
    return tuple(operands[0][dim] for dim in equation.params["permutation"])


def _broadcast(equation: JaxprEqn, operands: Splits) -> Split | None:
    if operands[0] is None:
        return None
    result = [_WHOLE] * len(array_shape(equation.outvars[0]))
    for dim, axes in zip(
        equation.params["broadcast_dimensions"], operands[0], strict=True
    ):
        result[dim] = axes
    return tuple(result)


def _without(parameter: str, equation: JaxprEqn, operands: Splits) -> Split | None:
    """Return the split of a result that lacks the dims that a parameter names."""
    if operands[0] is None:
        return None
    gone = equation.params[parameter]
    return tuple(axes for dim, axes in enumerate(operands[0]) if dim not in gone)


def _first(equation: JaxprEqn, operands: Splits) -> Split | None:
    """Return the split after a collective over manual mesh axes, which changes none."""
    shapes = (array_shape(equation.invars[0]), array_shape(equation.outvars[0]))
    return operands[0] if len(shapes[0]) == len(shapes[1]) else None


def _slice(equation: JaxprEqn, operands: Splits) -> Split | None:
    if operands[0] is None:
        return None
    sizes = zip(
        array_shape(equation.invars[0]), array_shape(equation.outvars[0]), strict=True
    )
    return tuple(
        axes if before == after else _WHOLE
        for axes, (before, after) in zip(operands[0], sizes, strict=True)
    )


def _reshape(equation: JaxprEqn, operands: Splits) -> Split | None:
    """Keep the mesh axes of whole dims; of dims that are cut or joined, the first's."""
    if operands[0] is None:
        return None
    before = array_shape(equation.invars[0])
    after = array_shape(equation.outvars[0])
    if 0 in before:
        return None
    result = [_WHOLE] * len(after)
    for olds, news in dim_groups(before, after):
        if olds and news:
            result[news[0]] = operands[0][olds[0]]
    return tuple(result)


def dim_groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dims longer than 1 with equal products of sizes."""
    dims = [
        [dim for dim, size in enumerate(shape) if size > 1] for shape in (before, after)
    ]
    olds: list[int] = []
    news: list[int] = []
    while dims[0] or dims[1]:
        old = math.prod(before[dim] for dim in olds)
        new = math.prod(after[dim] for dim in news)
        if old <= new and dims[0]:
            olds.append(dims[0].pop(0))
        else:
            news.append(dims[1].pop(0))
        if math.prod(before[dim] for dim in olds) == math.prod(
            after[dim] for dim in news
        ):
            yield olds, news
            olds, news = [], []


def _concatenate(equation: JaxprEqn, operands: Splits) -> Split | None:
    known = [operand for operand in operands if operand is not None]
    if not known:
        return None
    joined = equation.params["dimension"]
    return tuple(
        _WHOLE if dim == joined else _WHOLE.union(*axes)
        for dim, axes in enumerate(zip(*known, strict=True))
    )


def _convolution(equation: JaxprEqn, operands: Splits) -> Split | None:
    """Keep the split of space, unless the result is as small as a kernel."""
    if operands[0] is None:
        return None
    numbers = equation.params["dimension_numbers"]
    kernel, result = (
        array_shape(atom) for atom in (equation.invars[1], equation.outvars[0])
    )
    split = [_WHOLE] * len(result)
    split[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    if operands[1] is not None:
        split[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]
    for out, left, right in zip(
        numbers.out_spec[2:], numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True
    ):
        split[out] = operands[0][left] if kernel[right] <= result[out] else _WHOLE
    return tuple(split)


RULES: dict[str, Callable[..., Split | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _slice),
    "squeeze": partial(_without, "dimensions"),
    "reshape": _reshape,
    "concatenate": _concatenate,
    **dict.fromkeys(("all_gather", "reduce_scatter", "psum_scatter"), _first),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"),
        partial(_without, "axes"),
    ),
}


class DimClasses:
    """A union of dims by number; `find` gives the number that stands for a class.

    Example:
        >>> dims = DimClasses()
        >>> wide, other = dims.new(12), dims.new(12)
        >>> heads, each = dims.reshaped([wide], [3, 4])
        >>> dims.join(wide, other)
        >>> dims.reshaped([heads, each], [12]) == [dims.find(other)]
        True
        >>> dims.parts(other) == (heads, each)
        True
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}
        self._wholes: dict[tuple[int, ...], int] | None = {}

    def new(self, size: int) -> int:
        """Return the number of a dim of a class of its own."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        return self._parent[-1]

    def size(self, dim: int) -> int:
        """Return the size of a dim."""
        return self._size[self.find(dim)]

    def find(self, dim: int) -> int:
        """Return the number that stands for a dim's class."""
        while self._parent[dim] != dim:
            self._parent[dim] = self._parent[self._parent[dim]]
            dim = self._parent[dim]
        return dim

    def join(self, dim: int, other: int) -> None:
        """Make two classes one, and their parts if they are cut alike."""
        dim, other = self.find(dim), self.find(other)
        if dim == other or self._size[dim] != self._size[other]:
            return
        self._parent[other] = dim
        self._wholes = None
        parts, others = self._parts.get(dim), self._parts.pop(other, None)
        if parts is None and others is not None:
            self._parts[dim] = others
        elif parts is not None and others is not None:
            sizes = [tuple(map(self.size, some)) for some in (parts, others)]
            if sizes[0] == sizes[1]:
                for one, two in zip(parts, others, strict=True):
                    self.join(one, two)

    def parts(self, dim: int) -> tuple[int, ...]:
        """Return the smallest parts that a dim is cut into, outermost first.

        A dim that no reshape cuts is its own only part.
        """
        dim = self.find(dim)
        inner = self._parts.get(dim)
        if inner is None:
            return (dim,)
        return tuple(part for one in inner for part in self.parts(one))

    def reshaped(self, olds: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the dims that a reshape makes of some dims.

        Args:
            olds: Dims, outermost first.
            sizes: Sizes of the new dims, with the same product.
        """
        left = [part for old in olds for part in self.parts(old)]
        found = []
        for size in sizes:
            taken: list[int] = []
            while left and math.prod(map(self.size, taken)) < size:
                needed = size // math.prod(map(self.size, taken))
                taken.append(left.pop(0))
                if self.size(taken[-1]) > needed:
                    if self.size(taken[-1]) % needed:
                        return [self.new(size) for size in sizes]
                    cut = self.find(taken[-1])
                    inner = self.new(needed), self.new(self._size[cut] // needed)
                    self._parts[cut], self._wholes = inner, None
                    taken[-1] = inner[0]
                    left.insert(0, inner[1])
            if math.prod(map(self.size, taken)) != size:
                return [self.new(size) for size in sizes]
            found.append(self._whole(tuple(taken)))
        return found

    def _whole(self, parts: tuple[int, ...]) -> int:
        """Return the dim that is cut into some parts, a new one if there is none."""
        parts = tuple(map(self.find, parts))
        if len(parts) == 1:
            return parts[0]
        if self._wholes is None:
            self._wholes = {self.parts(dim): dim for dim in self._parts}
        whole = self._wholes.get(parts)
        if whole is None:
            whole = self.new(math.prod(map(self.size, parts)))
            self._parts[whole] = parts
            self._wholes[parts] = whole
        return self.find(whole)
