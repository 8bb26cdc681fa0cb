"""Convolutions over split space that are left to GSPMD, and get wrong gradients there.

Forward they are right. `meshpar.parallel.convolution_gradients` has the two faults, and
takes the library's own convolutions by hand there; of a model's own, nothing else in
the program tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.audit.halos import CONVOLUTION
from meshpar.audit.jaxprs import array_shape
from meshpar.audit.split_rules import Split
from meshpar.audit.traced import Operation, operations
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.parallel.convolution_gradients import OWN_SCOPE

_CUTS = ("pad", "slice", "dynamic_slice")
_WAY_OUT = "use Conv of meshpar.models.layers.volume or meshpar.parallel's "


@dataclass(frozen=True, kw_only=True)
class PlainConvolutions:
    """Refuses a traced training program whose gradients would be wrong.

    Args:
        layout: Of the program.
        space_axes: The mesh axes that rules split the space of its inputs over.
    """

    layout: Layout
    space_axes: Sequence[str]

    def check(self, traced: Any) -> None:
        """Refuses the first such convolution, by its line.

        Args:
            traced: What `jax.jit(f).trace(...)` gives of a step or its gradients.

        Raises:
            InputError: There is one.
        """
        jaxpr = traced.jaxpr
        given = (None,) * len(jaxpr.jaxpr.invars)
        for message in self.problems(operations(jaxpr, given)):
            raise InputError(message)

    def problems(self, traced: Iterable[Operation]) -> Iterator[str]:
        """A line for each, of the forward pass."""
        for operation in traced:
            if _is_plain(operation) and max(_windows(operation), default=1) > 1:
                yield from self._of(operation)

    def _of(self, operation: Operation) -> Iterator[str]:
        split, sizes = _split(operation), self.layout.mesh_shape
        automatic = operation.region.automatic
        space = [axis for axis in self.space_axes if axis in automatic]
        if not space:
            return  # each device convolves its own part
        numbers = operation.equation.params["dimension_numbers"]
        shape, windows = array_shape(operation.equation.invars[0]), _windows(operation)
        dims = list(zip(numbers.lhs_spec[2:], windows, strict=True))
        known = set().union(*split) if split else set()
        if split is None or not known & set(space):
            split, known = None, set(space)  # as the rules split the inputs
        elif all(window == 1 or not split[dim] for dim, window in dims):
            return
        idle = sorted(automatic - known)
        asked = (
            f"layout {str(self.layout)!r}: the convolution at {operation.source}, of a "
            f"window of {_by(windows)} over space split by "
            f"{' and '.join(f'{axis}={sizes[axis]}' for axis in space)}"
        )
        if idle:
            times = math.prod(sizes[axis] for axis in idle)
            yield (
                f"{asked}, gets a gradient of its kernel {times} times too large from "
                f"XLA (jax 0.10.2) beside {idle[0]}={sizes[idle[0]]}, which splits "
                f"nothing of it: {_WAY_OUT}grid_convolution, or let a rule split space "
                f"over {idle[0]!r} too"
            )
            return
        for dim, window in dims if split else ():
            degree = math.prod(sizes[axis] for axis in split[dim])
            if degree > 1 and shape[dim] // degree < window:
                yield (
                    f"{asked}, gets a wrong gradient of its input from XLA (jax "
                    f"0.10.2), as a device's part is but {shape[dim] // degree} of "
                    f"{shape[dim]} places: {_WAY_OUT}grid_convolution, or split that "
                    "dim over fewer devices"
                )
                return


def _is_plain(operation: Operation) -> bool:
    """Whether it is a convolution of a model's forward pass, and none of ours."""
    path = str(operation.equation.source_info.name_stack)
    return (
        operation.name == CONVOLUTION
        and OWN_SCOPE not in path
        and "transpose(" not in path
    )


def _split(operation: Operation) -> Split | None:
    """How its input lies; None where that is not known.

    What pads or cuts a dim leaves unknown how it lies; GSPMD keeps it split.
    """
    value = operation.operands[0]
    if value.maker is not None and value.maker.primitive.name in _CUTS:
        return None
    return value.split


def _windows(operation: Operation) -> tuple[int, ...]:
    """Sides of its window."""
    equation = operation.equation
    dims = equation.params["dimension_numbers"].rhs_spec[2:]
    return tuple(array_shape(equation.invars[1])[dim] for dim in dims)


def _by(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))
