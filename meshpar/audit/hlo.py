"""The text of a compiled XLA program, read into computations and instructions.

Only what an audit needs is kept: names, opcodes, result shapes, operands, attributes as
text, and the source line of each instruction. Reads CPU, GPU and TPU text.
Reference: OpenXLA, "HLO text format" (`HloModule::ToString`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshpar.errors import InputError


class HloError(InputError):
    """A text that is no compiled program; the message names the line."""

    def __init__(self, line: int, text: str, problem: str) -> None:
        super().__init__(
            f"line {line} of the program: {problem}: {text.strip()[:120]}",
            key="audit.unreadable_program",
        )


_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"(\w+)\[((?:<=)?\d+(?:,(?:<=)?\d+)*|)](\{[^{}]*\})?")
_BETWEEN = re.compile(r"(?:\s|/\*.*?\*/)*")


@dataclass(frozen=True)
class ArrayShape:
    """One array: `dtype` as XLA writes it, sizes of its dims, its memory space.

    Memory space 0 is the device's memory; 5 is the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its values; small types are counted packed, and rounded up."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)


Shape = ArrayShape | tuple["Shape", ...]


def shape_arrays(shape: Shape) -> Iterator[ArrayShape]:
    """Yield every array of a shape, in order."""
    if isinstance(shape, ArrayShape):
        yield shape
        return
    for part in shape:
        yield from shape_arrays(part)


def parse_shape(text: str, start: int = 0) -> tuple[Shape, int]:
    """Parse the shape at `start`; return it and where it ends.

    Raises:
        ValueError: There is none, or its dtype is unknown.

    Example:
        >>> parse_shape("(f32[8,4]{1,0}, s32[])")[0]
        (ArrayShape(dtype='f32', dims=(8, 4), memory_space=0), \
ArrayShape(dtype='s32', dims=(), memory_space=0))
    """
    start = _past_between(text, start)
    if not text.startswith("(", start):
        return _parse_array(text, start)
    parts, position = [], _past_between(text, start + 1)
    while not text.startswith(")", position):
        part, position = parse_shape(text, position)
        parts.append(part)
        position = _past_between(text, position)
        if text.startswith(",", position):
            position = _past_between(text, position + 1)
        elif not text.startswith(")", position):
            raise ValueError("a tuple shape that does not end")
    return tuple(parts), position + 1


def _past_between(text: str, start: int) -> int:
    between = _BETWEEN.match(text, start)
    return between.end() if between else start


def _parse_array(text: str, start: int) -> tuple[ArrayShape, int]:
    match = _ARRAY.match(text, start)
    if not match:
        raise ValueError(f"no shape at column {start + 1}")
    _bits(match[1])
    dims = tuple(int(dim.removeprefix("<=")) for dim in match[2].split(",") if dim)
    space = re.search(r"S\((\d+)\)", match[3] or "")
    return ArrayShape(match[1], dims, int(space[1]) if space else 0), match.end()


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if re.fullmatch(r"f8e\w+", dtype):
        return 8
    raise ValueError(f"unknown dtype {dtype!r}")


_ROWS = {
    "FileNames": re.compile(r'(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)\b.*\}$"),
    "StackFrames": re.compile(
        r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}$"
    ),
}
_THIRD_PARTY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|^<|[/\\]lib[/\\]python3")


@dataclass(frozen=True)
class SourceTable:
    """The program's tables of files, lines and stack frames.

    Args:
        files: File id -> path.
        locations: Location id -> (file id, line).
        frames: Frame id -> (location id, id of the caller's frame or 0).
    """

    files: dict[int, str]
    locations: dict[int, tuple[int, int]]
    frames: dict[int, tuple[int, int]]

    @classmethod
    def parse(cls, text: str) -> SourceTable:
        """Parse the tables at the head of a program's text; empty if it has none.

        Raises:
            HloError: A row cannot be read.
        """
        rows: dict[str, dict[int, tuple]] = {name: {} for name in _ROWS}
        section = ""
        for number, line in enumerate(text.splitlines(), start=1):
            if not line[:1].isdigit():
                section = line.strip()
            elif section in _ROWS:
                row = _ROWS[section].match(line)
                if not row:
                    raise HloError(number, line, f"no row of {section}")
                rows[section][int(row[1])] = row.groups()[1:]
        parents = {key: int(up or 0) for key, (_, up) in rows["StackFrames"].items()}
        # Some versions of XLA print a caller's id one too high, so that the outermost
        # frame seems to call itself.
        offset = 1 if any(parent >= key for key, parent in parents.items()) else 0
        return cls(
            files={key: name for key, (name,) in rows["FileNames"].items()},
            locations={
                key: (int(file), int(line))
                for key, (file, line) in rows["FileLocations"].items()
            },
            frames={
                key: (int(location), parents[key] - offset)
                for key, (location, _) in rows["StackFrames"].items()
            },
        )

    def source(self, attributes: str) -> str:
        """Return `file:line` of an instruction's own code; empty if unknown.

        The innermost frame outside of installed packages; if there is none, the
        innermost.
        """
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes)
        if direct:
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", attributes)
        lines = self._stack(int(frame[1])) if frame else []
        own = [line for line in lines if not _THIRD_PARTY.search(line)]
        return (own or lines or [""])[0]

    def _stack(self, frame: int) -> list[str]:
        lines, seen = [], set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            if file in self.files:
                lines.append(f"{self.files[file]}:{line}")
        return lines


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Args:
        name: Unique in its computation.
        opcode: Such as `all-gather-start`.
        shape: Of the result; nested tuples of arrays.
        operands: Names of instructions of the same computation.
        attributes: All text after the operands.
        line: Where it stands in the text, from 1.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    attributes: str
    line: int

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(array.bytes for array in shape_arrays(self.shape))

    def attribute(self, pattern: str) -> str | None:
        """The first group of `name=` + a pattern, if the attribute is there."""
        match = re.search(rf"(?:^|[ ,]){pattern}", self.attributes)
        return match[1] if match else None

    @property
    def op_path(self) -> str:
        """JAX's path of the operation, such as `jit(f)/while/body/dot_general`."""
        return self.attribute(r'metadata=\{[^}]*?op_name="([^"]*)"') or ""


