"""Check that a function treats every token by itself, by following tokens in its trace.

The devices that share a sequence run a model's functions on their own tokens. What
attention mixes is moved between them; a convolution along the sequence, a recurrence,
or positions counted from the first token at hand would be wrong in silence. So tokens
are followed through the trace, and an operation that joins different tokens, or tokens
and an array of places, is named.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.trace.primitives import CALLS
from meshpar.trace.token_counts import (
    ALIKE,
    COUNTED,
    Twins,
    check_lengths,
    check_table,
    counted_literals,
    counts,
    inner_programs,
    other_numbers,
    without_tokens,
)
from meshpar.trace.token_flow import (
    EACH_ELEMENT,
    SEQUENCE_SUM,
    WHOLE_SEQUENCE,
    Flow,
    Mixed,
    check_no_places,
    elementwise,
    lost,
)
from meshpar.trace.token_rules import RULES, check_not_merged
from meshpar.trace.walk import Loop, array_shape, called_program, source_line, walk

_LIBRARIES = (
    *("/jax/", "/flax/", "<", "/meshpar/trace/", "/meshpar/model/"),
    *("/meshpar/parallel/", "/meshpar/checks/"),
)
"""Parts of the paths of files that are not the user's."""

_MULTIPLES = {
    *("broadcast_in_dim", "convert_element_type", "copy", "div", "dynamic_slice"),
    *("mul", "neg", "reduce_sum", "slice", "squeeze", "stop_gradient"),
}
"""Operations that give some of their operand, or sums or multiples of it."""


@dataclass(frozen=True)
class Traced:
    """A traced function of tokens.

    Args:
        program: The trace.
        num_tokens: Size of the token dim.
        given: Flows of the arguments.
    """

    program: ClosedJaxpr
    num_tokens: int
    given: list[Flow]

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], num_tokens: int, tokens: Any, *others: Any
    ) -> Traced:
        """Trace a function of trees of arrays, those of tokens first.

        Args:
            function: The function to trace.
            num_tokens: Size of the token dim.
            tokens: Tree of (shape, dim of the tokens or None).
            others: Trees of shapes of arrays without tokens.
        """
        is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
        pairs, treedef = jax.tree.flatten(tokens, is_leaf=is_pair)
        shapes = treedef.unflatten([shape for shape, _ in pairs])
        program = jax.make_jaxpr(function)(shapes, *others)
        given = [Flow(dim=dim) for _, dim in pairs]
        given += [Flow()] * (len(program.jaxpr.invars) - len(given))
        return cls(program, num_tokens, given)

    def mixes(
        self,
        *,
        fewer: Traced | None = None,
        sums: bool = False,
        counts: bool = True,
        lenient: bool = False,
    ) -> str | None:
        """Return the first operation that joins tokens, and its line; None if none.

        Sums over all tokens are allowed if only linear operations follow.

        Args:
            fewer: The same function with fewer of the sequence's tokens at hand, to
                find what depends on their number, such as a mean.
            sums: Whether all results must be sums over tokens, which devices add up.
            counts: Whether a multiple of the number of tokens at hand is such a sum.
            lenient: Whether to allow an operation of which nothing is known, unless
                the function surely mixes tokens.
        """
        try:
            _Follower(self.num_tokens).run(Twins(self.program), self.given)
            if fewer is None and not sums:
                return None
            other = ratio = None
            if fewer is not None:
                other, ratio = fewer.program, (self.num_tokens, fewer.num_tokens)
            follower = _Follower(self.num_tokens, ratio=ratio)
            found = follower.run(Twins(self.program, other), self.given)
            if sums and not all(flow.adds_up(counts=counts) for flow in found):
                raise Mixed(ALIKE)
        except Mixed as mixed:
            if lenient and mixed.unknown:
                return self.surely_mixes()
            return f"{mixed} ({mixed.where})" if mixed.where else str(mixed)
        return None

    def needs_second_trace(self) -> bool:
        """Return True if only a second trace can tell whether results are sums.

        Call it only if `mixes()` returned None.
        """
        follower = _Follower(self.num_tokens)
        found = follower.run(Twins(self.program), self.given)
        are_sums = all(flow.adds_up(counts=False) for flow in found)
        return bool(follower.sizes) or not are_sums

    def surely_mixes(self) -> str | None:
        """Return an operation that surely joins tokens of the results; None if none.

        Operations whose results are not used, such as for printing, are allowed.
        """
        follower = _Follower(self.num_tokens, lenient=True)
        found = follower.run(Twins(self.program), self.given)
        return next(filter(None, (flow.fault or flow.picked for flow in found)), None)


