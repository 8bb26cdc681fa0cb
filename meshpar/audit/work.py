"""The matmuls that an instruction runs: their FLOPs, bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.audit.flops import instruction_flops
from meshpar.audit.hlo import Computation, Instruction, Program
from meshpar.audit.loops import Place, called
from meshpar.audit.shapes import arrays_of
from meshpar.hardware.device import Device, matmul_s

_HALVES = ("bf16", "f16")


class Work(NamedTuple):
    """Matmuls of one execution: FLOPs, bytes of operands and results, seconds."""

    flops: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def times(self, count: int) -> Work:
        """The same so many times."""
        return Work(self.flops * count, self.num_bytes * count, self.seconds * count)


@dataclass
class Matmuls:
    """The matmuls of a program's instructions, those of loops and fusions with them.

    Args:
        program: The compiled program.
        device: Whose table gives the seconds; None leaves them 0.
    """

    program: Program
    device: Device | None
    _of_computation: dict[str, Work] = field(default_factory=dict)

    def of(self, computation: Computation, instruction: Instruction) -> Work:
        """Those of one instruction, as often as its loops run them."""
        parts = [self._own(computation, instruction)]
        for callee, place in called(self.program, computation, instruction, Place()):
            parts.append(self._inside(callee).times(place.executions))
        return _total(parts)

    def _inside(self, name: str) -> Work:
        if name not in self._of_computation:
            computation = self.program.computations[name]
            self._of_computation[name] = _total(
                self.of(computation, each) for each in computation.instructions
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
        first = next(arrays_of(operands[0].shape)).dtype
        seconds = matmul_s(self.device, _peak(first), flops, num_bytes)
        return Work(flops, num_bytes, seconds)


def _total(parts: Iterable[Work]) -> Work:
    flops, num_bytes, seconds = 0, 0, 0.0
    for part in parts:
        flops += part.flops
        num_bytes += part.num_bytes
        seconds += part.seconds
    return Work(flops, num_bytes, seconds)


def _peak(dtype: str) -> str:
    """The name of the peak that a matmul of XLA's dtype runs at.

    Devices list none of 8 bits, which no program of ours uses: bf16's then.
    """
    return "bf16" if dtype in _HALVES or dtype.startswith("f8") else "fp32"
