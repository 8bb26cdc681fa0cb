"""`Flow`: the dim of an array that holds tokens, and its way through a trace.

Here is how tokens pass operations on each element; `token_rules` has all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from meshpar.trace.primitives import ELEMENTWISE, LINEAR, RANDOM, UNCHANGED
from meshpar.trace.walk import array_shape

WHOLE_SEQUENCE = "of_whole_sequence"
"""Names a function of whole sequences where a trace runs it."""

SEQUENCE_SUM = "sum_over_sequence"
"""Names `Scope.sequence_sum` where a trace runs it."""

_ORDERED = {
    *("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"),
    *("scatter_add", "select_and_scatter_add", "ppermute", "psum"),
}
EACH_ELEMENT = ELEMENTWISE | UNCHANGED | RANDOM
"""Operations that compute each element of a result from those at the same place.

Other operations may join elements although their results have the same shape.
"""


class Mixed(Exception):
    """An operation joins different tokens.

    Args:
        what: The operation, in words.
        where: Its source line; "" if that is not known yet.
        certain: Whether the operation surely joins tokens.
        unknown: Whether nothing is known of the operation, which may keep tokens apart.
        picks: Whether it selects some of the tokens, such as the largest: then it joins
            them only if the results are sums of those.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        *,
        certain: bool = False,
        unknown: bool = False,
        picks: bool = False,
    ) -> None:
        super().__init__(what)
        self.where, self.certain = where, certain
        self.unknown, self.picks = unknown, picks


@dataclass(frozen=True)
class Flow:
    """Where an array holds the tokens of this device (the tokens at hand).

    Args:
        dim: The dim of the tokens, or None.
        merged: Sizes of the dims that a reshape merged with that of the tokens: the
            product before it and after it; (1, 1) if the dim is the tokens' alone.
        total: Whether the array is a sum over tokens, of which each device has a part.
        uniform: Without tokens: the dims along which all values are equal.
        value: Without tokens: the one value of all elements, if it is known.
        counted: Without tokens: whether values depend on the number at hand.
        multiple: If counted: whether the array is a multiple of the number at hand, so
            that the devices' shares add up to the whole.
        numbered: Without tokens: the dims along which values are made of the indices of
            places, or drawn for them.
        lost: Whether the array is not followed; the next two fields still hold.
        fault: If lost: the operation that surely joins tokens it is made of.
        picked: If lost: the operation that selected the tokens it is a multiple of.
    """

    dim: int | None = None
    merged: tuple[int, int] = (1, 1)
    total: bool = False
    uniform: frozenset[int] = frozenset()
    value: Any = None
    counted: bool = False
    multiple: bool = False
    numbered: frozenset[int] = frozenset()
    lost: bool = False
    fault: str = ""
    picked: str = ""

    @property
    def has_tokens(self) -> bool:
        """True if values differ between the devices that share a sequence."""
        return self.dim is not None or self.total

    @property
    def zero(self) -> bool:
        """True if the array is known to be 0 everywhere."""
        return self.value is not None and self.value == 0

    def moved(self, place: Callable[[int], int | None]) -> Flow:
        """Return the flow with dims moved; those whose place is None are dropped."""
        dim = None if self.dim is None else place(self.dim)
        uniform, numbered = (
            frozenset(to for dim in dims if (to := place(dim)) is not None)
            for dims in (self.uniform, self.numbered)
        )
        return replace(self, dim=dim, uniform=uniform, numbered=numbered)

    def kept(self, dims: Sequence[int]) -> Flow:
        """Return the flow with these dims alone, in their order."""
        some = frozenset(dims)
        flow = replace(self, uniform=self.uniform & some, numbered=self.numbered & some)
        return flow.moved(list(dims).index)

    def adds_up(self, *, counts: bool) -> bool:
        """Return True if adding up the devices' values gives the intended sum.

        Args:
            counts: Whether a multiple of the number of tokens at hand adds up too.
        """
        return self.total or self.zero or (counts and self.multiple)

    def as_counted(self, *, multiple: bool = False) -> Flow:
        """Return the flow of values that depend on the number of tokens at hand."""
        return replace(self, value=None, counted=True, multiple=multiple)

    def check_joins(self, some: Flow) -> None:
        """Raise if values without tokens cannot stand in a loop in place of `some`."""
        if self.zero:
            return
        if some.total:
            raise Mixed(
                "a loop or branch that gives a sum over tokens or what each device has "
                "alike, which would count once for each; start it at 0"
            )
        if self.counted:
            raise Mixed(
                "a loop or branch that gives tokens or how many are at hand; take "
                "scope.seq_length(seq)"
            )

    def joined(self, other: Flow) -> Flow:
        """Return the flow of an array that is either.

        Raises:
            Mixed: They have tokens in different dims, or one has tokens and the other
                a value that every device would count.
        """
        if self.lost or other.lost:
            return lost([self, other])
        if self.has_tokens != other.has_tokens:
            some, none = (self, other) if self.has_tokens else (other, self)
            none.check_joins(some)
            return some
        places = [(one.dim, one.merged, one.total) for one in (self, other)]
        if places[0] != places[1]:
            raise Mixed("tokens in different dims of a loop or branch")
        return replace(
            self,
            uniform=self.uniform & other.uniform,
            value=self.value if self.value == other.value else None,
            counted=self.counted or other.counted,
            numbered=self.numbered & other.numbered,
        )


def lost(flows: Sequence[Flow]) -> Flow:
    """Return the flow of what is made of arrays in a way that is not followed."""
    return Flow(lost=True, fault=next((flow.fault for flow in flows if flow.fault), ""))