def mixes_tokens(
    function: Callable[..., Any],
    num_tokens: int,
    tokens: Any,
    *others: Any,
    fewer: tuple[Callable[..., Any], Any] | None = None,
    sums: bool = False,
    counts: bool = True,
    lenient: bool = False,
) -> str | None:
    """Trace a function, and return what joins tokens in it (`Traced.mixes`).

    Args:
        function: Function of trees of arrays, those of tokens first.
        num_tokens: Number of tokens.
        tokens: Tree of (shape, dim of the tokens or None).
        others: Trees of shapes of arrays without tokens.
        fewer: `function` and `tokens` with fewer tokens at hand.
        sums: As `Traced.mixes` takes it, like the rest.
        counts: Whether a number of tokens is a sum.
        lenient: Whether to allow unknown operations.
    """
    traced = Traced.from_function(function, num_tokens, tokens, *others)
    if fewer is None:
        return traced.mixes(sums=sums, counts=counts, lenient=lenient)
    # A function that mixes tokens may take no fewer.
    found = traced.mixes(lenient=lenient)
    if found is not None:
        return found
    pairs = jax.tree.leaves(fewer[1], is_leaf=lambda node: isinstance(node, tuple))
    num_fewer = next(shape.shape[dim] for shape, dim in pairs if dim is not None)
    less = Traced.from_function(fewer[0], num_fewer, fewer[1], *others)
    return traced.mixes(fewer=less, sums=sums, counts=counts, lenient=lenient)


