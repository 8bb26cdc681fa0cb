"""Every collective of a compiled program: its mesh axes, its bytes, how often it runs.

`meshpar.collective_kinds` has what each kind sends of its array.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshpar.audit.flow import Place, Use, places, uses, wrapped_by
from meshpar.audit.hlo import (
    ArrayShape,
    Computation,
    HloError,
    Instruction,
    Program,
    Shape,
    shape_arrays,
)
from meshpar.collective_kinds import KINDS

Groups = tuple[tuple[int, ...], ...]
"""Devices by their position in the mesh, row by row."""

_NUMBERS = r"[\d, ]*"
_LISTED = re.compile(rf"replica_groups=\{{((?:\{{{_NUMBERS}\}},?\s*)*)\}}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ORDER = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
_MESH = re.compile(rf"replica_groups=@?mesh\[([^\]]*)\]{_ORDER} \{{([^}}]*)\}}")
_PAIRS = re.compile(rf"source_target_pairs=\{{((?:\{{{_NUMBERS}\}},?\s*)*)\}}")


def parse_groups(attributes: str, num_devices: int) -> Groups | None:
    """Parse the groups of a collective; None if its attributes have none.

    All four forms: `{{0,1},{2,3}}`, `{}` (everyone), `[2,2]<=[4]` with or without a
    transpose, and `mesh['a'=2,'b'=2] {'b'}`, whose devices may be in another order:
    `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`.

    Raises:
        ValueError: A list that is cut short, sizes that do not agree, or a device
            that is not there.
    """
    if "replica_groups=" not in attributes:
        return None
    for pattern, read in ((_MESH, _mesh), (_IOTA, _iota), (_LISTED, _listed)):
        match = pattern.search(attributes)
        if match:
            groups = read(*match.groups()) or (tuple(range(num_devices)),)
            _check_devices(itertools.chain(*groups), num_devices)
            return groups
    raise ValueError("replica_groups cannot be read")


def parse_pairs(attributes: str, num_devices: int) -> tuple[tuple[int, int], ...]:
    """Parse (source, target) of every transfer of a collective-permute.

    Raises:
        ValueError: There are none, or one is no pair.
    """
    match = _PAIRS.search(attributes)
    if not match:
        raise ValueError("source_target_pairs cannot be read")
    pairs = _listed(match[1])
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a source_target_pair does not have two devices")
    _check_devices(itertools.chain(*pairs), num_devices)
    return tuple((source, target) for source, target in pairs)


def group_mesh_axes(
    groups: Groups, mesh_shape: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the mesh axes whose devices are grouped; None if no product fits.

    Axes of size 1 are never named; groups of one device are ().

    Example:
        >>> group_mesh_axes(((0, 1), (2, 3)), {"data": 2, "tensor": 2})
        ('tensor',)
        >>> group_mesh_axes(((0, 3), (1, 2)), {"data": 2, "tensor": 2}) is None
        True
    """
    found = {frozenset(group) for group in groups}
    sizes = list(mesh_shape.values())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if len(set(itertools.chain(*groups))) != ids.size:
        return None
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    names = tuple(mesh_shape)
    for count in range(len(dims) + 1):
        for chosen in itertools.combinations(dims, count):
            size = math.prod(sizes[dim] for dim in chosen)
            if {len(group) for group in groups} != {size}:
                continue
            rows = np.moveaxis(ids, chosen, range(-count, 0)).reshape(-1, size)
            if {frozenset(row) for row in rows.tolist()} == found:
                return tuple(names[dim] for dim in chosen)
    return None


