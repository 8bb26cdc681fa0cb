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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshpar.model.token_rules import RULES, Flow, Mixed, elementwise


@dataclass(frozen=True)
class _Follower:
    """Follows tokens through a program.

    Args:
        num_tokens: Size of the dims of tokens.
    """

    num_tokens: int
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
            return Flow(uniform=frozenset(range(getattr(atom.val, "ndim", 0))))
        return self.flows.get(atom, Flow())

    def _through(self, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        try:
            if name in RULES:
                return RULES[name](equation, flows, self.num_tokens)
            if name in _LOOPS:
                return _LOOPS[name](self, equation, flows)
            inner = _inner(equation)
            if inner is not None and len(inner.invars) == len(flows):
                return self.run(inner, flows)
            return elementwise(equation, flows, self.num_tokens)
        except Mixed as found:
            if found.where:
                raise
            raise Mixed(str(found), _source(equation)) from None


def mixes_tokens(
    function: Callable[..., Any], num_tokens: int, tokens: Any, *others: Any
) -> str | None:
    """The first operation that joins different tokens, and its place; None if none.

    Sums over all tokens are none, where nothing but what is linear follows.

    Args:
        function: Of trees of arrays, those of tokens first.
        num_tokens: How many there are.
        tokens: Tree of (shape, dim of the tokens or None).
        others: Trees of shapes of arrays that have none.
    """
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
    pairs, treedef = jax.tree.flatten(tokens, is_leaf=is_pair)
    shapes = treedef.unflatten([shape for shape, _ in pairs])
    program = jax.make_jaxpr(function)(shapes, *others)
    given = [Flow(dim=dim) for _, dim in pairs]
    given += [Flow()] * (len(program.jaxpr.invars) - len(pairs))
    try:
        _Follower(num_tokens).run(program.jaxpr, given)
    except Mixed as found:
        return f"{found} ({found.where})" if found.where else str(found)
    return None


def _scan(follower: _Follower, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    params = equation.params
    consts, carried = params["num_consts"], params["num_carry"]
    body, carry = params["jaxpr"].jaxpr, flows[consts : consts + carried]
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
        raise Mixed("a sum over tokens beside each token")
    return [*carry, *ys]


def _of_one(flow: Flow, carries: bool) -> Flow:
    """Of one iteration, from what a loop runs along."""
    if flow.dim == 0:
        if carries:
            raise Mixed("a loop over the tokens that carries something on")
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
        raise Mixed("a loop that tokens end")
    return carry


def _cond(follower: _Follower, equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    if flows[0].has_tokens:
        raise Mixed("a branch that tokens choose")
    found = [
        follower.run(branch.jaxpr, flows[1:]) for branch in equation.params["branches"]
    ]
    joined = found[0]
    for more in found[1:]:
        joined = [a.joined(b) for a, b in zip(joined, more, strict=True)]
    return joined


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


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
