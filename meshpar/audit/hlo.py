"""The text of a compiled XLA program, read into computations and instructions.

Only what an audit needs is kept: names, opcodes, result shapes, operands, attributes as
text, and where in the user's source an instruction comes from. CPU, GPU and TPU text.
Reference: OpenXLA, "HLO text format" (`HloModule::ToString`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshpar.audit.hlo_error import HloError
from meshpar.audit.shapes import Shape, arrays_of, parse_shape
from meshpar.audit.sources import SourceTable


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
        return sum(array.bytes for array in arrays_of(self.shape))

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

    def source_of(self, instruction: Instruction) -> str:
        """`file:line` of its own code, not of an installed package; may be empty."""
        return self.sources.of(instruction.attributes)


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)|(?:^|[ ,])([A-Za-z_][\w.\-]*)(?=\s*(?:,|$))")


def parse_program(text: str) -> Program:
    """The program that `compiled.as_text()` describes.

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
        operands=_operands(inside) if takes_operands else (inside,),
        attributes=line[end + 1 :].lstrip(", "),
        line=number,
    )
    return instruction, bool(start[1])


def _operands(inside: str) -> tuple[str, ...]:
    return tuple(match[1] or match[2] for match in _OPERAND.finditer(inside))


def _closing(line: str, opening: int) -> int | None:
    depth = 0
    for match in re.compile(r"[()]").finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return None
