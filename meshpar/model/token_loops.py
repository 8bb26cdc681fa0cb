"""How loops and branches pass tokens on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from jax.extend.core import Jaxpr, JaxprEqn

from meshpar.model.scan_counts import scan_counts
from meshpar.model.token_counts import COUNTED, Twins, inner_programs, other_numbers
from meshpar.model.token_flow import Flow, Mixed, check_no_places, lost


class Follower(Protocol):
    """What follows tokens through a program."""

    @property
    def num_tokens(self) -> int:
        """Size of the dims of tokens."""

    def run(self, program: Twins, given: Sequence[Flow]) -> list[Flow]:
        """How a program's results have tokens, from how its arguments do."""


Loop = Callable[[Follower, JaxprEqn, JaxprEqn | None, list[Flow]], list[Flow]]
"""(follower, operation, the same with fewer tokens, flows given) -> flows found."""


def _scan(
    follower: Follower, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
) -> list[Flow]:
    consts, carried = scan_counts(equation)
    along = flows[consts + carried :]
    if any(flow.dim == 0 for flow in along):
        if carried:
            raise Mixed("a loop over the tokens that carries something on")
        return _of_each_token(follower, equation, twin, flows, consts)
    [body] = inner_programs(equation, twin)
    xs = [_of_one(flow) for flow in along]
    given, carry = flows[:consts], flows[consts : consts + carried]
    carry, ys = _carried(follower, body, given, carry, xs)
    if other_numbers(equation, twin, ("length",)):
        carry = _counted(carry, _kept(body.jaxpr, consts, carried))
    return [*carry, *(flow.moved(lambda dim: dim + 1) for flow in ys)]


def _of_each_token(
    follower: Follower,
    equation: JaxprEqn,
    twin: JaxprEqn | None,
    flows: list[Flow],
    consts: int,
) -> list[Flow]:
    """Of a loop along the tokens, each iteration of which has one of them."""
    for flow, x in zip(flows[consts:], equation.invars[consts:], strict=True):
        check_no_places(flow, x, 0, follower.num_tokens, "a loop")
    [body] = inner_programs(equation, twin)
    xs = [_of_one(flow) for flow in flows[consts:]]
    found = follower.run(body, [*flows[:consts], *xs])
    if any(flow.fault for flow in found):
        return [lost(found) for _ in found]
    if any(flow.total for flow in found):
        raise Mixed("a sum over tokens beside each token")
    if any(flow.dim is not None for flow in found):
        raise Mixed("a loop over the tokens, each of which meets all of them")
    if any(flow.counted for flow in found):
        raise Mixed(f"a loop {COUNTED}")
    return [flow if flow.lost else Flow(dim=0) for flow in found]


def _of_one(flow: Flow) -> Flow:
    """Of one iteration, from what a loop runs along."""
    return Flow() if flow.dim == 0 else flow.moved(lambda dim: dim - 1 if dim else None)


def _carried(
    follower: Follower,
    body: Twins,
    given: list[Flow],
    carry: list[Flow],
    xs: list[Flow],
) -> tuple[list[Flow], list[Flow]]:
    """Flows of what iterations hand on, as they stay, and of the body's others."""
    while True:
        found = follower.run(body, [*given, *carry, *xs])
        joined = _joined(follower, body, [carry, found[: len(carry)]])
        if joined == carry:
            return carry, found[len(carry) :]
        carry = joined


def _joined(
    follower: Follower, program: Twins, several: list[list[Flow]]
) -> list[Flow]:
    """What holds for each result of a program, whichever of several flows it has."""
    results = []
    for var, flows in zip(
        program.jaxpr.outvars[: len(several[0])],
        zip(*several, strict=True),
        strict=True,
    ):
        joined = functools.reduce(Flow.joined, flows)
        for flow in flows if joined.dim is not None else ():
            check_no_places(
                flow, var, joined.dim, follower.num_tokens, "a loop or branch"
            )
        results.append(joined)
    return results


def _kept(body: Jaxpr, first: int, carried: int) -> list[bool]:
    """Whether a loop's body hands each value on as it got it."""
    before = body.invars[first : first + carried]
    after = body.outvars[:carried]
    return [one is other for one, other in zip(before, after, strict=True)]


def _counted(carry: list[Flow], unchanged: list[bool]) -> list[Flow]:
    """What a loop gives that runs as often as there are tokens at hand."""
    found = []
    for flow, same in zip(carry, unchanged, strict=True):
        if flow.has_tokens and not same:
            raise Mixed(f"a loop {COUNTED}")
        found.append(flow if same else flow.as_counted())
    return found


def _while(
    follower: Follower, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
) -> list[Flow]:
    params = equation.params
    before, own = params["cond_nconsts"], params["body_nconsts"]
    body, cond = (
        Twins(params[name], None if twin is None else twin.params[name])
        for name in ("body_jaxpr", "cond_jaxpr")
    )
    given, carry = flows[before : before + own], flows[before + own :]
    carry, _ = _carried(follower, body, given, carry, [])
    ends = follower.run(cond, [*flows[:before], *carry])
    if any(flow.has_tokens for flow in ends):
        raise Mixed("a loop that tokens end")
    if any(flow.lost for flow in ends):
        return [lost([*ends, flow]) for flow in carry]
    if any(flow.counted for flow in ends):
        carry = _counted(carry, _kept(body.jaxpr, own, len(carry)))
    return carry


def _cond(
    follower: Follower, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
) -> list[Flow]:
    if flows[0].has_tokens:
        raise Mixed("a branch that tokens choose")
    branches = inner_programs(equation, twin)
    found = [follower.run(branch, flows[1:]) for branch in branches]
    joined = _joined(follower, branches[0], found)
    if flows[0].lost:
        return [lost([flows[0], flow]) for flow in joined]
    if not flows[0].counted:
        return joined
    if any(flow.has_tokens for flow in joined):
        raise Mixed(f"a branch {COUNTED}")
    return [flow.as_counted() for flow in joined]


LOOPS: dict[str, Loop] = {"scan": _scan, "while": _while, "cond": _cond}
"""Operations that run programs several times, or one of several."""
