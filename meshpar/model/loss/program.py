"""A traced loss as a list of operations, any part of which can be run by itself.

The trace of `loss(params, batch, key)` is flattened: programs inside `jax.jit` calls
are inlined, so that a call around several blocks does not hide where one ends. Every
array has a number; an operation reads numbers and literals, and makes numbers. Two
operations are alike if their programs, functions and arrays inside them are.
"""

from __future__ import annotations

import enum
import functools
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from meshpar.trace.walk import Program, called_program, steps, without_constants

_TAKEN_IN = frozenset(("jit", "pjit", "closed_call", "core_call"))
_REMATERIALISED = frozenset(("checkpoint", "remat", "remat2"))

STACKED = -1
"""In place of a layer: an argument that holds all layers, stacked."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a program.

    Args:
        equation: The operation as JAX traced it, with variables of its own.
        operands: A number, or a `Literal`, for each of its operands.
        results: A number for each of its results.
        debug_info: Of the program that it stood in, for JAX's own messages.
    """

    equation: JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    debug_info: Any

    @property
    def read(self) -> tuple[int, ...]:
        """The numbers among the operands."""
        return tuple(atom for atom in self.operands if not isinstance(atom, Literal))

    def run(self, known: dict[int, Any]) -> None:
        """Add the results to the known arrays."""
        pairs = zip(self.equation.invars, self.operands, strict=True)
        # The variable of a call may stand for a literal of its caller.
        given = {var: at for var, at in pairs if not isinstance(var, Literal)}
        values = [
            at.val if isinstance(at, Literal) else known[at] for at in given.values()
        ]
        program = Jaxpr(
            (),
            list(given),
            self.equation.outvars,
            [self.equation],
            debug_info=self.debug_info,
        )
        results = jaxpr_as_fun(ClosedJaxpr(program, ()))(*values)
        known.update(zip(self.results, results, strict=True))