@dataclass(frozen=True)
class Computation:
    """A named list of instructions; the last one, or the ROOT, is its result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
        computations: By name.
        entry: Name of the one that runs first.
        sources: Where instructions come from.
        text: What it was read from.
    """

    computations: dict[str, Computation]
    entry: str
    sources: SourceTable
    text: str

    def operand(
        self, computation: Computation, instruction: Instruction, index: int
    ) -> Instruction:
        """The instruction that gives an operand.

        Raises:
            HloError: There is none of that name.
        """
        name = instruction.operands[index]
        if name not in computation.by_name:
            problem = f"no instruction gives the operand {name!r}"
            raise HloError(instruction.line, instruction.name, problem)
        return computation.by_name[name]

    def computation(self, name: str, used_by: Instruction) -> Computation:
        """A computation by its name.

        Raises:
            HloError: There is none of that name.
        """
        if name not in self.computations:
            raise HloError(used_by.line, used_by.name, f"no computation {name!r}")
        return self.computations[name]

    def source(self, instruction: Instruction) -> str:
        """`file:line` of its own code, not of an installed package; may be empty."""
        return self.sources.source(instruction.attributes)


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)|(?:^|[ ,])([A-Za-z_][\w.\-]*)(?=\s*(?:,|$))")


def parse_program(text: str) -> Program:
    """Parse the text of `compiled.as_text()`.

    Raises:
        HloError: A line inside a computation cannot be read, a computation does not
            end, or there is no entry.
    """
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, lines in _blocks(text):
        computations[name] = _computation(name, lines)
        entry = name if is_entry else entry
    if entry is None:
        raise HloError(1, text.partition("\n")[0], "no ENTRY computation in the text")
    return Program(computations, entry, SourceTable.parse(text), text)


def _blocks(text: str) -> Iterator[tuple[bool, str, list[tuple[int, str]]]]:
    header: re.Match | None = None
    start = 0
    lines: list[tuple[int, str]] = []
    for number, line in _whole_lines(text):
        if header is None:
            header, start, lines = _HEADER.match(line), number, []
        elif line.startswith("}"):
            yield bool(header[1]), header[2], lines
            header = None
        elif line.strip():
            lines.append((number, line))
    if header is not None:
        raise HloError(start, header[0], "the computation has no end")


def _whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines; an instruction that breaks inside of an attribute as one.

    XLA:TPU prints a kernel's metadata so: `kernel_metadata={`, lines, `}}, ...`.
    """
    first = 0
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not parts:
            if not (line.endswith("{") and _INSTRUCTION.match(line)):
                yield number, line
                continue
            first = number
        parts.append(line)
        if line.startswith("}") and not line.endswith("{"):
            yield first, "".join(parts)
            parts = []
    if parts:
        yield first, "".join(parts)


def _computation(name: str, lines: list[tuple[int, str]]) -> Computation:
    instructions, root = [], None
    for number, line in lines:
        instruction, is_root = _instruction(number, line)
        instructions.append(instruction)
        root = instruction if is_root else root
    if not instructions:
        raise HloError(1, name, "a computation without instructions")
    return Computation(name, tuple(instructions), root or instructions[-1])


def _instruction(number: int, line: str) -> tuple[Instruction, bool]:
    start = _INSTRUCTION.match(line)
    if not start:
        raise HloError(number, line, "no instruction of the form name = shape opcode()")
    try:
        shape, after_shape = parse_shape(line, start.end())
    except ValueError as error:
        raise HloError(number, line, str(error)) from error
    opcode = _OPCODE.match(line, after_shape)
    if not opcode:
        raise HloError(number, line, "no opcode after the shape")
    end = _closing(line, opcode.end() - 1)
    if end is None:
        raise HloError(number, line, f"the operands of {opcode[1]} do not end")
    inside = line[opcode.end() : end]
    takes_operands = opcode[1] not in ("constant", "parameter", "iota")
    instruction = Instruction(
        name=start[2],
        opcode=opcode[1],
        shape=shape,
        operands=tuple(match[1] or match[2] for match in _OPERAND.finditer(inside))
        if takes_operands
        else (inside,),
        attributes=line[end + 1 :].lstrip(", "),
        line=number,
    )
    return instruction, bool(start[1])


def _closing(line: str, opening: int) -> int | None:
    depth = 0
    for match in re.compile(r"[()]").finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return None
