"""Whether a function treats every token by itself, read from its trace.

The devices that share a sequence run a model's functions on their own tokens. What
attention mixes is moved between them; a convolution along the sequence, a recurrence,
or positions counted from the first token at hand would be wrong in silence. So the
trace is followed from the arrays of tokens: an operation that joins different tokens,
or tokens and an array of places, is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshpar.model.scan_counts import scan_counts
from meshpar.model.token_counts import Twins
from meshpar.model.token_dims import DIM_RULES
from meshpar.model.token_flow import Flow, Mixed
from meshpar.model.token_rules import RULES, elementwise


@dataclass(frozen=True)
class _Follower:
    """Follows tokens through a program.

    Args:
        num_tokens: Size of the dims of tokens.
        twins: Its operations beside those with fewer tokens.
        lenient: Whether an operation that only may mix tokens is let through.
    """

    num_tokens: int
    twins: Twins
    lenient: bool = False
    flows: dict[Any, Flow] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr, given: Sequence[Flow]) -> list[Flow]:
        """How the results of a program have tokens, from how its arguments do."""
        for var, flow in zip(jaxpr.invars, given, strict=True):
            self.flows[var] = flow
        for equation in jaxpr.eqns:
            found = self._through(equation, [self._of(x) for x in equation.invars])
            for var, flow in zip(equation.outvars, found, strict=True):
                self.flows[var] = flow
        return [self._of(var) for var in jaxpr.outvars]

    def _of(self, atom: Any) -> Flow:
        if hasattr(atom, "val"):
            dims = frozenset(range(getattr(atom.val, "ndim", 0)))
            return Flow(uniform=dims, value=_number(atom.val))
        return self.flows.get(atom, Flow())

    def _through(self, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        try:
            if name in _LOOPS:
                return _LOOPS[name](self, equation, flows)
            inner = _inner(equation)
            if inner is not None and len(inner.invars) == len(flows):
                return self.run(inner, flows)
            if any(flow.lost for flow in flows):
                return [Flow(lost=True) for _ in equation.outvars]
            has_tokens = any(flow.has_tokens for flow in flows)
            if has_tokens and name not in DIM_RULES:
                self._check_counts(equation, flows)
            rule = RULES.get(name, elementwise)
            found = rule(equation, flows, self.num_tokens)
            if has_tokens:
                return found
            return self.twins.without_tokens(equation, flows, found)
        except Mixed as mixed:
            if self.lenient and not mixed.certain:
                return [Flow(lost=True) for _ in equation.outvars]
            if mixed.where:
                raise
            where = _source(equation)
            raise Mixed(str(mixed), where, certain=mixed.certain) from None

    def _check_counts(self, equation: JaxprEqn, flows: list[Flow]) -> None:
        if self.twins.counts(equation, flows):
            raise Mixed(
                f"{equation.primitive.name} of tokens by how many are at hand; take "
                "scope.seq_length(seq), or sums alone"
            )


def mixes_tokens(
    function: Callable[..., Any],
    num_tokens: int,
    tokens: Any,
    *others: Any,
    fewer: tuple[Callable[..., Any], Any] | None = None,
    sums: bool = False,
) -> str | None:
    """The first operation that joins different tokens, and its place; None if none.

    Sums over all tokens are none, where nothing but what is linear follows.

    Args:
        function: Of trees of arrays, those of tokens first.
        num_tokens: How many there are.
        tokens: Tree of (shape, dim of the tokens or None).
        others: Trees of shapes of arrays that have none.
        fewer: `function` and `tokens` with fewer of the sequence's at hand: so it is
            found out what depends on their number, such as a mean.
        sums: Whether all results are sums over tokens, which devices add up.
    """
    program, dims = _traced(function, tokens, others)
    given = [Flow(dim=dim) for dim in dims]
    given += [Flow()] * (len(program.jaxpr.invars) - len(dims))
    try:
        _Follower(num_tokens, Twins(program.jaxpr, None)).run(program.jaxpr, given)
        if fewer is None and not sums:
            return None
        other = None if fewer is None else _traced(*fewer, others)[0].jaxpr
        follower = _Follower(num_tokens, Twins(program.jaxpr, other))
        found = follower.run(program.jaxpr, given)
        if sums and not all(flow.total or flow.zero for flow in found):
            raise Mixed("a sum that has no tokens in it, which each device would add")
    except Mixed as mixed:
        return f"{mixed} ({mixed.where})" if mixed.where else str(mixed)
    return None


def surely_mixes(
    function: Callable[..., Any], num_examples: int, examples: Any, *others: Any
) -> str | None:
    """As `mixes_tokens`, of examples: what only may join them is let through.

    Args:
        function: Of trees of arrays, those of examples first.
        num_examples: How many there are.
        examples: Tree of (shape, dim of the examples or None).
        others: Trees of shapes of arrays that have none.
    """
    program, dims = _traced(function, examples, others)
    given = [Flow(dim=dim) for dim in dims]
    given += [Flow()] * (len(program.jaxpr.invars) - len(dims))
    twins = Twins(program.jaxpr, None)
    try:
        _Follower(num_examples, twins, lenient=True).run(program.jaxpr, given)
    except Mixed as mixed:
        what = str(mixed).split(";")[0]
        for word, other in (("token", "example"), ("the sequence", "the batch")):
            what = what.replace(word, other)
        return f"{what} ({mixed.where})" if mixed.where else what
    return None


def _traced(
    function: Callable[..., Any], tokens: Any, others: tuple
) -> tuple[ClosedJaxpr, list[int | None]]:
    """The program, and the dims of tokens of its first arguments."""
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
    pairs, treedef = jax.tree.flatten(tokens, is_leaf=is_pair)
    shapes = treedef.unflatten([shape for shape, _ in pairs])
    return jax.make_jaxpr(function)(shapes, *others), [dim for _, dim in pairs]


def _scan(follower: _Follower, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    consts, carried = scan_counts(equation)
    body, carry = equation.params["jaxpr"].jaxpr, flows[consts : consts + carried]
    xs = [_of_one(flow, carried > 0) for flow in flows[consts + carried :]]
    over_tokens = any(flow.dim == 0 for flow in flows[consts + carried :])
    while True:
        found = follower.run(body, [*flows[:consts], *carry, *xs])
        joined = [a.joined(b) for a, b in zip(carry, found[:carried], strict=True)]
        if joined == carry:
            break
        carry = joined
    ys = [
        Flow(dim=0) if over_tokens else flow.moved(lambda dim: dim + 1)
        for flow in found[carried:]
    ]
    if over_tokens and any(flow.total for flow in found[carried:]):
        raise Mixed("a sum over tokens beside each token", certain=False)
    return [*carry, *ys]


def _of_one(flow: Flow, carries: bool) -> Flow:
    """Of one iteration, from what a loop runs along."""
    if flow.dim == 0:
        if carries:
            words = "a loop over the tokens that carries something on"
            raise Mixed(words, certain=False)
        return Flow()
    return flow.moved(lambda dim: dim - 1)


def _while(follower: _Follower, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    params = equation.params
    before = params["cond_nconsts"]
    consts = flows[before : before + params["body_nconsts"]]
    carry = flows[before + params["body_nconsts"] :]
    while True:
        found = follower.run(params["body_jaxpr"].jaxpr, [*consts, *carry])
        joined = [a.joined(b) for a, b in zip(carry, found, strict=True)]
        if joined == carry:
            break
        carry = joined
    ends = follower.run(params["cond_jaxpr"].jaxpr, [*flows[:before], *carry])
    if any(flow.has_tokens for flow in ends):
        raise Mixed("a loop that tokens end", certain=False)
    return carry


def _cond(follower: _Follower, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    if flows[0].has_tokens:
        raise Mixed("a branch that tokens choose", certain=False)
    found = [
        follower.run(branch.jaxpr, flows[1:]) for branch in equation.params["branches"]
    ]
    joined = found[0]
    for more in found[1:]:
        joined = [a.joined(b) for a, b in zip(joined, more, strict=True)]
    return joined


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _number(constant: Any) -> Any:
    """A constant's one value; None if it has several, or is no number."""
    if isinstance(constant, np.generic | np.ndarray):
        return constant.item() if constant.ndim == 0 else None
    return constant if isinstance(constant, int | float) else None


def _inner(equation: JaxprEqn) -> Jaxpr | None:
    for value in equation.params.values():
        if isinstance(value, ClosedJaxpr):
            return value.jaxpr
        if isinstance(value, Jaxpr):
            return value
    return None


def _source(equation: JaxprEqn) -> str:
    traceback = equation.source_info.traceback
    frames: list[Any] = [] if traceback is None else list(traceback.frames)
    for frame in frames:
        inside = ("/jax/", "/flax/", "/meshpar/model/", "<")
        if not any(part in frame.file_name for part in inside):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