@dataclass(frozen=True)
class _Follower:
    """Follows tokens through a program.

    Args:
        num_tokens: Size of the dims of tokens.
        lenient: Whether to note an operation that mixes tokens in its results, and
            allow one that only may.
        ratio: Numbers of tokens at hand, of the program and of its twin.
        open: Operations that are being followed, the innermost last.
        sizes: Numbers that scale tokens, or sums of them, and may be their count.
    """

    num_tokens: int
    lenient: bool = False
    ratio: tuple[int, int] | None = None
    open: list[JaxprEqn] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def run(self, program: Twins, given: Sequence[Flow]) -> list[Flow]:
        """Return the flows of the results of a program, from those of its arguments."""
        twins = program.twins()

        def apply(equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
            twin = next(twins)
            atoms = None if twin is None else twin.invars
            flows = counted_literals(equation.invars, atoms, flows, self.ratio)
            return self._apply(equation, twin, flows)

        found = walk(
            program.program, given, apply, _literal, program.constants(self.ratio)
        )
        results = program.jaxpr.outvars
        return counted_literals(results, program.other_results, found, self.ratio)

    def _apply(
        self, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
    ) -> list[Flow]:
        self.open.append(equation)
        try:
            found = self._results(equation, twin, flows)
            check_lengths(equation, twin, found)
            return found
        except Mixed as mixed:
            lines = (source_line(one, _LIBRARIES) for one in reversed(self.open))
            mixed.where = mixed.where or next(filter(None, lines), "")
            if not self.lenient:
                raise
            return [_noted(mixed, flows)] * len(equation.outvars)
        finally:
            self.open.pop()

    def _results(
        self, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
    ) -> list[Flow]:
        name, loop = equation.primitive.name, Loop.parse(equation)
        if name not in CALLS and name not in EACH_ELEMENT:
            check_not_merged(name, flows)
        if loop is not None:
            return _loop(self, loop, equation, twin, flows)
        if name == "cond":
            return _cond(self, inner_programs(equation, twin), flows)
        inner = called_program(equation)
        if inner is not None:
            if equation.params.get("name") == WHOLE_SEQUENCE:
                _check_no_tokens(flows)
            if equation.params.get("name") == SEQUENCE_SUM:
                _check_totals(flows, twin)
            other = None if twin is None else called_program(twin)
            return self.run(Twins(inner, other), flows)
        if any(flow.lost for flow in flows):
            picked = self._still_picked(equation, flows)
            made = replace(lost(flows), picked=picked)
            return [made for _ in equation.outvars]
        has_tokens = any(flow.has_tokens for flow in flows)
        if has_tokens:
            self._note_sizes(name, flows)
        if has_tokens and counts(equation, twin, flows):
            raise Mixed(f"{name} {COUNTED}")
        check_table(equation, twin, flows)
        found = RULES.get(name, elementwise)(equation, flows, self.num_tokens)
        if has_tokens:
            return found
        return without_tokens(equation, twin, flows, found, self.ratio)

    def _note_sizes(self, name: str, flows: list[Flow]) -> None:
        """Record numbers that scale tokens and may come from the token count.

        One trace cannot tell a mean from a division by a constant. Any number may come
        from the count where it scales a sum; where it scales tokens, one of its size.
        """
        least = 1.0 if any(flow.total for flow in flows) else self.num_tokens / 2
        for flow in flows if name in ("mul", "div") else ():
            size = flow.value
            if flow.has_tokens or not isinstance(size, int | float) or not size:
                continue
            whole = max(abs(size), 1 / abs(size))
            if math.isfinite(whole) and whole > least:
                self.sizes.append(size)

    def _still_picked(self, equation: JaxprEqn, flows: list[Flow]) -> str:
        """Return what selected the tokens that the results are multiples of, or "".

        A sum of all that are sorted is the sum of all tokens.
        """
        name, [flow, *others] = equation.primitive.name, flows
        if name == "mul" and others[0].lost:
            flow, others = others[0], [flow]
        if name not in _MULTIPLES or any(x.lost or x.has_tokens for x in others):
            return ""
        whole = self.num_tokens in array_shape(equation.invars[0])
        return "" if name == "reduce_sum" and whole else flow.picked


def _literal(value: Any) -> Flow:
    """Return the flow of a literal, with its one value if it is a number."""
    dims = frozenset(range(getattr(value, "ndim", 0)))
    if isinstance(value, np.generic | np.ndarray):
        number = value.item() if value.ndim == 0 else None
    else:
        number = value if isinstance(value, int | float) else None
    return Flow(uniform=dims, value=number)


def _noted(mixed: Mixed, flows: list[Flow]) -> Flow:
    """Return the flow of the results of an operation that mixes tokens, or may."""
    what, *_ = str(mixed).split(";")
    words = f"{what} ({mixed.where})" if mixed.where else what
    if mixed.certain:
        return Flow(lost=True, fault=words)
    return replace(lost(flows), picked=words if mixed.picks else "")


def _check_no_tokens(flows: list[Flow]) -> None:
    """Raise if a function of whole sequences is given tokens at hand."""
    if any(flow.has_tokens for flow in flows):
        raise Mixed(
            "a function of whole sequences (scope.over_sequence) that has tokens at "
            "hand from outside, or scope.positions; give it them joined to its array, "
            "and jnp.arange of its own length"
        )


def _check_totals(flows: list[Flow], twin: JaxprEqn | None) -> None:
    """Raise if a sum over the sequence is of tokens, or of what all devices have.

    Only a twin tells what depends on the number of tokens at hand; without one such
    values are allowed.
    """
    for flow in flows:
        same = twin is not None and not (flow.zero or flow.counted or flow.lost)
        if flow.dim is not None or (same and not flow.total):
            raise Mixed(
                "scope.sequence_sum of what is no sum over the tokens at hand; sum "
                "over them first",
                certain=True,
            )


def _loop(
    follower: _Follower,
    loop: Loop,
    equation: JaxprEqn,
    twin: JaxprEqn | None,
    flows: list[Flow],
) -> list[Flow]:
    """Return the flows of the results of a `scan` or `while`."""
    other = None if twin is None else Loop.parse(twin)
    body = Twins(loop.body, None if other is None else other.body)
    consts, carry, along = loop.split(flows)
    # An iteration has a slice of each: their first dim is gone.
    slices = [
        Flow() if flow.dim == 0 else flow.moved(lambda dim: dim - 1 if dim else None)
        for flow in along
    ]
    if any(flow.dim == 0 for flow in along):
        if carry:
            raise Mixed("a loop over the tokens that carries something on")
        for flow, x in zip(along, equation.invars[loop.num_consts :], strict=True):
            check_no_places(flow, x, 0, follower.num_tokens, "a loop")
        return _each_token(follower.run(body, [*consts, *slices]))
    carry, made = loop.carried(
        lambda carry: follower.run(body, [*consts, *carry, *slices]),
        carry,
        lambda one, other: _joined(follower, body, [one, other]),
    )
    if loop.condition is None:
        if other_numbers(equation, twin, ("length",)):
            carry = _counted(carry, body, loop.num_consts)
        return [*carry, *(flow.moved(lambda dim: dim + 1) for flow in made)]
    condition = Twins(loop.condition, None if other is None else other.condition)
    ends = follower.run(condition, [*flows[: loop.num_condition_consts], *carry])
    if any(flow.has_tokens for flow in ends):
        raise Mixed("a loop that tokens end")
    if any(flow.lost for flow in ends):
        return [lost([*ends, flow]) for flow in carry]
    if any(flow.counted for flow in ends):
        carry = _counted(carry, body, loop.num_consts)
    return carry


def _each_token(found: list[Flow]) -> list[Flow]:
    """Return the flows of a loop with one token an iteration, from its body's."""
    if any(flow.fault for flow in found):
        return [lost(found) for _ in found]
    if any(flow.total for flow in found):
        raise Mixed("a sum over tokens beside each token")
    if any(flow.dim is not None for flow in found):
        raise Mixed("a loop over the tokens, each of which meets all of them")
    if any(flow.counted for flow in found):
        raise Mixed(f"a loop {COUNTED}")
    return [flow if flow.lost else Flow(dim=0) for flow in found]


def _joined(
    follower: _Follower, program: Twins, several: list[list[Flow]]
) -> list[Flow]:
    """Return the flow of each result of a program that may have one of several."""
    results = []
    variables = program.jaxpr.outvars[: len(several[0])]
    for var, flows in zip(variables, zip(*several, strict=True), strict=True):
        joined = functools.reduce(Flow.joined, flows)
        for flow in flows if joined.dim is not None else ():
            check_no_places(
                flow, var, joined.dim, follower.num_tokens, "a loop or branch"
            )
        results.append(joined)
    return results


def _counted(carry: list[Flow], body: Twins, first: int) -> list[Flow]:
    """Return the flows after a loop that runs once for each token at hand.

    Args:
        carry: Flows of what it carries.
        body: Its body.
        first: Place of the first carried value among the body's arguments.
    """
    before, after = body.jaxpr.invars[first:], body.jaxpr.outvars
    found = []
    for flow, old, new in zip(carry, before, after, strict=False):
        if flow.has_tokens and old is not new:
            raise Mixed(f"a loop {COUNTED}")
        found.append(flow if old is new else flow.as_counted())
    return found


def _cond(follower: _Follower, branches: list[Twins], flows: list[Flow]) -> list[Flow]:
    """Return the flows of the results of a branch."""
    index, *others = flows
    if index.has_tokens:
        raise Mixed("a branch that tokens choose")
    found = [follower.run(branch, others) for branch in branches]
    joined = _joined(follower, branches[0], found)
    if index.lost:
        return [lost([index, flow]) for flow in joined]
    if not index.counted:
        return joined
    if any(flow.has_tokens for flow in joined):
        raise Mixed(f"a branch {COUNTED}")
    return [flow.as_counted() for flow in joined]
