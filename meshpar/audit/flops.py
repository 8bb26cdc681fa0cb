"""Matmuls of a compiled program: FLOPs, bytes and seconds, with trip counts.

A multiply and an add are two. Elementwise work is left out, as in model FLOPs. The text
shows no matmul of a kernel (a Pallas kernel, or XLA:TPU's own of `ragged_dot`): it
counts by its own cost estimate, or by the path that our program gives it
(`meshpar.hardware.attention_kernels`), or is named as not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshpar.audit.flow import Place, called, places
from meshpar.audit.hlo import (
    ArrayShape,
    Computation,
    HloError,
    Instruction,
    Program,
    shape_arrays,
)
from meshpar.hardware.device import Device, matmul_s
from meshpar.hardware.splash_kernels import splash_flops

_NO_WORK = (
    *("Sharding", "TopK", "AllocateBuffer", "MoveToHost", "MoveToDevice"),
    "PrepareAsyncCall",  # What a SparseCore is given before it starts.
    *("AssumeGatherIndicesInBound", "ConcatBitcast", "AsyncCollective"),
)
_RAGGED_DOT_TABLES = "ragged-dot-metadata"
"""XLA:TPU's kernel of whole numbers before the one that multiplies."""

_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_MATMUL_CALL = re.compile(r"matmul|gemm", re.IGNORECASE)
_ATTENTION_CALL = re.compile(r"fmha", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class UncountedCall:
    """A custom call that may compute, but does not say how much.

    Args:
        name: Of a Pallas kernel its own, of others that of what they call.
        source: `file:line` of the user's code.
        executions: In one run of the program.
    """

    name: str
    source: str
    executions: int


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matmul operations per device in one run of the program.

    Args:
        total: All that could be counted; those in branches as if each branch ran.
        uncounted: What could not, once for each name and line.
    """

    total: int
    uncounted: tuple[UncountedCall, ...]


def program_flops(program: Program) -> Flops:
    """Count the operations of every dot, convolution, library matmul and kernel.

    Raises:
        HloError: A dot or convolution cannot be read; the message names its line.
    """
    total, uncounted = 0, Counter[tuple[str, str]]()
    for name, at in places(program).items():
        computation = program.computations[name]
        executions = sum(place.executions for place in at)
        for instruction in computation.instructions:
            flops = instruction_flops(program, computation, instruction)
            if flops is None:
                # A Pallas kernel's own name, as all of them have one target.
                *_, own, last = "", *instruction.op_path.split("/")
                own = own if last == "pallas_call" else ""
                call = (own or _call_target(instruction), program.source(instruction))
                uncounted[call] += executions
            else:
                total += flops * executions
    calls = (
        UncountedCall(name=name, source=source, executions=executions)
        for (name, source), executions in uncounted.items()
    )
    return Flops(total=total, uncounted=tuple(calls))


def instruction_flops(
    program: Program, computation: Computation, instruction: Instruction
) -> int | None:
    """Return the FLOPs of one instruction; 0 if no matmul, None if unknown.

    Raises:
        HloError: It is a dot or convolution that cannot be read.
    """
    try:
        return _flops(program, computation, instruction)
    except HloError:
        raise
    except (ValueError, IndexError) as error:
        problem = f"a {instruction.opcode} whose dims do not agree ({error})"
        raise HloError(instruction.line, instruction.name, problem) from error


def _flops(
    program: Program, computation: Computation, instruction: Instruction
) -> int | None:
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands: list[ArrayShape | None] = []
    for index in range(min(2, len(instruction.operands))):
        operand = program.operand(computation, instruction, index)
        arrays = list(shape_arrays(operand.shape))
        operands.append(arrays[0] if len(arrays) == 1 else None)
    if instruction.opcode == "custom-call":
        return _call_flops(instruction, operands)
    arrays = [operand for operand in operands if operand is not None]
    if len(arrays) < 2:
        problem = f"a {instruction.opcode} needs two arrays"
        raise HloError(instruction.line, instruction.name, problem)
    if instruction.opcode == "dot":
        text = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        contracted = [arrays[0].dims[int(dim)] for dim in text.split(",") if dim]
        return 2 * _result_size(instruction) * math.prod(contracted)
    return _convolution_flops(instruction, *arrays)


def _result_size(instruction: Instruction) -> int:
    return math.prod(next(shape_arrays(instruction.shape)).dims)


def _call_target(instruction: Instruction) -> str:
    return instruction.attribute(r'custom_call_target="([^"]*)"') or instruction.name


def _call_flops(
    instruction: Instruction, operands: list[ArrayShape | None]
) -> int | None:
    target = _call_target(instruction)
    if any(name in target for name in _NO_WORK) or not operands:
        return 0
    if instruction.name.startswith(_RAGGED_DOT_TABLES):
        return 0
    # What the program says of its own call, of tiles left out too, comes first.
    made = splash_flops(instruction.op_path)
    if made is not None:
        return made
    text = instruction.attributes
    estimate = _ESTIMATE.search(text)
    if estimate:
        return int(estimate[1])
    dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', text)
    if _ATTENTION_CALL.search(target) or not _MATMUL_CALL.search(target):
        return None
    if dims is None or operands[0] is None:
        return None
    indices = [int(dim) for dim in re.findall(r"\d+", dims[1])]
    contracted = math.prod(operands[0].dims[index] for index in indices)
    return 2 * _result_size(instruction) * contracted


def _convolution_flops(
    instruction: Instruction, left: ArrayShape, right: ArrayShape
) -> int:
    # XLA:TPU writes dots as convolutions; batch dims become spatial ones whose window
    # meets one value of the other operand only, so positions are counted one by one.
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    if labels is None:
        raise HloError(instruction.line, instruction.name, "no dim_labels")
    inputs, _, rest = labels.partition("_")
    kernel, _, outputs = rest.partition("->")
    result = next(shape_arrays(instruction.shape))
    names = [name for name in kernel if name.isdigit()]
    windows = _windows(instruction, len(names))
    flops = 2 * left.dims[inputs.index("b")]
    flops *= right.dims[kernel.index("i")] * right.dims[kernel.index("o")]
    for name, window in zip(sorted(names), windows, strict=True):
        flops *= window.meetings(
            num_inputs=left.dims[inputs.index(name)],
            num_outputs=result.dims[outputs.index(name)],
        )
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    return flops // groups


class _Window(NamedTuple):
    size: int
    stride: int
    pad_low: int
    input_dilation: int
    kernel_dilation: int

    def meetings(self, *, num_inputs: int, num_outputs: int) -> int:
        """Count pairs of an output and a kernel position that meet an input value."""
        outputs = np.arange(num_outputs)[:, None] * self.stride - self.pad_low
        position = outputs + np.arange(self.size) * self.kernel_dilation
        reach = (num_inputs - 1) * self.input_dilation
        inside = (position >= 0) & (position <= reach)
        return int((inside & (position % self.input_dilation == 0)).sum())


def _windows(instruction: Instruction, num_dims: int) -> list[_Window]:
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(part.split("=") for part in text.split())

    def values(name: str, default: int) -> list[int]:
        if name not in fields:
            return [default] * num_dims
        # A pad is two numbers: `low_high`.
        return [int(value.partition("_")[0]) for value in fields[name].split("x")]

    columns = (  # in the order of `_Window`
        values("size", 1),
        values("stride", 1),
        values("pad", 0),
        values("lhs_dilate", 1),
        values("rhs_dilate", 1),
    )
    return [_Window(*numbers) for numbers in zip(*columns, strict=True)]


_HALVES = ("bf16", "f16")


class Work(NamedTuple):
    """Matmuls of one execution: FLOPs, bytes of operands and results, seconds."""

    flops: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def times(self, count: int) -> Work:
        """Return `count` times the work."""
        return Work(self.flops * count, self.num_bytes * count, self.seconds * count)


@dataclass
class Matmuls:
    """Matmuls of a program's instructions, loops and fusions included.

    Args:
        program: The compiled program.
        device: Whose table gives the seconds; None leaves them 0.
    """

    program: Program
    device: Device | None
    _of_computation: dict[str, Work] = field(default_factory=dict)

    def all_work(self) -> Work:
        """Return the work of one run of the program."""
        return self._inside(self.program.entry)

    def work(self, computation: Computation, instruction: Instruction) -> Work:
        """Return the work of one instruction, its loops multiplied out."""
        parts = [self._own(computation, instruction)]
        for callee, place in called(self.program, computation, instruction, Place()):
            parts.append(self._inside(callee).times(place.executions))
        return _total(parts)

    def _inside(self, name: str) -> Work:
        if name not in self._of_computation:
            computation = self.program.computations[name]
            self._of_computation[name] = _total(
                self.work(computation, each) for each in computation.instructions
            )
        return self._of_computation[name]

    def _own(self, computation: Computation, instruction: Instruction) -> Work:
        flops = instruction_flops(self.program, computation, instruction)
        if not flops:
            return Work()
        operands = [
            self.program.operand(computation, instruction, index)
            for index in range(len(instruction.operands))
        ]
        num_bytes = instruction.bytes + sum(operand.bytes for operand in operands)
        if self.device is None:
            return Work(flops, num_bytes)
        first = next(shape_arrays(operands[0].shape)).dtype
        # Devices list no peak of 8 bits, which no program of ours uses: bf16's then.
        is_half = first in _HALVES or first.startswith("f8")
        peak = "bf16" if is_half else "fp32"
        seconds = matmul_s(self.device, peak, flops, num_bytes)
        return Work(flops, num_bytes, seconds)


def _total(parts: Iterable[Work]) -> Work:
    flops, num_bytes, seconds = 0, 0, 0.0
    for part in parts:
        flops += part.flops
        num_bytes += part.num_bytes
        seconds += part.seconds
    return Work(flops, num_bytes, seconds)