def check_no_places(
    flow: Flow,
    x: Any,
    dim: int,
    num_tokens: int,
    name: str,
    *,
    certain: bool = False,
) -> None:
    """Raise if an array without tokens has a value for each token at hand.

    Args:
        flow: Flow of the array.
        x: The array.
        dim: Dim of the tokens that it meets.
        num_tokens: Number of tokens at hand.
        name: Operation in which they meet.
        certain: Whether the operation surely joins tokens and indices of places.
    """
    shape = array_shape(x)
    places = len(shape) > dim and shape[dim] == num_tokens
    if places and not flow.has_tokens and dim not in flow.uniform:
        raise Mixed(
            f"{name} of tokens and an array of places counted from the first at hand; "
            "take scope.positions(seq)",
            certain=certain and dim in flow.numbered,
        )


def token_dim(
    equation: JaxprEqn, flows: list[Flow], num_tokens: int, *, certain: bool = False
) -> int:
    """Return the one dim that holds tokens in the operands of an operation.

    Args:
        equation: The operation.
        flows: Flows of its operands.
        num_tokens: Number of tokens at hand.
        certain: Whether the operation surely joins tokens and indices of places.

    Raises:
        Mixed: Operands have tokens in different dims, or one has places there.
    """
    name = equation.primitive.name
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if len(dims) > 1:
        alone = all(flow.merged == (1, 1) for flow in flows)
        raise Mixed(f"{name} of every token with every token", certain=alone)
    [dim] = dims
    for flow, x in zip(flows, equation.invars, strict=True):
        check_no_places(flow, x, dim, num_tokens, name, certain=certain)
    return dim


def gives_fractions(equation: JaxprEqn) -> bool:
    """Return True if the results are no integers, which may be places to gather."""
    avals: list[Any] = [var.aval for var in equation.outvars]
    return all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


Rule = Callable[[JaxprEqn, list[Flow], int], list[Flow]]
"""(operation, flows of its operands, tokens at hand) -> flows of its results."""


def elementwise(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through an operation on each element."""
    if not equation.outvars:  # such as jax.debug.print
        return []
    if not any(flow.has_tokens for flow in flows):
        uniform, numbered = _uniform(equation, flows), _numbered(equation, flows)
        return [Flow(uniform=uniform, numbered=numbered) for _ in equation.outvars]
    name = equation.primitive.name
    if name in _ORDERED:
        raise Mixed(f"{name} along the sequence", unknown=name.startswith("scatter"))
    if any(flow.total for flow in flows):
        return _linear(equation, flows)
    places = {flow.merged for flow in flows if flow.dim is not None}
    if len(places) > 1:
        raise Mixed(f"{name} after reshapes that merge the sequence with other dims")
    outer, inner = merged = places.pop()
    certain = merged == (1, 1) and gives_fractions(equation)
    size = outer * num_tokens * inner
    dim = token_dim(equation, flows, size, certain=certain)
    if not _is_elementwise(equation):
        what = f"{name}, of which it is not known whether it mixes tokens"
        raise Mixed(what, unknown=True)
    return [Flow(dim=dim, merged=merged) for _ in equation.outvars]


def _uniform(equation: JaxprEqn, flows: list[Flow]) -> frozenset[int]:
    """Return the dims along which all values of results without tokens are equal."""
    given = [
        flow.uniform
        for flow, x in zip(flows, equation.invars, strict=True)
        if array_shape(x)
    ]
    if not given or not _is_elementwise(equation):
        return frozenset()
    return frozenset.intersection(*given)


def _numbered(equation: JaxprEqn, flows: list[Flow]) -> frozenset[int]:
    """Return the dims along which results are made of the indices of places.

    Remainders of indices are not: they may repeat after a few places.
    """
    repeats = equation.primitive.name in ("rem", "and")
    if repeats or not _is_elementwise(equation):
        return frozenset()
    shape = array_shape(equation.outvars[0])
    return frozenset(
        dim
        for flow, x in zip(flows, equation.invars, strict=True)
        for dim in flow.numbered
        if array_shape(x)[dim] == shape[dim]
    )


def _is_elementwise(equation: JaxprEqn) -> bool:
    """Return True if each result is made of the elements at its place.

    Shapes are equal then, but for dims of size 1 that are broadcast.
    """
    if equation.primitive.name not in EACH_ELEMENT:
        return False
    [shape, *others] = [array_shape(var) for var in equation.outvars]
    given = [array_shape(x) for x in equation.invars if array_shape(x)]
    return all(other == shape for other in others) and all(
        len(one) == len(shape)
        and all(size in (1, full) for size, full in zip(one, shape, strict=True))
        for one in given
    )


def _linear(equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    """Flow of sums over tokens, of which each device has a part, if linear."""
    name = equation.primitive.name
    totals = [flow.total for flow in flows]
    scales = name == "mul" or (name == "div" and not totals[1])
    unlike = (scales and sum(totals) > 1) or (name == "select_n" and totals[0])
    if name not in LINEAR or unlike or (name == "div" and totals[1]):
        raise Mixed(f"{name} of a sum over tokens", certain=True)
    if any(flow.dim is not None for flow in flows):
        raise Mixed(f"{name} of a sum over tokens", certain=True)
    terms = flows[1:] if name == "select_n" else flows
    if not scales and not all(flow.total or flow.zero for flow in terms):
        raise Mixed(
            f"{name} of a sum over tokens and what each device has alike, which would "
            "count once for each; take a share of it, of the tokens at hand",
            certain=True,
        )
    return [Flow(total=True)]
