"""A traced function as one flat list of operations, with its sums over many terms."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshpar.trace.walk import called_program, programs_in, walk, without_constants

MONOIDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "add_any": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""Primitives of two operands that come in any order and grouping -> what they do."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that the function closes over or writes down."""

    value: Any


Reference = int | Constant
"""An input or a result by its number, or a constant."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One primitive applied once.

    Args:
        primitive: What is applied.
        params: Its parameters.
        inputs: Its operands.
        outputs: Numbers of its results.
        branches: Of `cond`, the functions that it chooses from.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Reference, ...]
    outputs: tuple[int, ...]
    branches: tuple[Program, ...] = ()

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    def bind(self, *operands: Any) -> list[Any]:
        """The results for these operands."""
        results = self.primitive.bind(*operands, **self.params)
        return list(results) if self.primitive.multiple_results else [results]


@dataclass(frozen=True, eq=False)
class Sum:
    """Operations of one primitive whose terms may be taken in any order and grouping.

    Not sums only: every primitive of `MONOIDS`.

    Args:
        name: The primitive's.
        terms: What is added up.
        operations: As the function has it, two terms at a time.
    """

    name: str
    terms: tuple[Reference, ...]
    operations: tuple[Operation, ...]

    @property
    def result(self) -> int:
        """The number of the whole sum."""
        return self.operations[-1].outputs[0]


@dataclass(frozen=True, eq=False)
class Program:
    """A function without calls inside, but for the branches of `cond`.

    Inputs are numbered from 0; steps stand in an order in which they can run. What no
    output needs is left out.
    """

    num_inputs: int
    steps: tuple[Operation | Sum, ...]
    outputs: tuple[Reference, ...]


def program_of(function: Callable[..., Any], *arguments: Any) -> tuple[Program, Any]:
    """The trace of a function and the shapes that it returns.

    The program's inputs and outputs are the leaves of the function's trees.

    Args:
        function: What is traced.
        arguments: Trees of arrays or `jax.ShapeDtypeStruct`s.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _flattened(closed), shapes


def _flattened(closed: Jaxpr | ClosedJaxpr) -> Program:
    numbers = itertools.count()
    inputs: list[Reference] = [next(numbers) for _ in without_constants(closed).invars]
    operations: list[Operation] = []
    outputs = _append(operations, numbers, closed, inputs)
    needed = _needed(operations, outputs)
    return Program(len(inputs), _with_sums(needed, outputs), tuple(outputs))


def _append(
    operations: list[Operation],
    numbers: Iterator[int],
    program: Jaxpr | ClosedJaxpr,
    inputs: list[Reference],
) -> list[Reference]:
    """Append what a traced program does to its inputs, and return its outputs."""

    def apply(equation: JaxprEqn, operands: list[Reference]) -> list[Reference]:
        inner = called_program(equation)
        if inner is not None and equation.primitive.name != "shard_map":
            return _append(operations, numbers, inner, operands)
        made = tuple(next(numbers) for _ in equation.outvars)
        chooses = equation.primitive.name == "cond"
        branches = programs_in(equation) if chooses else ()
        operations.append(
            Operation(
                primitive=equation.primitive,
                params=equation.params,
                inputs=tuple(operands),
                outputs=made,
                branches=tuple(map(_flattened, branches)),
            )
        )
        return list(made)

    return walk(program, inputs, apply, Constant)


def _needed(
    operations: list[Operation], outputs: list[Reference]
) -> tuple[Operation, ...]:
    needed = set(outputs)
    kept = []
    for operation in reversed(operations):
        if needed.intersection(operation.outputs):
            needed.update(operation.inputs)
            kept.append(operation)
    return tuple(reversed(kept))


def _with_sums(
    operations: tuple[Operation, ...], outputs: list[Reference]
) -> tuple[Operation | Sum, ...]:
    """The operations, those of one sum together at the place of the last of them."""
    uses = Counter(outputs)
    for operation in operations:
        uses.update(operation.inputs)
    sums: dict[Reference, Sum] = {}
    parts: set[Reference] = set()
    for operation in operations:
        if operation.name not in MONOIDS:
            continue
        terms: list[Reference] = []
        within: list[Operation] = []
        for one in operation.inputs:
            if one in sums and sums[one].name == operation.name and uses[one] == 1:
                parts.add(one)
                terms += sums[one].terms
                within += sums[one].operations
            else:
                terms.append(one)
        whole = Sum(operation.name, tuple(terms), (*within, operation))
        sums[whole.result] = whole
    return tuple(
        sums.get(operation.outputs[0], operation)
        for operation in operations
        if operation.outputs[0] not in parts
    )
