"""How an array has tokens: what is followed through a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

WHOLE_SEQUENCE = "of_whole_sequence"
"""Names a function of whole sequences where a trace runs it."""

SEQUENCE_SUM = "sum_over_sequence"
"""Names `Scope.sequence_sum` where a trace runs it."""


class Mixed(Exception):
    """An operation joins different tokens.

    Args:
        what: The operation, in words.
        where: Its line; empty where that is not known yet.
        certain: Whether it does, and not only may.
        unknown: Whether nothing is known of the operation, which may leave them alone.
        picks: Whether it picks some of the tokens, such as the largest: it joins them
            where the results are sums of those.
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
    """How an array has tokens.

    Args:
        dim: The dim of the tokens, or None.
        merged: Where a reshape has merged that dim with others: sizes of those before
            and after it together; (1, 1) where it is a dim by itself.
        total: Whether it is a sum over tokens, of which each device has a part.
        uniform: Where it has no tokens: the dims along which its values are all alike.
        value: Where it has no tokens: what all its values are, if that is known.
        counted: Where it has no tokens: whether they depend on how many are at hand.
        multiple: Where it is counted: whether it is a multiple of how many are at hand,
            which the devices' shares add up to.
        numbered: Where it has no tokens: the dims along which its values are made of
            the numbers of places, or drawn for them.
        lost: Whether nothing is known of it, but for what follows.
        fault: Where it is lost: what surely joins tokens of all that it is made of.
        picked: Where it is lost: what picked the tokens that it is a multiple of.
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
        """Whether its values differ between the devices that share a sequence."""
        return self.dim is not None or self.total

    @property
    def zero(self) -> bool:
        """Whether it is known to be 0 everywhere."""
        return self.value is not None and self.value == 0

    def moved(self, place: Callable[[int], int | None]) -> Flow:
        """The same with dims elsewhere; those that have no place are gone."""
        dim = None if self.dim is None else place(self.dim)
        uniform, numbered = (
            frozenset(to for dim in dims if (to := place(dim)) is not None)
            for dims in (self.uniform, self.numbered)
        )
        return replace(self, dim=dim, uniform=uniform, numbered=numbered)

    def kept(self, dims: Sequence[int]) -> Flow:
        """The same with no other dims than these, in their order."""
        some = frozenset(dims)
        flow = replace(self, uniform=self.uniform & some, numbered=self.numbered & some)
        return flow.moved(list(dims).index)

    def adds_up(self, *, counts: bool) -> bool:
        """Return True if adding up the devices' values gives the intended sum.

        Args:
            counts: Whether a multiple of how many tokens are at hand is one.
        """
        return self.total or self.zero or (counts and self.multiple)

    def as_counted(self, *, multiple: bool = False) -> Flow:
        """The same, of what depends on how many tokens are at hand."""
        return replace(self, value=None, counted=True, multiple=multiple)

    def check_beside(self, some: Flow) -> None:
        """Refuses values without tokens where `some` has them in a loop or branch."""
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
        """What holds for either.

        Raises:
            Mixed: They have tokens in different dims; or one has tokens, and the other
                what each device would count.
        """
        if self.lost or other.lost:
            return lost([self, other])
        if self.has_tokens != other.has_tokens:
            some, none = (self, other) if self.has_tokens else (other, self)
            none.check_beside(some)
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
    """Of what is made of arrays in a way that is not followed."""
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
    """Refuses an array without tokens that has one value for each at hand.

    Args:
        flow: Of the array.
        x: The array.
        dim: Of the tokens that it meets.
        num_tokens: How many are at hand.
        name: What they meet in.
        certain: Whether tokens and numbers of places are surely joined there.
    """
    shape = shape_of(x)
    places = len(shape) > dim and shape[dim] == num_tokens
    if places and not flow.has_tokens and dim not in flow.uniform:
        raise Mixed(
            f"{name} of tokens and an array of places counted from the first at hand; "
            "take scope.positions(seq)",
            certain=certain and dim in flow.numbered,
        )


def the_dim(
    equation: JaxprEqn, flows: list[Flow], num_tokens: int, *, certain: bool = False
) -> int:
    """The dim that tokens have in all arrays that an operation is given.

    Args:
        equation: The operation.
        flows: Of what it is given.
        num_tokens: How many are at hand.
        certain: Whether it surely joins them and numbers of places.

    Raises:
        Mixed: They have them in different dims, or one has places there.
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


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or constant of a trace."""
    return tuple(atom.aval.shape)


def gives_fractions(equation: JaxprEqn) -> bool:
    """Whether its results are no whole numbers, which may be places to pick from."""
    avals: list[Any] = [var.aval for var in equation.outvars]
    return all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


Rule = Callable[[JaxprEqn, list[Flow], int], list[Flow]]
"""(operation, flows of what it is given, tokens at hand) -> flows of its results."""
