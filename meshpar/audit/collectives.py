"""Every collective of a compiled program: its mesh axes, its bytes, how often it runs.

What each kind sends of its array stands in `meshpar.collective_kinds`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshpar.audit.groups import (
    mesh_axes_of_groups,
    mesh_axes_of_pairs,
    parse_groups,
    parse_pairs,
)
from meshpar.audit.hlo import Computation, HloError, Instruction, Program
from meshpar.audit.loops import Place, places, wrapped_by
from meshpar.audit.shapes import ArrayShape, Shape, arrays_of
from meshpar.audit.users import Use, uses
from meshpar.collective_kinds import KINDS

_NAMES_A_VALUE = re.compile(r"^[^/]+$|/jit$")
"""A path that names an argument, or a call, but not what its value is moved for."""

_JOINED = re.compile(r"(?:^|/)(\((.*:.*)\))$")

_LAYS_OUT = ("bitcast", "copy", "convert", "transpose", "reshape", "fusion")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program; all bytes are per device and execution.

    Args:
        kind: One of `KINDS`.
        mesh_axes: The mesh axes whose devices take part together; None if the groups
            are no product of mesh axes.
        group_size: Devices that take part together; of a collective-permute, 2.
        dtype: Of the arrays, several with `+` between.
        dims: Of each array that arrives.
        payload_bytes: The whole array: gathered, or before it is scattered.
        wire_bytes: What one device sends (`CollectiveKind.sent`).
        executions: In one run of the program.
        counted: Whether the trip counts around it were known.
        is_async: Whether it has a start and a done.
        in_branch: Whether a conditional is around it.
        in_loop: Whether a loop is around it.
        op_path: JAX's path of the operation.
        source: `file:line` of the user's code.
        uses: The operations that use what arrives.
        line: In the text of the program.
        borrows_path: Whether XLA left it no path of its own: `op_path` is that of what
            it moves.
    """

    kind: str
    mesh_axes: tuple[str, ...] | None
    group_size: int
    dtype: str
    dims: tuple[tuple[int, ...], ...]
    payload_bytes: int
    wire_bytes: int
    executions: int
    counted: bool
    is_async: bool
    in_branch: bool
    in_loop: bool
    op_path: str
    source: str
    uses: tuple[Use, ...]
    line: int
    borrows_path: bool = False

    @property
    def operation(self) -> str:
        """The last part of its path: what it serves, or where it was written."""
        last = self.op_path.split("/")[-1].split("[")[0].lstrip("(")
        while last.endswith(")") and last.count(")") > last.count("("):
            last = last.removesuffix(")")  # Of a bracket around joined paths.
        return last

    @property
    def paths(self) -> tuple[str, ...]:
        """Its path, or those of all that XLA joined: it writes `before/(path:path)`."""
        joined = _JOINED.search(self.op_path)
        if not joined:
            return (self.op_path,)
        before = self.op_path[: joined.start(1)]
        return tuple(dict.fromkeys(before + path for path in joined[2].split(":")))


def axes_text(mesh_axes: tuple[str, ...] | None) -> str:
    """Mesh axes as reports write them: `data+fsdp`, or `?` for no product of them."""
    return "?" if mesh_axes is None else "+".join(mesh_axes)


