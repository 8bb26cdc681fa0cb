"""Programs that XLA is known to run wrongly, to hang on or to abort on.

Each was seen (jax 0.10.2, XLA:CPU unless said):

* `divergent_permute`: a collective-permute inside a conditional. XLA:CPU waits for all
  devices of the permute; where some take another branch: wrong numbers or a hang.
* `sharded_gather`: a gather along a dim that GSPMD splits, inside a `shard_map` that is
  manual over other mesh axes. The partitioner may abort the process.
* `half_all_reduce`: a sum or maximum in bfloat16 over a manual mesh axis, while another
  is left to GSPMD, scattered or not. XLA:CPU aborts the process (float16 it takes).
* `ragged_all_to_all`: XLA:CPU has none.
* `divergent_collective`: a collective in a branch or a loop that devices of its group
  may take differently: those in it wait for others that never come, or that come to
  another collective. Any hardware; known of a `shard_map` that tracks along which mesh
  axes a value may differ (`check_vma`).

`PlainConvolutions` refuses another: a convolution over split space that a model leaves
to GSPMD, whose forward is right and whose gradients are wrong.
`meshpar.parallel.grids.convolution` describes the three faults.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar.audit.collectives import Collective, axes_text, find_collectives
from meshpar.audit.hlo import parse_program
from meshpar.audit.needs import CONVOLUTION
from meshpar.collective_kinds import KINDS, WRITTEN_AS
from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import Layout
from meshpar.parallel.grids.convolution import OWN_SCOPE
from meshpar.trace.operations import Operation, Value, operation_line, operations
from meshpar.trace.splits import RULES, Split, elementwise
from meshpar.trace.walk import (
    array_dtype,
    array_shape,
    collective_axes,
    equations,
    programs_in,
)

_REDUCTIONS = (
    *("psum", "psum_invariant", "psum2", "pmax", "pmin"),
    *("reduce_scatter", "psum_scatter"),
)

_PERMUTES = KINDS["collective-permute"].primitives


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """One hazard: its name, the source line, and what to do instead.

    `fatal` says that compiling it may abort the process.
    """

    kind: str
    source: str
    message: str
    fatal: bool = False


def compiled_hazards(rows: Sequence[Collective]) -> list[Hazard]:
    """Return the hazards of a compiled program."""
    return [
        Hazard(
            kind="divergent_permute",
            source=row.source,
            message=(
                f"a collective-permute over {_axes(row.mesh_axes)} stands inside a "
                "conditional: if its devices take different branches, XLA computes "
                "wrong numbers or hangs; move it out of the branch and select its "
                "result with jnp.where"
            ),
        )
        for row in rows
        if row.kind == "collective-permute" and row.in_branch
    ]


def check_divergent(
    text: str, mesh_shape: Mapping[str, int], axis: str = "stage"
) -> None:
    """Check that what one rank or part of the batch does by itself waits for no other.

    Args:
        text: The compiled program.
        mesh_shape: Size of each mesh axis, outermost first.
        axis: Mesh axis whose places differ in what they do: `stage` or `data`.

    Raises:
        InputError: A permute, or a collective over `axis`, is inside a branch or a
            loop that one place runs without the others.
    """
    for row in find_collectives(parse_program(text), mesh_shape):
        waits = row.mesh_axes is None or axis in row.mesh_axes
        if row.in_branch and (waits or row.kind == "collective-permute"):
            option, way_out = _DIVERGING[axis]
            raise InputError(
                f"{option}: {row.source or 'no source line'}: what one place of "
                f"{axis!r} does by itself has {row.kind} over "
                f"{axes_text(row.mesh_axes)}, in which others would not take part; "
                f"{way_out}",
                key="layout.divergent_permute",
            )


_DIVERGING = {
    "stage": ("execution=divergent", "set execution=uniform"),
    "data": ("data_splits", "leave data_splits out"),
}


def traced_hazards(operations: Iterable[Operation], platform: str) -> list[Hazard]:
    """Return the hazards of a trace, before XLA compiles it.

    Args:
        operations: Of the traced function.
        platform: What it is to be compiled for: `cpu`, `gpu` or `tpu`.
    """
    facts, found = platform_named(platform), []
    for operation in operations:
        name = operation.name
        if name == "ragged_all_to_all" and not facts.has_ragged_all_to_all:
            found.append(_not_on_cpu(operation))
        elif name in ("cond", "while"):
            found += _divergent_collectives(operation)
        if not operation.region.partly_manual:
            continue
        if name == "gather":
            found += _sharded_gather(operation)
        elif name in _REDUCTIONS and not facts.sums_16_bits:
            found += _half_all_reduce(operation)
    return list(dict.fromkeys(found))


def _not_on_cpu(operation: Operation) -> Hazard:
    return Hazard(
        kind="ragged_all_to_all",
        source=operation.source,
        message=(
            "XLA:CPU has no ragged_all_to_all; audit it with a target such as "
            "'tpu:v5e:2x4' or 'gpu:h100:1x8', or exchange parts of one size"
        ),
        fatal=True,
    )


def _divergent_collectives(operation: Operation) -> list[Hazard]:
    """Return collectives of a branch or loop that some devices may leave out.

    All devices meet in a permute (XLA:CPU). Those of a branch `compiled_hazards` finds.
    """
    differs = _differs(operation)
    programs = programs_in(operation.equation) if differs else []
    in_loop = operation.name == "while"
    return [
        Hazard(
            kind="divergent_collective",
            source=operation_line(equation) or operation.source,
            message=(
                f"{equation.primitive.name} over {_axes(collective_axes(equation))} in "
                f"a {operation.name} that devices along {_axes(sorted(differs))} may "
                "take differently: those that leave it out are waited for without end; "
                "move it out, or decide by what is alike along them (jax.lax.pmax)"
            ),
        )
        for program in programs
        for equation in equations(program)
        if (
            in_loop
            if equation.primitive.name in _PERMUTES
            else equation.primitive.name in WRITTEN_AS
            and differs & set(collective_axes(equation))
        )
    ]


def _differs(operation: Operation) -> frozenset[str]:
    """Return the manual mesh axes along which a branch or loop may differ."""
    equation = operation.equation
    if operation.name == "while":
        decided = equation.params["cond_jaxpr"].jaxpr.outvars[0]
    else:
        decided = equation.invars[0]
    varying = getattr(decided.aval, "manual_axis_type", None)
    return operation.region.manual & getattr(varying, "varying", frozenset())


def _sharded_gather(operation: Operation) -> list[Hazard]:
    split = operation.operands[0].split
    if split is None:
        return []
    numbers = operation.equation.params["dimension_numbers"]
    axes = frozenset().union(*(split[dim] for dim in numbers.start_index_map))
    if not axes & operation.region.automatic:
        return []
    return [
        Hazard(
            kind="sharded_gather",
            source=operation.source,
            message=(
                "a gather along a dim that is split over "
                f"{_axes(sorted(axes))}, inside a shard_map over "
                f"{_axes(sorted(operation.region.manual))} only: XLA's partitioner may "
                "abort; compare indices (one-hot) instead, or make "
                f"{_axes(sorted(axes))} manual too in a nested shard_map"
            ),
            fatal=True,
        )
    ]


def _half_all_reduce(operation: Operation) -> list[Hazard]:
    dtypes = {str(array_dtype(atom)) for atom in operation.equation.invars}
    if "bfloat16" not in dtypes:
        return []
    return [
        Hazard(
            kind="half_all_reduce",
            source=operation.source,
            message=(
                f"a bfloat16 {operation.equation.primitive.name} inside a shard_map "
                f"over {_axes(sorted(operation.region.manual))}, with "
                f"{_axes(sorted(operation.region.automatic))} left to GSPMD: XLA:CPU "
                "aborts; reduce in float32"
            ),
            fatal=True,
        )
    ]


def _axes(mesh_axes: Iterable[str] | None) -> str:
    return " x ".join(repr(axis) for axis in mesh_axes or ()) or "devices"


_WAY_OUT = (
    "use Conv of meshpar.models.layers.volume or meshpar.parallel's grid_convolution"
)


@dataclass(frozen=True, kw_only=True)
class PlainConvolutions:
    """Check of a traced training program whose gradients would be wrong.

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
        """Raise the error of the first such convolution.

        Args:
            traced: What `jax.jit(f).trace(...)` gives of a step or its gradients.

        Raises:
            InputError: There is one.
        """
        for problem in self.problems(operations(traced.jaxpr)):
            raise problem

    def problems(self, traced: Iterable[Operation]) -> Iterator[InputError]:
        """Yield an error for each such convolution of the forward pass."""
        traced = list(traced)
        splits = KeptSplits(traced)
        for operation in traced:
            if not _is_plain(operation):
                continue
            if any(window > 1 for window in _windows(operation).values()):
                yield from self._problems_at(
                    operation, splits.split(operation.operands[0])
                )

    def _problems_at(
        self, operation: Operation, split: Split | None
    ) -> Iterator[InputError]:
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
        """Yield an error if one split dim alone has a part smaller than the window."""
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
    """Return True for a convolution of a model's forward pass that is not ours."""
    return (
        operation.name == CONVOLUTION
        and OWN_SCOPE not in operation.path
        and "transpose(" not in operation.path
    )


