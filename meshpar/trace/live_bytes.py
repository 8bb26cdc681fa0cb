"""Count the most bytes that a traced program holds at once, in the order it is written.

An array takes memory from the operation that makes it to the last one that reads it.
Values that are computed one by one from other arrays are computed again by each reader,
as XLA fuses them, and take no memory unless a convolution, a matmul or the caller reads
them. XLA's own order and copies may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.hardware.platforms import platform_named
from meshpar.trace.primitives import ELEMENTWISE, JOINS, MOVES, RESHAPES
from meshpar.trace.walk import (
    Loop,
    Program,
    called_program,
    programs_in,
    walk,
    without_constants,
)

_READS_ARRAYS = ("conv_general_dilated", "dot_general", "scan", "while", "cond")
_SAME_MEMORY = RESHAPES | {"sharding_constraint"}
_FUSED = ELEMENTWISE | _SAME_MEMORY | MOVES | JOINS | {"device_put", "iota", "name"}


@dataclass(frozen=True, kw_only=True)
class Live:
    """Memory at the fullest moment of a program.

    Args:
        total_bytes: Bytes of all arrays but the arguments.
        operation: Name of the operation that runs then.
    """

    total_bytes: int
    operation: str


@dataclass(frozen=True)
class _Work:
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    inside_bytes: int


@dataclass
class _Flat:
    """Operations in order, those of calls in their places; arrays are numbered."""

    lanes: int
    sizes: list[int] = field(default_factory=list)
    works: list[_Work] = field(default_factory=list)

    def number(self, atom: Any) -> int:
        """Number an array; None is a number that takes no memory."""
        self.sizes.append(0 if atom is None else _num_bytes(atom, self.lanes))
        return len(self.sizes) - 1


def most_live(program: ClosedJaxpr, lanes: int = 1) -> Live:
    """Return the fullest moment of a program.

    Args:
        program: `jax.jit(f).trace(...).jaxpr`, with the shapes of one device.
        lanes: The last dim of an array is padded to a multiple of this.
    """
    return _most_live(program, lanes)


def most_room(program: ClosedJaxpr, platform: str) -> int:
    """Return the bytes that a program's arrays take at its fullest moment.

    Args:
        program: As `most_live` takes it.
        platform: Its lanes pad the last dim; its compiler leaves gaps between arrays.
    """
    facts = platform_named(platform)
    return round(facts.heap_over_arrays * most_live(program, facts.lanes).total_bytes)


def _most_live(program: Program, lanes: int) -> Live:
    flat = _Flat(lanes)
    given = [flat.number(atom) for atom in without_constants(program).invars]
    results = _flatten(program, given, flat)
    places = _places(flat, given, results)
    last: dict[int, int] = {}
    works = [
        work
        for work in flat.works
        if any(places[result] == (result,) for result in work.results)
    ]
    for at, work in enumerate(works):
        for operand in work.operands:
            last.update(dict.fromkeys(places.get(operand, ()), at))
    for result in results:
        last.update(dict.fromkeys(places.get(result, ()), len(works)))
    held: dict[int, int] = {}
    most = Live(total_bytes=0, operation="")
    for at, work in enumerate(works):
        held.update({one: flat.sizes[one] for one in work.results if one in last})
        total = sum(held.values()) + work.inside_bytes
        if total > most.total_bytes:
            most = Live(total_bytes=total, operation=work.name)
        held = {one: size for one, size in held.items() if last[one] > at}
    return most


def _places(
    flat: _Flat, given: Sequence[int], results: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return for each array the arrays in memory that its values are read from."""
    read = set(results)
    for work in flat.works:
        if work.name in _READS_ARRAYS:
            read.update(work.operands)
    places: dict[int, tuple[int, ...]] = dict.fromkeys(given, ())
    for work in flat.works:
        if work.name == "optimization_barrier":
            for operand, result in zip(work.operands, work.results, strict=True):
                places[result] = places.get(operand, ())
            continue
        sources = [one for name in work.operands for one in places.get(name, ())]
        fused = work.name in _FUSED and not read & set(work.results)
        alike = work.name in _SAME_MEMORY and len(set(sources)) == 1
        own = work.operands and places.get(work.operands[0]) == (work.operands[0],)
        for result in work.results:
            through = fused or (alike and own)
            places[result] = tuple(dict.fromkeys(sources)) if through else (result,)
    return places


def _flatten(program: Program, given: Sequence[int], flat: _Flat) -> list[int]:
    """Add a program's operations, and return the numbers of its results."""

    def apply(equation: JaxprEqn, operands: list[int]) -> list[int]:
        loop = Loop.parse(equation)
        once = loop is not None and loop.length == 1
        inner = loop.body if loop and once else called_program(equation)
        if inner is not None:
            return _flatten(inner, operands, flat)
        results = [flat.number(atom) for atom in equation.outvars]
        inside = [_most_live(one, flat.lanes) for one in programs_in(equation)]
        most = max((one.total_bytes for one in inside), default=0)
        name = equation.primitive.name
        flat.works.append(_Work(name, tuple(operands), tuple(results), most))
        return results

    return walk(program, given, apply, lambda value: flat.number(None))


def _num_bytes(atom: Any, lanes: int) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not hasattr(dtype, "itemsize"):
        return 0
    *others, last = atom.aval.shape or (1,)
    return math.prod(others) * -(-last // lanes) * lanes * dtype.itemsize