class LossProgram:
    """The operations of a traced function of a flat list of arrays.

    Attributes:
        arguments: Number of each argument.
        operations: All operations, in order.
        results: A number, or a `Literal`, for each result.
        avals: Number -> shape and dtype.
        maker: Number -> the operation that makes it.

    Args:
        program: The traced function.
        layers: Position of an argument -> the layer whose parameter it is, or
            `STACKED`. A `jax.checkpoint` around several layers is taken in too: stages
            and the layout's own `remat` cut between them.
    """

    def __init__(self, program: ClosedJaxpr, layers: Mapping[int, int]) -> None:
        self.operations: list[Operation] = []
        self.avals: dict[int, Any] = {}
        self.maker: dict[int, Operation] = {}
        self._constants: dict[int, Any] = {}
        jaxpr = program.jaxpr
        self.arguments = [self._number(var.aval) for var in jaxpr.invars]
        self._layer = {self.arguments[at]: layer for at, layer in layers.items()}
        self.results = self._take_in(program, self.arguments)

    def run(
        self,
        known: Mapping[int, Any],
        wanted: Sequence[Any],
        stop: Iterable[int] = (),
    ) -> list[Any]:
        """Return the arrays of some numbers, from those that are known.

        Args:
            known: Number -> array; what makes these is not run.
            wanted: Numbers, or literals.
            stop: Further numbers that must not be computed.

        Raises:
            LookupError: One depends on an argument that is not known.
        """
        values = {**self._constants, **known}
        for operation in self.needed(wanted, values, stop):
            operation.run(values)
        return [
            atom.val if isinstance(atom, Literal) else values[atom] for atom in wanted
        ]

    def needed(
        self, wanted: Sequence[Any], known: Iterable[int], stop: Iterable[int] = ()
    ) -> list[Operation]:
        """Return the operations between what is known and what is wanted, in order.

        Raises:
            LookupError: A number depends on an argument that is not known.
        """
        known, stop = {*known, *self._constants}, set(stop)
        operations: set[Operation] = set()
        todo = [atom for atom in wanted if not isinstance(atom, Literal)]
        while todo:
            number = todo.pop()
            if number in known:
                continue
            if number not in self.maker or number in stop:
                raise LookupError(number)
            operation = self.maker[number]
            if operation not in operations:
                operations.add(operation)
                todo += operation.read
        return [operation for operation in self.operations if operation in operations]

    def reached(self, sources: Iterable[int]) -> set[int]:
        """Return every number that depends on one of some numbers, those too."""
        numbers = set(sources)
        for operation in self.operations:
            if numbers.intersection(operation.read):
                numbers.update(operation.results)
        return numbers

    def constant(self, number: int) -> Any:
        """Return the array of a constant of the trace; None if the number is none."""
        return self._constants.get(number)

    def is_key(self, number: int) -> bool:
        """Return True if an array is of random keys."""
        return jax.dtypes.issubdtype(self.avals[number].dtype, jax.dtypes.prng_key)

    def _number(self, aval: Any) -> int:
        number = len(self.avals)
        self.avals[number] = aval
        return number

    def _take_in(self, program: ClosedJaxpr | Jaxpr, given: Sequence[Any]) -> list[Any]:
        """Add a program's operations; return the numbers of its results."""
        jaxpr = without_constants(program)
        numbers: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
        constants = getattr(program, "consts", ())
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            numbers[var] = self._number(var.aval)
            self._constants[numbers[var]] = value

        def at(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else numbers[atom]

        for equation in steps(program):
            operands = tuple(map(at, equation.invars))
            inner = self._inner(equation, operands)
            if inner is not None:
                results = self._take_in(inner, operands)
            else:
                results = [self._number(var.aval) for var in equation.outvars]
                operation = Operation(
                    equation, operands, tuple(results), jaxpr.debug_info
                )
                self.operations.append(operation)
                self.maker.update(dict.fromkeys(results, operation))
                if equation.primitive.name == "convert_element_type":
                    self._layer.update(
                        (results[0], self._layer[number])
                        for number in operation.read
                        if number in self._layer
                    )
            numbers.update(zip(equation.outvars, results, strict=True))
        return [at(atom) for atom in jaxpr.outvars]

    def _inner(
        self, equation: JaxprEqn, operands: Sequence[Any]
    ) -> ClosedJaxpr | Jaxpr | None:
        """Return the program of a call whose operations belong beside the others."""
        name = equation.primitive.name
        if name in _REMATERIALISED:
            read = [number for number in operands if not isinstance(number, Literal)]
            layers = {self._layer[number] for number in read if number in self._layer}
            return (
                called_program(equation)
                if len(layers) > 1 or STACKED in layers
                else None
            )
        return called_program(equation) if name in _TAKEN_IN else None


_DEEPEST = 12
_BOOKKEEPING = {"out_trees"}
"""Options that a call fills in for itself."""


def alike(x: Any, y: Any, depth: int = 0) -> bool:
    """Return True if two options are equal, whatever objects hold them.

    Functions are equal if they have the same code, and what they close over is equal.
    """
    if x is y:
        return True
    if depth > _DEEPEST or type(x) is not type(y):
        return False
    deeper = functools.partial(alike, depth=depth + 1)
    if isinstance(x, ClosedJaxpr | Jaxpr):
        return _same_program(x, y, depth)
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return same_array(x, y)
    if isinstance(x, Mapping):
        compared = x.keys() - _BOOKKEEPING
        return x.keys() == y.keys() and all(deeper(x[key], y[key]) for key in compared)
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(deeper, x, y))
    if isinstance(x, types.FunctionType):
        return x.__code__ is y.__code__ and deeper(_closed_over(x), _closed_over(y))
    if isinstance(x, functools.partial):
        parts = [(value.func, value.args, value.keywords) for value in (x, y)]
        return deeper(*parts)
    if isinstance(x, types.MethodType):
        return deeper((x.__func__, x.__self__), (y.__func__, y.__self__))
    if hasattr(x, "transforms") and hasattr(x, "f"):  # A user's function under JAX's.
        return deeper(x.f, y.f)
    fields = _fields(x), _fields(y)
    if fields[0] and not isinstance(x, enum.Enum):
        return deeper(*fields)
    if callable(x):
        return False
    texts = [re.sub(r"0x[0-9a-f]+", "", str(value)) for value in (x, y)]
    return texts[0] == texts[1]


def same_array(x: Any, y: Any) -> bool:
    """Return True if two constants are equal; NaN is equal to NaN."""
    if x is None or y is None:
        return x is y
    is_inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return x is y or np.array_equal(x, y, equal_nan=bool(is_inexact))


def _same_program(x: Program, y: Program, depth: int) -> bool:
    """Return True if two programs have the same operations on the same constants."""
    constants = getattr(x, "consts", ()), getattr(y, "consts", ())
    if len(constants[0]) != len(constants[1]) or not all(map(same_array, *constants)):
        return False
    first, second = without_constants(x), without_constants(y)
    if str(first) != str(second):  # Names of variables are given in order.
        return False
    pairs = zip(steps(first), steps(second), strict=True)
    return all(
        alike(a.params, b.params, depth + 1)
        and all(map(_same_operand, a.invars, b.invars))
        for a, b in pairs
    )


def _same_operand(u: Any, v: Any) -> bool:
    if isinstance(u, Literal) and isinstance(v, Literal):
        return same_array(u.val, v.val)
    return isinstance(u, Literal) == isinstance(v, Literal)


def _closed_over(function: types.FunctionType) -> tuple:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, wherever its class keeps them."""
    classes = type(value).__mro__
    names = [name for kind in classes for name in vars(kind).get("__slots__", ())]
    values = {name: getattr(value, name) for name in names if hasattr(value, name)}
    values |= getattr(value, "__dict__", {})
    return {name: entry for name, entry in values.items() if not name.startswith("__")}
