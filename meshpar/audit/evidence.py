"""A trace, indexed by the operations that collectives are named after.

GSPMD names a collective that serves a sharding constraint after the operation before
it. Such a collective was asked for if all of these agree: the source line of that
operation, the shape of what arrives, and the mesh axes along which the constraint
changes the layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from meshpar.audit.collectives import Collective
from meshpar.trace.operations import Operation, Value, shape_or_none
from meshpar.trace.splits import Split, split_by
from meshpar.trace.walk import Loop, array_shape

_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    **dict.fromkeys(("sort", "concatenate"), "dimension"),
    "rev": "dimensions",
}
"""Operations that mix the values along a dim, and their parameter that says which."""


@dataclass(frozen=True)
class Constrained:
    """An array that a sharding constraint, or a jit's `out_shardings`, lays out.

    Args:
        line: `file:line` of what makes it.
        sizes: Of a device's part, as `sorted_sizes` gives them.
        before: How it lies where it is made, None if that is not known.
        after: How it is to lie.
        maker: The operation that makes it.
        constraint: `file:line` of the constraint.
        is_carried: Whether a scan hands it from one iteration to the next, unsplit as
            written: GSPMD may carry it split.
    """

    line: str
    sizes: tuple[int, ...]
    before: Split | None
    after: Split
    maker: JaxprEqn | None
    constraint: str
    is_carried: bool = False

    def asks_for(self, kind: str, mesh_axes: tuple[str, ...]) -> bool:
        """Return True if the change of layout needs such a collective.

        One along a dim that the maker mixes is the maker's own: it would be there
        without the constraint.
        """
        axes = frozenset(mesh_axes)
        if axes & self._mixed():
            return False
        used = frozenset().union(*self.after)
        if self.before is None or (kind == "all-gather" and self.is_carried):
            return axes <= used if kind == "all-to-all" else not axes & used
        moved = frozenset().union(
            *(old - new for old, new in zip(self.before, self.after, strict=True))
        )
        return axes <= (moved & used if kind == "all-to-all" else moved)

    def _mixed(self) -> frozenset[str]:
        """Return the mesh axes that split a dim along which the maker mixes values."""
        if self.maker is None or self.maker.primitive.name not in _ALONG:
            return frozenset()
        dims = self.maker.params[_ALONG[self.maker.primitive.name]]
        return frozenset().union(
            *(
                split[dim]
                for split in (self.before, self.after)
                for dim in (dims if isinstance(dims, tuple) else (dims,))
                if split is not None
            )
        )


def constrained_arrays(operations: Iterable[Operation]) -> tuple[Constrained, ...]:
    """Return every array that a constraint or a jit's `out_shardings` lays out."""
    return tuple(
        found for operation in operations for found in _constrained_by(operation)
    )


def sorted_sizes(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of an array's dims above 1, sorted."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def is_asked_for(row: Collective, constrained: Iterable[Constrained]) -> bool:
    """Return True if constraints on its line ask for all that a collective delivers."""
    if row.mesh_axes is None:
        return False
    sizes = {
        found.sizes
        for found in constrained
        if row.source in (found.line, found.constraint)
        and found.asks_for(row.kind, row.mesh_axes)
    }
    if row.kind == "all-to-all" and len(row.dims) > 1:  # An array in as many pieces.
        return sum(map(math.prod, row.dims)) in set(map(math.prod, sizes))
    return {sorted_sizes(dims) for dims in row.dims} <= sizes


def _constrained_by(operation: Operation) -> Iterator[Constrained]:
    equation = operation.equation
    if operation.name == "sharding_constraint":
        [atom], [value] = equation.invars, operation.operands
        yield from _laid_out(atom, value, equation.params["sharding"], operation)
    shardings = equation.params.get("out_shardings", ())
    for atom, value, sharding in zip(
        equation.outvars, operation.results, shardings, strict=False
    ):
        yield from _laid_out(atom, value, sharding, operation)


def _laid_out(
    atom: Any, value: Value, sharding: Any, operation: Operation
) -> Iterator[Constrained]:
    if not isinstance(sharding, NamedSharding):
        return
    shape, mesh_sizes = atom.aval.shape, dict(sharding.mesh.shape)
    split = split_by(sharding.spec, len(shape), mesh_sizes)
    after = tuple(axes - operation.region.manual for axes in split)
    sizes = local_shape(shape, after, mesh_sizes)
    maker = value.maker
    loop = None if maker is None else Loop.parse(maker)
    carried = maker.outvars[: loop.num_carried] if maker and loop else ()
    is_scanned = loop is not None and loop.condition is None
    yield Constrained(
        line=value.line,
        sizes=sorted_sizes(sizes),
        before=value.split,
        after=after,
        maker=value.maker,
        constraint=operation.source,
        is_carried=is_scanned
        and not any(value.split or ())
        and shape in map(array_shape, carried),
    )


def local_shape(
    shape: tuple[int, ...] | None, split: Split | None, mesh_sizes: dict[str, int]
) -> tuple[int, ...]:
    """Return the shape of a device's part; the whole shape if the split is unknown."""
    if split is None or shape is None:
        return shape or ()
    return tuple(
        -(-dim // math.prod(mesh_sizes[axis] for axis in axes))
        for dim, axes in zip(shape, split, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A traced function's operations, to be found by what a collective names.

    Args:
        by_name: (source line, name of the primitive) -> operations.
        constrained: Arrays that the function lays out itself.
        mesh_shape: Size of each mesh axis.
    """

    by_name: Mapping[tuple[str, str], Sequence[Operation]]
    constrained: tuple[Constrained, ...]
    mesh_shape: dict[str, int]

    @classmethod
    def from_trace(
        cls, operations: Iterable[Operation], mesh_shape: dict[str, int]
    ) -> Evidence:
        """Index the operations of a trace (`meshpar.trace.operations`)."""
        operations = list(operations)
        by_name = defaultdict(list)
        for operation in operations:
            by_name[operation.source, operation.name].append(operation)
        return cls(
            by_name=dict(by_name),
            constrained=constrained_arrays(operations),
            mesh_shape=mesh_shape,
        )

    def served_by(self, row: Collective) -> Sequence[Operation]:
        """Return the operations of a collective's line and name."""
        return self.named(row.operation, row.source)

    def named(self, name: str, source: str) -> Sequence[Operation]:
        """Return the operations of a name on a line; on all lines if it is empty."""
        if source:
            return self.by_name.get((source, name), ())
        return [
            operation
            for (_, other), operations in self.by_name.items()
            for operation in operations
            if other == name
        ]

    def arrives(self, row: Collective, value: Value, atom: Any) -> bool:
        """Return True if what arrives may be this array, gathered over the axes."""
        axes, split = frozenset(row.mesh_axes or ()), value.split
        if split is not None:
            if not axes & frozenset().union(*split):
                return False
            split = tuple(split_dim - axes for split_dim in split)
        shape = local_shape(shape_or_none(atom), split, self.mesh_shape)
        return sorted_sizes(shape) in map(sorted_sizes, row.dims)

    def moved_weight(self, row: Collective) -> str:
        """Return the path of the only weight that may arrive whole; else empty."""
        fits = {
            value.weight
            for operation in self.served_by(row)
            for value, atom in operation.given
            if self.arrives(row, value, atom)
        }
        return (fits.pop() or "") if len(fits) == 1 else ""
