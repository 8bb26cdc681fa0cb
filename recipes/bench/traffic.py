"""Collectives of a compiled program: number and bytes of each kind."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)

_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z-]*)\(([^)]*)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply)=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def collective_traffic(program: str) -> tuple[Counter[str], Counter[str]]:
    """Runs and bytes per device of each kind of collective, in one run of a program.

    A collective counts the larger of its operands and results, the whole array that
    it gathers or reduces; one inside a loop counts once for every trip.

    Args:
        program: `compiled.as_text()`.
    """
    computations, entry = _computations(program)
    array_bytes = {
        op[1]: _bytes(op[2])
        for lines in computations.values()
        for op in map(_OP.match, lines)
        if op
    }
    runs, moved = Counter(), Counter()
    for line, times in _executed(computations, entry):
        op = _OP.match(line)
        kind = op[3].removesuffix("-start") if op else ""
        if kind in KINDS:
            names = re.findall(r"%([\w.-]+)", op[4])
            operand_bytes = sum(array_bytes[name] for name in names)
            runs[kind] += times
            moved[kind] += times * max(operand_bytes, _bytes(op[2]))
    return runs, moved


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    name = entry = ""
    for line in program.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if header:
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name:
            found[name].append(line)
    return found, entry


def _executed(
    computations: dict[str, list[str]], name: str, times: int = 1
) -> Iterator[tuple[str, int]]:
    for line in computations[name]:
        yield line, times
        trips = _TRIPS.search(line)
        for called in _CALLED.findall(line):
            each = times * int(trips[1]) if trips else times
            yield from _executed(computations, called, each)


def _bytes(shape: str) -> int:
    return sum(
        math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8
        for _, bits, dims in _ARRAY.findall(shape)
    )
