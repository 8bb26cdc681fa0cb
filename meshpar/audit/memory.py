"""Memory of a compiled program per device, and its largest arrays by source line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from meshpar.audit.hlo import Instruction, Program
from meshpar.audit.loops import places
from meshpar.audit.shapes import ArrayShape, arrays_of

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


_STATS = {
    "argument_size": "argument_size_in_bytes",
    "output_size": "output_size_in_bytes",
    "temp_size": "temp_size_in_bytes",
    "alias_size": "alias_size_in_bytes",
    "peak": "peak_memory_in_bytes",
    "host_temp_size": "host_temp_size_in_bytes",
}
_NOT_EVERYWHERE = {"peak", "host_temp_size"}
_TOTAL = re.compile(r"^Memory Space: default \(.*\n *Total bytes: (\d+)", re.MULTILINE)


def memory_stats(
    compiled: jax.stages.Compiled, platform: str, printed: str = ""
) -> dict[str, int]:
    """What the compiler says of a program's memory, as plain numbers.

    libtpu's temporaries count arrays that share memory more than once: a program of
    17.7 GB by them compiled for a v5e of 16.9 GB (libtpu of jax 0.10.2). For TPUs
    `total`, which decides there whether a program fits, is what counts.

    Args:
        compiled: The program.
        platform: `cpu`, `gpu` or `tpu`.
        printed: A TPU program's report of memory use, as its compiler printed it;
            without one `total` is the most in use at once, which the room between
            arrays adds a few percent to.
    """
    stats = compiled.memory_analysis()
    found = {
        name: int(getattr(stats, field))
        for name, field in _STATS.items()
        if name not in _NOT_EVERYWHERE or hasattr(stats, field)
    }
    total = _TOTAL.search(printed)
    if platform == "tpu" and (total or "peak" in found):
        found["total"] = int(total[1]) if total else found["peak"]
    return found


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
    def of(cls, stats: Mapping[str, int]) -> MemoryUse:
        """From what `memory_stats` gives.

        The peak is the larger of what the compiler reports and inputs, results and
        temporaries together: not every backend counts all three. What residuals moved
        to the host take there, which XLA:GPU counts in, is no device's. A TPU's
        temporaries are what its `total` leaves.
        """
        arguments, outputs = stats["argument_size"], stats["output_size"]
        alias = stats["alias_size"]
        kept = arguments + outputs - alias
        temp = stats.get("total", kept + stats["temp_size"]) - kept
        together = kept + temp
        return cls(
            argument_bytes=arguments,
            output_bytes=outputs,
            temp_bytes=temp,
            alias_bytes=alias,
            peak_bytes=max(
                stats.get("peak", 0) - stats.get("host_temp_size", 0), together
            ),
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
    """The largest arrays written, one for each source line and shape.

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
            source = program.source_of(instruction)
            for array in arrays_of(instruction.shape):
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
