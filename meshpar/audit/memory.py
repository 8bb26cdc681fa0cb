"""Memory of a compiled program per device, and its largest arrays by source line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.audit.flow import places
from meshpar.audit.hlo import ArrayShape, Instruction, Program, shape_arrays
from meshpar.hardware.platforms import platform_named

# These make no array of their own.
_VIEWS = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "constant",
    "dynamic-update-slice",
}

_TOTAL = re.compile(r"^Memory Space: default \(.*\n *Total bytes: (\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes per device, as the compiler planned them.

    Args:
        argument_bytes: The program's inputs.
        output_bytes: Its results, those that reuse an input's memory too.
        temp_bytes: All that lives only while it runs.
        alias_bytes: Results that take the place of an input (donated).
        peak_bytes: The most that is in use at once.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int

    @classmethod
    def from_compiled(
        cls, compiled: jax.stages.Compiled, platform: str, printed: str = ""
    ) -> MemoryUse:
        """Read a program's memory from its compiler.

        The peak is the larger of what the compiler reports and inputs, results and
        temporaries together: not every backend counts all three. What residuals moved
        to the host take there, which XLA:GPU counts in, is no device's.

        libtpu's temporaries count arrays that share memory more than once: a program of
        17.7 GB by them compiled for a v5e of 16.9 GB (libtpu of jax 0.10.2). For TPUs
        they are what the total leaves, which decides there whether a program fits.

        Args:
            compiled: The program.
            platform: `cpu`, `gpu` or `tpu`.
            printed: A TPU program's report of memory use, as its compiler printed it;
                without one the total is the most in use at once, which the room between
                arrays adds a few percent to.
        """
        stats: Any = compiled.memory_analysis()
        arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
        kept = arguments + outputs - stats.alias_size_in_bytes
        together = kept + stats.temp_size_in_bytes
        if platform_named(platform).has_own_xla:
            total = _TOTAL.search(printed)
            together = int(total[1]) if total else stats.peak_memory_in_bytes
        on_device = stats.peak_memory_in_bytes - stats.host_temp_size_in_bytes
        return cls(
            argument_bytes=arguments,
            output_bytes=outputs,
            temp_bytes=together - kept,
            alias_bytes=stats.alias_size_in_bytes,
            peak_bytes=max(on_device, together),
        )


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """An array that the program writes, and the source line that asked for it."""

    bytes: int
    dtype: str
    dims: tuple[int, ...]
    opcode: str
    source: str
    op_path: str


def largest_buffers(program: Program, count: int = 10) -> tuple[Buffer, ...]:
    """Return the largest arrays written, one for each source line and shape.

    What a fusion computes inside is never stored and does not count. Arrays may share
    memory at different times: their bytes do not add up to the temporaries.
    """
    found: dict[tuple, Buffer] = {}
    for name, at in places(program).items():
        if all(place.fused for place in at):
            continue
        for instruction in program.computations[name].instructions:
            if instruction.opcode in _VIEWS:
                continue
            source = program.source(instruction)
            for array in shape_arrays(instruction.shape):
                found.setdefault((source, array), _buffer(instruction, array, source))
    return tuple(sorted(found.values(), key=lambda row: -row.bytes)[:count])


def _buffer(instruction: Instruction, array: ArrayShape, source: str) -> Buffer:
    return Buffer(
        bytes=array.bytes,
        dtype=array.dtype,
        dims=array.dims,
        opcode=instruction.opcode,
        source=source,
        op_path=instruction.op_path,
    )