def _windows(operation: Operation) -> dict[int, int]:
    """Return the extent of the window along each dim of the input."""
    equation = operation.equation
    numbers, kernel = equation.params["dimension_numbers"], equation.invars[1]
    apart = equation.params["rhs_dilation"]
    sides = [array_shape(kernel)[dim] for dim in numbers.rhs_spec[2:]]
    reach = [(side - 1) * by + 1 for side, by in zip(sides, apart, strict=True)]
    return dict(zip(numbers.lhs_spec[2:], reach, strict=True))


_WHOLE: frozenset[str] = frozenset()
_CUTS = ("pad", "slice", "dynamic_slice")


class KeptSplits:
    """Splits of the values of a traced function; None of what is not known.

    Args:
        traced: Its operations, in their order.
    """

    def __init__(self, traced: Iterable[Operation]):
        self._traced = list(traced)  # they keep the values, so that no id comes twice
        self._found: dict[int, Split | None] = {}
        for operation in self._traced:
            for value in operation.results:
                self.split(value)

    def split(self, value: Value) -> Split | None:
        """Return the split of one value."""
        if id(value) not in self._found:
            self._found[id(value)] = self._follow(value)
        return self._found[id(value)]

    def _follow(self, value: Value) -> Split | None:
        maker = value.maker
        if maker is None or not value.operands:
            return value.split
        name = maker.primitive.name
        if name == "sharding_constraint":
            return value.split
        given = tuple(self.split(operand) for operand in value.operands)
        if name in _CUTS:
            return given[0]
        if name == "concatenate":
            known = [split for split in given if split is not None]
            axes = zip(*known, strict=True)
            return tuple(_WHOLE.union(*dim) for dim in axes) or None
        if name == "dot_general" and _is_guess(maker, given):
            return None
        return RULES.get(name, elementwise)(maker, given)


def _is_guess(maker: Any, given: tuple[Split | None, ...]) -> bool:
    """Return True if the split of an operand as large as the result is unknown."""
    num_dims = len(array_shape(maker.outvars[0]))
    return any(
        split is None and len(array_shape(atom)) == num_dims
        for split, atom in zip(given, maker.invars, strict=True)
    )


def unpadded(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array before its sides were padded, or joined to what it has.

    Args:
        value: It.
        shape: Its own.
    """
    while value.operands and value.maker is not None:
        if value.maker.primitive.name not in ("pad", "concatenate"):
            break
        shapes = [array_shape(atom) for atom in value.maker.invars]
        largest = max(
            (at for at, other in enumerate(shapes) if len(other) == len(shape)),
            key=lambda at: shapes[at],
        )
        value, shape = value.operands[largest], shapes[largest]
    return shape
