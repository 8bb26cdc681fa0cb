"""The most bytes that a traced program holds at once, in the order that it is written.

An array is there from the operation that makes it to the last one that reads it. What
is computed value by value from other arrays is made again wherever it is read, and
takes no memory, unless a convolution, a matmul or the caller reads it: these read
arrays. So XLA fuses; its own order and copies may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from meshpar.hardware.platforms import platform_named
from meshpar.trace.primitives import ELEMENTWISE
from meshpar.trace.walk import inner_jaxprs

_READS_ARRAYS = ("conv_general_dilated", "dot_general", "scan", "while", "cond")
_LAYS_OUT = ("reshape", "squeeze", "expand_dims", "copy", "sharding_constraint")
_MOVES = ("broadcast_in_dim", "transpose", "rev", "pad", "slice", "dynamic_slice")
_JOINS = ("concatenate", "dynamic_update_slice")
_FUSED = frozenset(
    (*ELEMENTWISE, *_LAYS_OUT, *_MOVES, *_JOINS, "device_put", "iota", "name")
)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What there is at the fullest moment.

    Args:
        total_bytes: Of all arrays but the arguments.
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
class _Program:
    """Operations in order; arrays are numbered."""

    lanes: int
    sizes: list[int] = field(default_factory=list)
    works: list[_Work] = field(default_factory=list)

    def number(self, atom: Any) -> int:
        self.sizes.append(_bytes_of(atom, self.lanes))
        return len(self.sizes) - 1


def most_live(program: ClosedJaxpr, lanes: int = 1) -> Live:
    """The fullest moment of a program, calls and loops that run once read as written.

    Args:
        program: `jax.jit(f).trace(...).jaxpr`, shapes as they are there.
        lanes: The last dim of an array takes a multiple of so many places.
    """
    return _most_live(program.jaxpr, lanes)


def most_room(program: ClosedJaxpr, platform: str) -> int:
    """Bytes that a program's arrays take at its fullest moment where it runs.

    Args:
        program: As of `most_live`.
        platform: Its lanes pad the last dim; its compiler leaves gaps between arrays.
    """
    facts = platform_named(platform)
    return round(facts.heap_over_arrays * most_live(program, facts.lanes).total_bytes)


def _most_live(jaxpr: Jaxpr, lanes: int) -> Live:
    flat = _Program(lanes)
    given = [flat.number(atom) for atom in jaxpr.invars]
    results = _flatten(jaxpr, given, flat)
    places = _places(flat, given, results)
    last: dict[int, int] = {}
    works = [work for work in flat.works if _is_made(work, places)]
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
    flat: _Program, given: Sequence[int], results: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Array -> the arrays in memory that its values are read from."""
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
        alike = work.name in _LAYS_OUT and len(set(sources)) == 1
        own = work.operands and places.get(work.operands[0]) == (work.operands[0],)
        for result in work.results:
            through = fused or (alike and own)
            places[result] = tuple(dict.fromkeys(sources)) if through else (result,)
    return places


def _is_made(work: _Work, places: dict[int, tuple[int, ...]]) -> bool:
    return any(places[result] == (result,) for result in work.results)


def _flatten(jaxpr: Jaxpr, given: Sequence[int], flat: _Program) -> list[int]:
    """Adds a program's operations; numbers of its results."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def number(atom: Any) -> int:
        if isinstance(atom, Literal) or atom not in known:
            return flat.number(atom)
        return known[atom]

    for equation in jaxpr.eqns:
        operands = [number(atom) for atom in equation.invars]
        inner = _read_as_written(equation)
        if inner is not None:
            results = _flatten(inner, operands, flat)
        else:
            results = [flat.number(atom) for atom in equation.outvars]
            inside = [
                _most_live(one, flat.lanes).total_bytes
                for one, _ in inner_jaxprs(equation)
            ]
            name = equation.primitive.name
            work = _Work(name, tuple(operands), tuple(results), max(inside, default=0))
            flat.works.append(work)
        known.update(zip(equation.outvars, results, strict=True))
    return [number(atom) for atom in jaxpr.outvars]


def _read_as_written(equation: JaxprEqn) -> Jaxpr | None:
    """The program of a call, or of a loop that runs once."""
    name = equation.primitive.name
    if name in ("while", "cond") or equation.params.get("length", 1) != 1:
        return None
    found = [inner for inner, _ in inner_jaxprs(equation)]
    fits = len(found) == 1 and len(found[0].invars) == len(equation.invars)
    return found[0] if fits else None


def _bytes_of(atom: Any, lanes: int) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not hasattr(dtype, "itemsize"):
        return 0
    *others, last = atom.aval.shape or (1,)
    return math.prod(others) * -(-last // lanes) * lanes * dtype.itemsize
