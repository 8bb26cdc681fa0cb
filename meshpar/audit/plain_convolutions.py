"""Convolutions over split space that are left to GSPMD, and get wrong gradients there.

Forward they are right. `meshpar.parallel.convolution_gradients` has the two faults, and
takes the library's own convolutions by hand there; of a model's own, nothing else in
the program tells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.audit.halos import CONVOLUTION
from meshpar.audit.jaxprs import array_shape
from meshpar.audit.kept_splits import KeptSplits, unpadded
from meshpar.audit.split_rules import Split
from meshpar.audit.traced import Operation, operations
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.parallel.convolution_gradients import OWN_SCOPE

_WAY_OUT = (
    "use Conv of meshpar.models.layers.volume or meshpar.parallel's grid_convolution"
)


@dataclass(frozen=True, kw_only=True)
class PlainConvolutions:
    """Refuses a traced training program whose gradients would be wrong.

    Args:
        layout: Of the program.
        space_axes: The mesh axes that rules split the space of its inputs over.
        space_dims: How many dims of space an input has. Of a convolution's input that
            is not known to lie otherwise, one of as many lies as the rules say.
    """

    layout: Layout
    space_axes: Sequence[str]
    space_dims: Collection[int]

    def check(self, traced: Any) -> None:
        """Refuses the first such convolution, by its line.

        Args:
            traced: What `jax.jit(f).trace(...)` gives of a step or its gradients.

        Raises:
            InputError: There is one.
        """
        for problem in self.problems(operations(traced.jaxpr)):
            raise problem

    def problems(self, traced: Iterable[Operation]) -> Iterator[InputError]:
        """An error for each, of the forward pass."""
        traced = list(traced)
        splits = KeptSplits(traced)
        for operation in traced:
            if not _is_plain(operation):
                continue
            if any(window > 1 for window in _windows(operation).values()):
                yield from self._of(operation, splits.of(operation.operands[0]))

    def _of(self, operation: Operation, split: Split | None) -> Iterator[InputError]:
        automatic = operation.region.automatic
        space = [axis for axis in self.space_axes if axis in automatic]
        if not space:
            return  # each device convolves its own part
        windows, known = _windows(operation), set(space)
        if split is None:
            if len(windows) not in self.space_dims:
                return
        else:
            split = tuple(axes & automatic for axes in split)
            if not any(split[dim] for dim, window in windows.items() if window > 1):
                return
            known = set().union(*split)
        asked = (
            f"layout {str(self.layout)!r}: the convolution at {operation.source}, of a "
            f"window of {' x '.join(map(str, windows.values()))} over space split by "
            f"{' and '.join(map(self._sized, space))}"
        )
        for axis in sorted(automatic - known):
            yield self._idle(asked, axis)
        if split is not None and operation.region.manual:
            yield from self._small(asked, operation, split)

    def _idle(self, asked: str, mesh_axis: str) -> InputError:
        times = self.layout.mesh_shape[mesh_axis]
        return InputError(
            f"{asked}, gets a gradient of its kernel {times} times too large from XLA "
            f"(jax 0.10.2) beside {self._sized(mesh_axis)}, which splits nothing of "
            f"it: {_WAY_OUT}, or let a rule split space over {mesh_axis!r} too",
            key="grid.wrong_kernel_gradient",
        )

    def _small(
        self, asked: str, operation: Operation, split: Split
    ) -> Iterator[InputError]:
        """Of one split dim, or of both parts as small, gradients are right."""
        shape = array_shape(operation.equation.invars[0])
        shape, sizes = unpadded(operation.operands[0], shape), self.layout.mesh_shape
        windows = {dim: at for dim, at in _windows(operation).items() if split[dim]}
        parts = {
            dim: shape[dim] // math.prod(sizes[axis] for axis in split[dim])
            for dim in windows
        }
        small = [dim for dim, window in windows.items() if parts[dim] <= window // 2]
        if small and len(small) < len(parts):
            yield InputError(
                f"{asked}, gets a gradient of its input twice too large from XLA (jax "
                f"0.10.2) beside split examples, as a device's part is but "
                f"{parts[small[0]]} of {shape[small[0]]} places: split that dim over "
                "fewer devices",
                key="grid.wrong_input_gradient",
            )

    def _sized(self, mesh_axis: str) -> str:
        return f"{mesh_axis}={self.layout.mesh_shape[mesh_axis]}"


def _is_plain(operation: Operation) -> bool:
    """Whether it is a convolution of a model's forward pass, and none of ours."""
    return (
        operation.name == CONVOLUTION
        and OWN_SCOPE not in operation.path
        and "transpose(" not in operation.path
    )


def _windows(operation: Operation) -> dict[int, int]:
    """Dim of the input -> places from the window's first to its last along it."""
    equation = operation.equation
    numbers, kernel = equation.params["dimension_numbers"], equation.invars[1]
    apart = equation.params["rhs_dilation"]
    sides = [array_shape(kernel)[dim] for dim in numbers.rhs_spec[2:]]
    reach = [(side - 1) * by + 1 for side, by in zip(sides, apart, strict=True)]
    return dict(zip(numbers.lhs_spec[2:], reach, strict=True))