def divided_mesh_axis(
    groups: Groups, mesh_shape: Mapping[str, int]
) -> tuple[str, int] | None:
    """Return a mesh axis that the groups cut into parts, and their stride along it.

    None unless the groups are equal parts of one mesh axis.

    Example:
        >>> divided_mesh_axis(((0, 2), (1, 3)), {"expert": 4})
        ('expert', 2)
    """
    size = len(groups[0])
    for axis, whole in mesh_shape.items():
        for stride in range(1, whole // size + 1) if size > 1 else ():
            if whole % (stride * size) or whole == size:
                continue
            cut = cut_mesh_axis(mesh_shape, axis, stride, size)
            if group_mesh_axes(groups, cut) == (axis,):
                return axis, stride
    return None


def cut_mesh_axis(
    mesh_shape: Mapping[str, int], axis: str, stride: int, size: int
) -> dict[str, int]:
    """Return the mesh in which `axis` is `size` devices, `stride` apart.

    Example:
        >>> cut_mesh_axis({"data": 2, "expert": 8}, "expert", stride=4, size=2)
        {'data': 2, 'expert>': 1, 'expert': 2, 'expert<': 4}
    """
    cut: dict[str, int] = {}
    for each, whole in mesh_shape.items():
        if each == axis:
            cut[f"{axis}>"] = whole // (stride * size)
        cut[each] = size if each == axis else whole
        if each == axis:
            cut[f"{axis}<"] = stride
    return cut


def pair_mesh_axes(
    pairs: tuple[tuple[int, int], ...], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the mesh axes along which a collective-permute moves."""
    sizes = tuple(mesh_shape.values())
    if not pairs:
        return ()
    coordinates = np.unravel_index(np.array(pairs), sizes)
    return tuple(
        name
        for name, along in zip(mesh_shape, coordinates, strict=True)
        if (along[:, 0] != along[:, 1]).any()
    )


def _listed(text: str) -> Groups:
    return tuple(map(_numbers, re.findall(r"\{([^{}]*)\}", text)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _ids(shape: str, order: str | None) -> np.ndarray:
    """Return device numbers in an array of a shape, its dims then reordered."""
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)) if order else ids


def _iota(shape: str, source: str, order: str | None) -> Groups:
    ids, rows = _ids(source, order), _numbers(shape)
    if math.prod(rows) != ids.size:
        raise ValueError(f"groups [{shape}] of the {ids.size} devices [{source}]")
    return tuple(tuple(row) for row in ids.reshape(rows[0], -1).tolist())


def _mesh(
    sizes_text: str, shape: str | None, order: str | None, axes_text: str
) -> Groups:
    sizes = {
        name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes_text)
    }
    names = re.findall(r"'([^']+)'", axes_text)
    unknown = [name for name in names if name not in sizes]
    if unknown or not sizes:
        raise ValueError(f"no mesh axis {unknown} in [{sizes_text}]")
    num_devices = math.prod(sizes.values())
    ids = _ids(shape or str(num_devices), order).reshape(tuple(sizes.values()))
    dims = [list(sizes).index(name) for name in names]
    moved = np.moveaxis(ids, dims, range(-len(dims), 0))
    size = math.prod(sizes[name] for name in names)
    return tuple(tuple(row) for row in moved.reshape(-1, size).tolist())


def _check_devices(devices: itertools.chain, num_devices: int) -> None:
    for device in devices:
        if not 0 <= device < num_devices:
            raise ValueError(f"device {device} of a program for {num_devices} devices")


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
        part: Mesh axis that the groups are parts of, and the distance along it between
            devices of a group; None if they are not.
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
    part: tuple[str, int] | None = None

    @property
    def along(self) -> tuple[str, ...] | None:
        """Mesh axes that it moves along, also if its groups are parts of one."""
        return self.mesh_axes if self.part is None else self.part[:1]

    @property
    def operation(self) -> str:
        """The last part of its path: what it serves, or where it was written."""
        last = self.op_path.split("/")[-1].split("[")[0].lstrip("(")
        while last.endswith(")") and last.count(")") > last.count("("):
            last = last.removesuffix(")")  # Of a bracket around joined paths.
        return last

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the operations that XLA joined, written `before/(path:path)`."""
        joined = _JOINED.search(self.op_path)
        if not joined:
            return (self.op_path,)
        before = self.op_path[: joined.start(1)]
        return tuple(dict.fromkeys(before + path for path in joined[2].split(":")))


def axes_text(mesh_axes: tuple[str, ...] | None) -> str:
    """Return mesh axes as reports write them: `data+fsdp`, `?` for no product."""
    return "?" if mesh_axes is None else "+".join(mesh_axes)


def find_collectives(
    program: Program, mesh_shape: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Return every collective that runs, in the order of the text.

    A start and its done are one, and so is a wrapper and what it wraps; of a collective
    that XLA:TPU fuses with the work beside it, its start alone stands for it.

    Args:
        program: The compiled program.
        mesh_shape: Size of each mesh axis, outermost first; device i of the program is
            the i-th of the mesh.

    Raises:
        HloError: A collective cannot be read; the message names its line.
    """
    found, callers = [], wrapping_instructions(program)
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
        """True if each device keeps its part only: XLA:TPU writes that as a fusion."""
        return self.computation.name.startswith("all-reduce-scatter")

    @property
    def goes_on(self) -> bool:
        """True if it continues a collective that was started elsewhere.

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
            return list(shape_arrays(self.computation.root.shape))
        shape: Shape = self.instruction.shape
        started = self.instruction.opcode.endswith("-start")
        # An all-reduce-start returns its results alone; the others the operands first.
        if started and isinstance(shape, tuple) and self.kind != "all-reduce":
            if len(shape) < 2:
                raise ValueError(f"{self.instruction.opcode} gives no second part")
            shape = shape[1]
        return list(shape_arrays(shape))

    def payload_bytes(self) -> int:
        if self.kind == "reduce-scatter":
            return sum(operand.bytes for operand in self._operands())
        arrived = sum(array.bytes for array in self.arrived())
        if self.kind != "ragged-all-to-all":
            return arrived
        return min(arrived, self._operands()[0].bytes)

    @property
    def has_path(self) -> bool:
        """True if it or its caller has a path."""
        return any(instruction.op_path for instruction in self._itself())

    def origin(self) -> tuple[str, str]:
        """Return path and source line: its own, its caller's, or its operand's.

        Of arrays that XLA joined, each was made elsewhere: there none is the origin.
        """
        moved = self._operands() if len(self.arrived()) == 1 else []
        for instruction in (*self._itself(), *map(self._made_by, moved)):
            if _NAMES_A_VALUE.search(instruction.op_path):
                instruction = self._used_by(instruction)
            if instruction.op_path:
                return instruction.op_path, self.program.source(instruction)
        return "", ""

    def uses(self) -> tuple[Use, ...]:
        """Return the operations that use what arrives, past its wrapper."""
        computation, instruction = self.wrapper or (self.computation, self.instruction)
        return uses(self.program, computation, instruction)

    def _itself(self) -> list[Instruction]:
        return [self.instruction, *([self.caller] if self.caller else [])]

    def _used_by(self, named: Instruction) -> Instruction:
        """Return the first user, direct or not, whose path names an operation."""
        names = {self.instruction.name}
        for instruction in self.computation.instructions:
            if not names & set(instruction.operands):
                continue
            if instruction.op_path and not _NAMES_A_VALUE.search(instruction.op_path):
                return instruction
            names.add(instruction.name)
        return named

    def _made_by(self, value: Instruction) -> Instruction:
        """Return the instruction that makes a value, past copies and reshapes."""
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


def wrapping_instructions(
    program: Program,
) -> dict[str, tuple[Computation, Instruction]]:
    """Return the fusion or asynchronous start around each computation, by name."""
    return {
        callee: (computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if (
            callee := instruction.attribute(r"calls=%?([\w.\-]+)")
            if instruction.opcode == "fusion"
            else wrapped_by(instruction)
        )
    }


def _row(site: _Site, at: list[Place], mesh_shape: Mapping[str, int]) -> Collective:
    kind, instruction = site.kind, site.instruction
    try:
        mesh_axes, group_size, part = _who(kind, instruction, mesh_shape)
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
        part=part,
    )


def _who(
    kind: str, instruction: Instruction, mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...] | None, int, tuple[str, int] | None]:
    num_devices = math.prod(mesh_shape.values())
    if kind == "collective-permute":
        pairs = parse_pairs(instruction.attributes, num_devices)
        return pair_mesh_axes(pairs, mesh_shape), 2, None
    groups = parse_groups(instruction.attributes, num_devices)
    if groups is None:
        raise ValueError("no replica_groups")
    size, mesh_axes = max(map(len, groups)), group_mesh_axes(groups, mesh_shape)
    part = divided_mesh_axis(groups, mesh_shape) if mesh_axes is None else None
    return mesh_axes, size, part
