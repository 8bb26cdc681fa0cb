"""Count the matmul FLOPs of a traced program, and the most bytes it holds at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.trace.primitives import ELEMENTWISE, JOINS, MOVES, RESHAPES
from meshpar.trace.walk import (
    Loop,
    Program,
    array_shape,
    called_program,
    programs_in,
    sources,
    walk,
    without_constants,
)

_DOTS = ("dot_general", "ragged_dot_general")
_CONVOLUTION = "conv_general_dilated"


@dataclass(frozen=True)
class Operand:
    """Facts about an operand that are known before a run.

    Args:
        value: Its value, such as a layer's index; None if it is not known.
        is_weight: Whether it is made of weights and numbers alone.
    """

    value: Any = None
    is_weight: bool = False


@dataclass(frozen=True)
class MatmulFlops:
    """FLOPs of matmuls, of which one side is made of weights alone, and of the others.

    The first grow with the tokens, the others with the length of the sequence too.
    """

    with_weights: float = 0.0
    between_activations: float = 0.0

    @property
    def total(self) -> float:
        """FLOPs of all matmuls."""
        return self.with_weights + self.between_activations

    def __add__(self, other: MatmulFlops) -> MatmulFlops:
        return MatmulFlops(
            self.with_weights + other.with_weights,
            self.between_activations + other.between_activations,
        )

    def __mul__(self, times: float) -> MatmulFlops:
        return MatmulFlops(times * self.with_weights, times * self.between_activations)


def matmul_flops(
    program: Program, given: Sequence[Operand], *, while_length: int | None = None
) -> MatmulFlops:
    """Return the FLOPs of a program's matmuls, those of loops as often as they run.

    Of branches whose index is not known, the most expensive counts.

    Args:
        program: The program.
        given: Facts about its arguments.
        while_length: Iterations of a `while_loop` that tells no number
            (`expect_iterations`); None refuses matmuls in it.

    Raises:
        InputError: A matmul runs in a `while_loop` of unknown length.
    """
    return _Counter(while_length).run(program, given)[0]


def equation_flops(equation: JaxprEqn) -> float:
    """Return the FLOPs of a dot or convolution; 0 of any other operation.

    Two of each value that it multiplies. Zeros that a convolution puts between the
    places of its operand are no work.
    """
    name, params = equation.primitive.name, equation.params
    if name in _DOTS:
        numbers: Any = params.get("dimension_numbers") or params.get(
            "ragged_dot_dimension_numbers"
        )
        (contracted, _), _ = getattr(numbers, "dot_dimension_numbers", numbers)
        left = array_shape(equation.invars[0])
        each = float(math.prod(left[dim] for dim in contracted))
    elif name == _CONVOLUTION:
        kernel = array_shape(equation.invars[1])
        window = [kernel[dim] for dim in params["dimension_numbers"].rhs_spec[1:]]
        each = math.prod(window) / math.prod(params["lhs_dilation"])
    else:
        return 0.0
    return 2.0 * math.prod(array_shape(equation.outvars[0])) * each


@dataclass(frozen=True)
class _Counter:
    """Counts FLOPs; `while_length` is that of `matmul_flops`."""

    while_length: int | None

    def run(
        self, program: Program, given: Sequence[Operand]
    ) -> tuple[MatmulFlops, list[Operand]]:
        """Return the FLOPs of a program, and facts about its results.

        Nothing is computed unless the value of an argument is known.
        """
        counts = [MatmulFlops()]
        evaluates = any(one.value is not None for one in given)

        def apply(equation: JaxprEqn, operands: list[Operand]) -> list[Operand]:
            flops, results = self._equation(equation, operands)
            counts.append(flops)
            return results

        def literal(value: Any) -> Operand:
            return Operand(value if evaluates else None, True)

        results = walk(program, given, apply, literal)
        return sum(counts[1:], counts[0]), results

    def _equation(
        self, equation: JaxprEqn, operands: list[Operand]
    ) -> tuple[MatmulFlops, list[Operand]]:
        loop, inside = Loop.parse(equation), programs_in(equation)
        if loop is not None:
            return self._loop(loop, operands)
        if equation.primitive.name == "cond":
            index, *others = operands
            if index.value is not None:
                return self.run(inside[int(index.value)], others)
            counts, results = zip(
                *(self.run(branch, others) for branch in inside), strict=True
            )
            flops = max(counts, key=lambda one: one.total)
            return flops, [_unknown(*each) for each in zip(*results, strict=True)]
        inner = called_program(equation)
        if inner is not None:
            return self.run(inner, operands)
        own = equation_flops(equation)
        with_weights = any(one.is_weight for one in operands[:2])
        flops = MatmulFlops(own, 0.0) if with_weights else MatmulFlops(0.0, own)
        for program in inside:
            unknown = [Operand()] * len(without_constants(program).invars)
            flops += self.run(program, unknown)[0]
        return flops, _evaluated(equation, operands)

    def _loop(
        self, loop: Loop, operands: list[Operand]
    ) -> tuple[MatmulFlops, list[Operand]]:
        consts, carried, slices = loop.split([_unknown(one) for one in operands])
        carried, made = loop.carried(
            lambda carried: self.run(loop.body, [*consts, *carried, *slices])[1],
            carried,
            lambda one, other: list(map(_unknown, one, other)),
        )
        flops, _ = self.run(loop.body, [*consts, *carried, *slices])
        known = loop.expected_length if loop.length is None else loop.length
        length = self.while_length if known is None else known
        if length is None and flops.total:
            raise InputError(
                "a layer has matmuls in a while_loop, whose number of iterations the "
                "trace does not know",
                key="model.unknown_trip_count",
            )
        return flops * (length or 0), [*carried, *map(_unknown, made)]


def _unknown(*operands: Operand) -> Operand:
    """Return the facts that hold for each of several arrays of unknown values."""
    return Operand(None, all(one.is_weight for one in operands))


def _evaluated(equation: JaxprEqn, operands: list[Operand]) -> list[Operand]:
    """Return facts about the results of an operation that runs no program.

    They are computed if all operands are known, as those of a layer's index are.
    """
    values = [one.value for one in operands]
    weights = all(one.is_weight for one in sources(equation, operands))
    unknown = [Operand(None, weights)] * len(equation.outvars)
    if not values or any(value is None for value in values) or equation.effects:
        return unknown
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*values, **equation.params)
    results = results if equation.primitive.multiple_results else [results]
    return [Operand(value, weights) for value in results]


_READS_ARRAYS = ("conv_general_dilated", "dot_general", "scan", "while", "cond")
_SAME_MEMORY = RESHAPES | {"sharding_constraint"}
_FUSED = ELEMENTWISE | _SAME_MEMORY | MOVES | JOINS | {"device_put", "iota", "name"}


@dataclass(frozen=True, kw_only=True)
class Live:
    """Memory at the fullest moment of a program.

    Args:
        total_bytes: Bytes of all arrays but the arguments.
        operation: Name of the operation that runs then.
        bytes_by_width: Size of the last dim -> bytes of arrays that have it.
    """

    total_bytes: int
    operation: str
    bytes_by_width: Counter[int] = field(default_factory=Counter)


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
    without: tuple[int, int] | None = None
    sizes: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    works: list[_Work] = field(default_factory=list)

    def number(self, atom: Any) -> int:
        """Number an array; None is a number that takes no memory."""
        dtype = getattr(getattr(atom, "aval", None), "dtype", None)
        size = last = 0
        if dtype is not None and hasattr(dtype, "itemsize"):
            *others, last = atom.aval.shape or (1,)
            padded = -(-last // self.lanes) * self.lanes
            size = math.prod(others) * padded * dtype.itemsize
            # A stream as wide as its sequence is long has the same last dims.
            size *= atom.aval.ndim < 4 or atom.aval.shape[-2:] != self.without
        self.sizes.append(size)
        self.widths.append(last)
        return len(self.sizes) - 1


def most_live(
    program: ClosedJaxpr,
    lanes: int = 1,
    *,
    uncounted: int = 0,
    last: bool = False,
    without: tuple[int, int] | None = None,
) -> Live:
    """Return the fullest moment of a program.

    Args:
        program: `jax.jit(f).trace(...).jaxpr`, with the shapes of one device.
        lanes: The last dim of an array is padded to a multiple of this.
        uncounted: Number of results, the first, whose own bytes do not count, such as
            gradients of weights.
        last: True if these are made after all others, at moments that do not count, but
            until when their operands wait.
        without: Last two of four dims or more of arrays that do not count: attention's
            scores.
    """
    return _most_live(program, _Flat(lanes, without), uncounted, last)


def most_room(program: ClosedJaxpr, platform: str) -> int:
    """Return the bytes that a program's arrays take at its fullest moment.

    Args:
        program: As `most_live` takes it.
        platform: Its lanes pad the last dim; its compiler leaves gaps between arrays.
    """
    facts = platform_named(platform)
    return round(facts.heap_over_arrays * most_live(program, facts.lanes).total_bytes)


def _most_live(
    program: Program, flat: _Flat, uncounted: int = 0, last_ones: bool = False
) -> Live:
    given = [flat.number(atom) for atom in without_constants(program).invars]
    results = _flatten(program, given, flat)
    places = _places(flat, given, results)
    last: dict[int, int] = {}
    works = [
        work
        for work in flat.works
        if any(places[result] == (result,) for result in work.results)
    ]
    first = _needed(works, places, results[uncounted:]) if last_ones else works
    needed = set(first)
    works = [*first, *(work for work in works if work not in needed)]
    free = {one for result in results[:uncounted] for one in places.get(result, ())}
    for at, work in enumerate(works):
        for operand in work.operands:
            last.update(dict.fromkeys(places.get(operand, ()), at))
    for result in results:
        last.update(dict.fromkeys(places.get(result, ()), len(works)))
    held: dict[int, int] = {}
    most = Live(total_bytes=0, operation="")
    for at, work in enumerate(first):
        made = [one for one in work.results if one in last and one not in free]
        held.update({one: flat.sizes[one] for one in made})
        total = sum(held.values()) + work.inside_bytes
        if total > most.total_bytes:
            widths = Counter[int]()
            for one, size in held.items():
                widths[flat.widths[one]] += size
            most = Live(total_bytes=total, operation=work.name, bytes_by_width=widths)
        held = {one: size for one, size in held.items() if last[one] > at}
    return most


def _needed(
    works: Sequence[_Work],
    places: dict[int, tuple[int, ...]],
    results: Sequence[int],
) -> list[_Work]:
    """Return the operations that these results need, in order."""
    read = {one for result in results for one in places.get(result, ())}
    needed = []
    for work in reversed(works):
        if read.intersection(work.results):
            needed.append(work)
            for operand in work.operands:
                read.update(places.get(operand, ()))
    return needed[::-1]


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
        inside = [
            _most_live(one, _Flat(flat.lanes, flat.without))
            for one in programs_in(equation)
        ]
        most = max((one.total_bytes for one in inside), default=0)
        name = equation.primitive.name
        flat.works.append(_Work(name, tuple(operands), tuple(results), most))
        return results

    return walk(program, given, apply, lambda value: flat.number(None))
