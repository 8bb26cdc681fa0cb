"""What the trace says of the operations that collectives are named after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.audit.collectives import Collective
from meshpar.audit.constraints import (
    Constrained,
    constrained_arrays,
    local_shape,
    sizes_of,
)
from meshpar.audit.traced import Operation, Value, shape_of


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
    def of(
        cls, operations: Iterable[Operation], mesh_shape: dict[str, int]
    ) -> Evidence:
        """That of a trace (`traced.operations`)."""
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
        """The operations of a collective's line and name."""
        return self.named(row.operation, row.source)

    def named(self, name: str, source: str) -> Sequence[Operation]:
        """The operations of a name on a line; on all of them where it is empty."""
        if source:
            return self.by_name.get((source, name), ())
        return [
            operation
            for (_, other), operations in self.by_name.items()
            for operation in operations
            if other == name
        ]

    def arrives(self, row: Collective, value: Value, atom: Any) -> bool:
        """Whether what arrives may be an array, its split over those mesh axes gone."""
        axes, split = frozenset(row.mesh_axes or ()), value.split
        if split is not None:
            if not axes & frozenset().union(*split):
                return False
            split = tuple(split_dim - axes for split_dim in split)
        shape = local_shape(shape_of(atom), split, self.mesh_shape)
        return sizes_of(shape) in map(sizes_of, row.dims)

    def moved_weight(self, row: Collective) -> str:
        """Path of the weight that arrives whole; empty if it may be another array."""
        fits = {
            value.weight
            for operation in self.served_by(row)
            for value, atom in operation.given
            if self.arrives(row, value, atom)
        }
        return (fits.pop() or "") if len(fits) == 1 else ""
