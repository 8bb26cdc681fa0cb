"""A traced function run while it is known which parameter each value comes from.

The function was traced with one layer in the place of each stacked parameter. So a
value made of one parameter alone exists once for each layer; where values of several
parameters meet in a sum over terms (a global norm, a test that all is finite), the sum
runs over the layers too. Anything else that mixes parameters has no meaning for layers
and is refused. What a value is, arrays or names of what computes them, is the domain's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshpar.trace.primitives import ELEMENTWISE
from meshpar.train.optimizer.program import Operation, Program, Reference, Sum

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""Reductions of an array -> the primitive that does so with two terms."""


class NotByLayer(Exception):
    """What an optimizer does has no meaning for each layer; the reason is its text."""


@dataclass(frozen=True)
class Value:
    """A value while a function runs.

    Args:
        owner: Path of the one parameter that it is made from; None if from none, or
            from all.
        content: The domain's.
    """

    owner: str | None
    content: Any


@dataclass(frozen=True)
class Stack:
    """Values of several parameters, one after another along the leading dim.

    Args:
        parts: The values.
        dim_is_new: Whether the parts lack that dim.
    """

    parts: tuple[Value, ...]
    dim_is_new: bool


@dataclass(frozen=True)
class Choice:
    """A `cond` on values, whose branches give results of the same owners.

    Args:
        index: Which branch is taken; made from no one parameter.
        inputs: What each branch is given.
        branches: What is chosen from.
        owners: Whose the results are, whatever branch is taken.
    """

    index: Value
    inputs: Sequence[Value]
    branches: tuple[Program, ...]
    owners: Sequence[str | None]

    def results(self, domain: Domain) -> Iterator[tuple[str | None, tuple[Value, ...]]]:
        """Of each result the owner, and what it is by each branch."""
        of_branches = [run(branch, self.inputs, domain) for branch in self.branches]
        return zip(self.owners, zip(*of_branches, strict=True), strict=True)


class Domain(Protocol):
    """What values are, and how they are made."""

    def constant(self, value: Any) -> Any:
        """A constant."""

    def apply(self, operation: Operation, operands: Sequence[Value]) -> list[Any]:
        """The results of an operation on values of one parameter at most."""

    def total(self, name: str, terms: Sequence[Value]) -> Any:
        """The sum of terms, and over the layers of those that have them.

        Args:
            name: Of the primitive that adds two terms.
            terms: Values of several parameters.
        """

    def choose(self, choice: Choice) -> list[Any]:
        """The results of `cond`."""


def run(program: Program, inputs: Sequence[Value], domain: Domain) -> list[Value]:
    """The outputs of a function.

    Args:
        program: The function.
        inputs: As many values as it has inputs.
        domain: What values are.

    Raises:
        NotByLayer: It mixes values of several parameters other than by a sum.
    """
    known: dict[Reference, Value | Stack] = dict(enumerate(inputs))

    def read(references: Sequence[Reference]) -> list[Value | Stack]:
        return [
            known[one]
            if isinstance(one, int)
            else Value(None, domain.constant(one.value))
            for one in references
        ]

    for step in program.steps:
        operations: tuple[Operation, ...]
        if isinstance(step, Sum):
            terms = read(step.terms)
            if len(_owners(terms)) > 1:
                known[step.result] = _total(step.name, terms, domain)
                continue
            operations = step.operations
        else:
            operations = (step,)
        for operation in operations:
            results = _results(operation, read(operation.inputs), domain)
            known.update(zip(operation.outputs, results, strict=True))
    return _without_stacks("concatenate", read(program.outputs))


def _results(
    operation: Operation, operands: list[Value | Stack], domain: Domain
) -> list[Value | Stack]:
    if operation.name in ("concatenate", "stack") and len(_owners(operands)) > 1:
        return [_one_after_another(operation, operands)]
    if len(operands) == 1 and isinstance(operands[0], Stack):
        return [_of_stack(operation, operands[0], domain)]
    values = _without_stacks(operation.name, operands)
    if operation.branches and values[0].owner is None:
        owners_of_results = _owners_of_choice(operation, values)
        choice = Choice(values[0], values[1:], operation.branches, owners_of_results)
        contents = domain.choose(choice)
        return [Value(*one) for one in zip(owners_of_results, contents, strict=True)]
    owners = _owners(values)
    if len(owners) > 1:
        raise NotByLayer(_mixing(operation.name, owners))
    owner = owners[0] if owners else None
    return [Value(owner, content) for content in domain.apply(operation, values)]


def _total(name: str, terms: Sequence[Value | Stack], domain: Domain) -> Value:
    return Value(None, domain.total(name, _without_stacks(name, terms)))


def _one_after_another(operation: Operation, operands: list[Value | Stack]) -> Stack:
    dim_is_new = operation.name == "stack"
    if operation.params["axis" if dim_is_new else "dimension"] != 0:
        raise NotByLayer(_mixing(operation.name, _owners(operands)))
    parts: list[Value] = []
    for operand in operands:
        if not isinstance(operand, Stack):
            parts.append(operand)
        elif operand.dim_is_new or dim_is_new:
            raise NotByLayer(_mixing(operation.name, _owners(operands)))
        else:
            parts += operand.parts
    return Stack(tuple(parts), dim_is_new)


def _of_stack(operation: Operation, stack: Stack, domain: Domain) -> Value | Stack:
    """An operation on each part, and the total if it reduces the leading dim."""

    def of_parts() -> tuple[Value, ...]:
        return tuple(
            Value(part.owner, domain.apply(operation, [part])[0])
            for part in stack.parts
        )

    if operation.name in ELEMENTWISE:
        return Stack(of_parts(), stack.dim_is_new)
    if operation.name in REDUCTIONS and tuple(operation.params["axes"]) == (0,):
        terms = stack.parts if stack.dim_is_new else of_parts()
        return _total(REDUCTIONS[operation.name], terms, domain)
    raise NotByLayer(_mixing(operation.name, _owners([stack])))


def _owners_of_choice(operation: Operation, operands: list[Value]) -> list[str | None]:
    """Whose the results of `cond` are, whatever branch is taken."""
    inputs = [Value(operand.owner, None) for operand in operands[1:]]
    of_branches = [run(branch, inputs, _Nothing()) for branch in operation.branches]
    owners = []
    for results in zip(*of_branches, strict=True):
        found = _owners(results)
        if len(found) > 1:
            raise NotByLayer(_mixing(operation.name, found))
        owners.append(found[0] if found else None)
    return owners


class _Nothing:
    """The domain in which only the owners of values are known."""

    def constant(self, value: Any) -> None:
        return None

    def apply(self, operation: Operation, operands: Sequence[Value]) -> list[None]:
        return [None] * len(operation.outputs)

    def total(self, name: str, terms: Sequence[Value]) -> None:
        return None

    def choose(self, choice: Choice) -> list[None]:
        return [None] * len(choice.owners)


def _owners(values: Sequence[Value | Stack]) -> list[str]:
    """The different owners, in order."""
    owners: dict[str, None] = {}
    for value in values:
        parts = value.parts if isinstance(value, Stack) else (value,)
        owners.update((part.owner, None) for part in parts if part.owner is not None)
    return list(owners)


def _without_stacks(name: str, values: Sequence[Value | Stack]) -> list[Value]:
    """The values, of which none may be a stack."""
    each: list[Value] = []
    for value in values:
        if isinstance(value, Stack):
            raise NotByLayer(_mixing(name, _owners([value])))
        each.append(value)
    return each


def _mixing(name: str, owners: Sequence[str]) -> str:
    return f"it mixes values of {owners[0]} and {owners[1]} ({name})"
