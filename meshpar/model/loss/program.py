"""A traced loss as a list of operations, any part of which can be run by itself.

The trace of `loss(params, batch, key)` is flattened: programs inside `jax.jit` calls
are inlined, so that a call around several blocks does not hide where one ends. Every
array has a number; an operation reads numbers and literals, and makes numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from meshpar.trace.walk import called_program, steps, without_constants

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
        return tuple(one for one in self.operands if not isinstance(one, Literal))

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
        return [one.val if isinstance(one, Literal) else values[one] for one in wanted]

    def needed(
        self, wanted: Sequence[Any], known: Iterable[int], stop: Iterable[int] = ()
    ) -> list[Operation]:
        """Return the operations between what is known and what is wanted, in order.

        Raises:
            LookupError: A number depends on an argument that is not known.
        """
        known, stop = {*known, *self._constants}, set(stop)
        found: set[Operation] = set()
        todo = [one for one in wanted if not isinstance(one, Literal)]
        while todo:
            number = todo.pop()
            if number in known:
                continue
            if number not in self.maker or number in stop:
                raise LookupError(number)
            operation = self.maker[number]
            if operation not in found:
                found.add(operation)
                todo += operation.read
        return [operation for operation in self.operations if operation in found]

    def reached(self, sources: Iterable[int]) -> set[int]:
        """Return every number that depends on one of some numbers, those too."""
        found = set(sources)
        for operation in self.operations:
            if found.intersection(operation.read):
                found.update(operation.results)
        return found

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
                        (results[0], self._layer[one])
                        for one in operation.read
                        if one in self._layer
                    )
            numbers.update(zip(equation.outvars, results, strict=True))
        return [at(atom) for atom in jaxpr.outvars]

    def _inner(
        self, equation: JaxprEqn, operands: Sequence[Any]
    ) -> ClosedJaxpr | Jaxpr | None:
        """Return the program of a call whose operations belong beside the others."""
        name = equation.primitive.name
        if name in _REMATERIALISED:
            read = [one for one in operands if not isinstance(one, Literal)]
            layers = {self._layer[one] for one in read if one in self._layer}
            return (
                called_program(equation)
                if len(layers) > 1 or STACKED in layers
                else None
            )
        return called_program(equation) if name in _TAKEN_IN else None