def collectives_of(
    program: Program, mesh_shape: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Every collective that runs, in the order of the text.

    A start and its done are one, and so is a wrapper and what it wraps; of a collective
    that XLA:TPU fuses with the work beside it, its start alone stands for it.

    Args:
        program: The compiled program.
        mesh_shape: Size of each mesh axis, outermost first; device i of the program is
            the i-th of the mesh.

    Raises:
        HloError: A collective cannot be read; the message names its line.
    """
    found, callers = [], callers_of(program)
    for name, at in places(program).items():
        computation = program.computations[name]
        for instruction in computation.instructions:
            if instruction.opcode.removesuffix("-start") in KINDS:
                site = _Site(program, computation, instruction, callers.get(name))
                if not site.goes_on:
                    found.append(_row(site, at, mesh_shape))
    return tuple(sorted(found, key=lambda row: row.line))


@dataclass(frozen=True)
class _Site:
    """A collective's instruction, and the fusion or wrapper that it is inside of."""

    program: Program
    computation: Computation
    instruction: Instruction
    wrapper: tuple[Computation, Instruction] | None

    @property
    def caller(self) -> Instruction | None:
        """The fusion or asynchronous start that it is inside of."""
        return None if self.wrapper is None else self.wrapper[1]

    @property
    def scatters(self) -> bool:
        """Whether each device keeps its part only: XLA:TPU writes that as a fusion."""
        return self.computation.name.startswith("all-reduce-scatter")

    @property
    def goes_on(self) -> bool:
        """Whether it repeats what was started elsewhere.

        XLA:TPU moves a collective in parts, in fusions with the work beside it, and
        writes it out in each: a start, steps that may be in a loop, and a done.
        """
        ends = self.caller is not None and self.caller.name.startswith(
            "async-collective-done"
        )
        return ends or self.computation.name.startswith("async_collective_fusion")

    @property
    def kind(self) -> str:
        if self.scatters:
            return "reduce-scatter"
        return self.instruction.opcode.removesuffix("-start")

    @property
    def is_async(self) -> bool:
        wrapped = self.caller is not None and (
            wrapped_by(self.caller) is not None
            or self.caller.name.startswith("async-collective-start")
        )
        return wrapped or self.instruction.opcode.endswith("-start")

    def arrived(self) -> list[ArrayShape]:
        """The arrays that it delivers, without those that a start carries along."""
        if self.scatters:
            return list(arrays_of(self.computation.root.shape))
        shape: Shape = self.instruction.shape
        started = self.instruction.opcode.endswith("-start")
        # An all-reduce-start returns its results alone; the others the operands first.
        if started and isinstance(shape, tuple) and self.kind != "all-reduce":
            if len(shape) < 2:
                raise ValueError(f"{self.instruction.opcode} gives no second part")
            shape = shape[1]
        return list(arrays_of(shape))

    def payload_bytes(self) -> int:
        if self.kind != "reduce-scatter":
            return sum(array.bytes for array in self.arrived())
        return sum(operand.bytes for operand in self._operands())

    @property
    def has_path(self) -> bool:
        """Whether it, or its caller, has a path."""
        return any(instruction.op_path for instruction in self._itself())

    def origin(self) -> tuple[str, str]:
        """Path and source line: its own, its caller's, or those of what it moves.

        Of arrays that XLA joined, each was made elsewhere: there none is the origin.
        """
        moved = self._operands() if len(self.arrived()) == 1 else []
        for instruction in (*self._itself(), *map(self._made_by, moved)):
            if _NAMES_A_VALUE.search(instruction.op_path):
                instruction = self._used_by(instruction)
            if instruction.op_path:
                return instruction.op_path, self.program.source_of(instruction)
        return "", ""

    def uses(self) -> tuple[Use, ...]:
        """The operations that use what arrives, of a wrapped one after its wrapper."""
        computation, instruction = self.wrapper or (self.computation, self.instruction)
        return uses(self.program, computation, instruction)

    def _itself(self) -> list[Instruction]:
        return [self.instruction, *([self.caller] if self.caller else [])]

    def _used_by(self, named: Instruction) -> Instruction:
        """The first user whose path names an operation, directly or through others."""
        names = {self.instruction.name}
        for instruction in self.computation.instructions:
            if not names & set(instruction.operands):
                continue
            if instruction.op_path and not _NAMES_A_VALUE.search(instruction.op_path):
                return instruction
            names.add(instruction.name)
        return named

    def _made_by(self, value: Instruction) -> Instruction:
        """What makes a value, through what only lays it out otherwise."""
        while not value.op_path and value.opcode in _LAYS_OUT:
            if len(value.operands) != 1:
                break
            value = self.program.operand(self.computation, value, 0)
        return value

    def _operands(self) -> list[Instruction]:
        return [
            self.program.operand(self.computation, self.instruction, index)
            for index in range(len(self.instruction.operands))
        ]


def callers_of(program: Program) -> dict[str, tuple[Computation, Instruction]]:
    """Computation inside of a fusion or asynchronous start -> that, and where."""
    return {
        callee: (computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if (callee := _inside_of(instruction))
    }


def _inside_of(instruction: Instruction) -> str | None:
    if instruction.opcode == "fusion":
        return instruction.attribute(r"calls=%?([\w.\-]+)")
    return wrapped_by(instruction)


def _row(site: _Site, at: list[Place], mesh_shape: Mapping[str, int]) -> Collective:
    kind, instruction = site.kind, site.instruction
    try:
        mesh_axes, group_size = _who(kind, instruction, mesh_shape)
        arrived, payload = site.arrived(), site.payload_bytes()
    except HloError:
        raise
    except ValueError as error:
        raise HloError(instruction.line, instruction.name, str(error)) from error
    op_path, source = site.origin()
    share, of = KINDS[kind].sent(group_size)
    return Collective(
        kind=kind,
        mesh_axes=mesh_axes,
        group_size=group_size,
        dtype="+".join(dict.fromkeys(array.dtype for array in arrived)),
        dims=tuple(array.dims for array in arrived),
        payload_bytes=payload,
        wire_bytes=payload * share // of,
        executions=sum(place.executions for place in at),
        counted=all(place.counted for place in at),
        is_async=site.is_async,
        in_branch=any(place.in_branch for place in at),
        in_loop=any(place.in_loop for place in at),
        op_path=op_path,
        source=source,
        uses=site.uses(),
        line=instruction.line,
        borrows_path=bool(op_path) and not site.has_path,
    )


def _who(
    kind: str, instruction: Instruction, mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...] | None, int]:
    num_devices = math.prod(mesh_shape.values())
    if kind == "collective-permute":
        pairs = parse_pairs(instruction.attributes, num_devices)
        return mesh_axes_of_pairs(pairs, mesh_shape), 2
    groups = parse_groups(instruction.attributes, num_devices)
    if groups is None:
        raise ValueError("no replica_groups")
    return mesh_axes_of_groups(groups, mesh_shape), max(map(len, groups))
