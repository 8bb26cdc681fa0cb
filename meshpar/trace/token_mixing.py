"""Whether a function treats every token by itself, read from its trace.

The devices that share a sequence run a model's functions on their own tokens. What
attention mixes is moved between them; a convolution along the sequence, a recurrence,
or positions counted from the first token at hand would be wrong in silence. So the
trace is followed from the arrays of tokens: an operation that joins different tokens,
or tokens and an array of places, is named.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

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
from meshpar.trace.token_dims import check_not_merged
from meshpar.trace.token_flow import (
    SEQUENCE_SUM,
    WHOLE_SEQUENCE,
    Flow,
    Mixed,
    check_no_places,
    lost,
    shape_of,
)
from meshpar.trace.token_rules import OF_EACH_ELEMENT, RULES, elementwise
from meshpar.trace.walk import scan_counts

_CALLS = frozenset(
    (
        *("call", "checkpoint", "closed_call", "composite", "core_call", "eval_jaxpr"),
        *("custom_dce_call", "custom_jvp_call", "custom_partitioning"),
        *("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "jit"),
        *("named_call", "pjit", "remat", "remat2", "shard_map"),
    )
)
"""Operations that run one program on what they are given, as it is."""

_LIBRARIES = (
    *("/jax/", "/flax/", "<", "/meshpar/trace/", "/meshpar/model/"),
    *("/meshpar/parallel/", "/meshpar/checks/"),
)
"""Parts of the paths of files that are not a user's."""

_MULTIPLES = {
    *("broadcast_in_dim", "convert_element_type", "copy", "div", "dynamic_slice"),
    *("mul", "neg", "reduce_sum", "slice", "squeeze", "stop_gradient"),
}
"""Operations that leave some of what they are given, or sums or multiples of it."""


@dataclass(frozen=True)
class _Follower:
    """Follows tokens through a program.

    Args:
        num_tokens: Size of the dims of tokens.
        lenient: Whether an operation that mixes tokens is noted in its results, and
            one that only may is let through.
        ratio: Tokens at hand, and how many the twin of a program has at hand.
        flows: Of each variable so far.
        open: Operations that are being followed, the innermost last.
        sizes: Numbers that scale tokens, or sums of them, and may be their count.
    """

    num_tokens: int
    lenient: bool = False
    ratio: tuple[int, int] | None = None
    flows: dict[Any, Flow] = field(default_factory=dict)
    open: list[JaxprEqn] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def run(self, program: Twins, given: Sequence[Flow]) -> list[Flow]:
        """How the results of a program have tokens, from how its arguments do."""
        self.flows.update(program.constants(self.ratio))
        self.flows.update(zip(program.jaxpr.invars, given, strict=True))
        for equation, twin in program.equations():
            flows = counted_literals(
                equation.invars,
                None if twin is None else twin.invars,
                [self._of(x) for x in equation.invars],
                self.ratio,
            )
            found = self._through(equation, twin, flows)
            self.flows.update(zip(equation.outvars, found, strict=True))
        results = program.jaxpr.outvars
        found = [self._of(var) for var in results]
        return counted_literals(results, program.other_results, found, self.ratio)

    def _of(self, atom: Any) -> Flow:
        if hasattr(atom, "val"):
            dims = frozenset(range(getattr(atom.val, "ndim", 0)))
            return Flow(uniform=dims, value=_number(atom.val))
        return self.flows.get(atom, Flow())

    def _through(
        self, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
    ) -> list[Flow]:
        self.open.append(equation)
        try:
            found = self._found(equation, twin, flows)
            check_lengths(equation, twin, found)
            return found
        except Mixed as mixed:
            mixed.where = mixed.where or self._where()
            if not self.lenient:
                raise
            return [_noted(mixed, flows)] * len(equation.outvars)
        finally:
            self.open.pop()

    def _where(self) -> str:
        """The line of the innermost operation that has one."""
        return next(filter(None, map(_source, reversed(self.open))), "")

    def _found(
        self, equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]
    ) -> list[Flow]:
        name = equation.primitive.name
        if name not in _CALLS and name not in OF_EACH_ELEMENT:
            check_not_merged(name, flows)
        if name in LOOPS:
            return LOOPS[name](self, equation, twin, flows)
        if name in _CALLS:
            if equation.params.get("name") == WHOLE_SEQUENCE:
                _check_no_tokens(flows)
            if equation.params.get("name") == SEQUENCE_SUM:
                _check_totals(flows, twin)
            for inner in inner_programs(equation, twin):
                if len(inner.jaxpr.invars) == len(flows):
                    return self.run(inner, flows)
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
        return (
            found
            if has_tokens
            else without_tokens(equation, twin, flows, found, self.ratio)
        )

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
        """What picked the tokens of which there are multiples; empty if anything else.

        A sum of all that are sorted is the sum of all that there are.
        """
        name, [flow, *others] = equation.primitive.name, flows
        if name == "mul" and others[0].lost:
            flow, others = others[0], [flow]
        if name not in _MULTIPLES or any(x.lost or x.has_tokens for x in others):
            return ""
        whole = self.num_tokens in shape_of(equation.invars[0])
        return "" if name == "reduce_sum" and whole else flow.picked


def _noted(mixed: Mixed, flows: list[Flow]) -> Flow:
    """Of what an operation gives that mixes tokens, or may."""
    what, *_ = str(mixed).split(";")
    words = f"{what} ({mixed.where})" if mixed.where else what
    if mixed.certain:
        return Flow(lost=True, fault=words)
    return replace(lost(flows), picked=words if mixed.picks else "")


def _check_no_tokens(flows: list[Flow]) -> None:
    """Refuses tokens at hand in a function of whole sequences."""
    if any(flow.has_tokens for flow in flows):
        raise Mixed(
            "a function of whole sequences (scope.over_sequence) that has tokens at "
            "hand from outside, or scope.positions; give it them joined to its array, "
            "and jnp.arange of its own length"
        )


def _check_totals(flows: list[Flow], twin: JaxprEqn | None) -> None:
    """Refuses tokens, or what devices have alike, in a sum over the sequence.

    What depends on how many tokens are at hand is told by the twin alone; without one
    it is let through.
    """
    for flow in flows:
        alike = twin is not None and not (flow.zero or flow.counted or flow.lost)
        if flow.dim is not None or (alike and not flow.total):
            raise Mixed(
                "scope.sequence_sum of what is no sum over the tokens at hand; sum "
                "over them first",
                certain=True,
            )


@dataclass(frozen=True)
class Traced:
    """A traced function of tokens, for several questions on one trace.

    Args:
        program: The trace.
        num_tokens: Size of the token dim.
        given: How the arguments have tokens.
    """

    program: ClosedJaxpr
    num_tokens: int
    given: list[Flow]

    @classmethod
    def of(
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
        """The first operation that joins different tokens, and its place; else None.

        Sums over all tokens are none, where nothing but what is linear follows.

        Args:
            fewer: The same function with fewer of the sequence's tokens at hand: so it
                is found out what depends on their number, such as a mean.
            sums: Whether all results are sums over tokens, which devices add up.
            counts: Whether a multiple of how many tokens are at hand is such a sum.
            lenient: Whether an operation of which nothing is known is let through,
                unless the function surely mixes tokens.
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
        """As `mixes`, but what only may join tokens is let through.

        So is what no result is made of, such as numbers that are only printed.
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
    """`Traced.mixes` of a function.

    Args:
        function: As `Traced.of` takes it, and so the next three.
        num_tokens: How many there are.
        tokens: Tree of (shape, dim of the tokens or None).
        others: Trees of shapes of arrays that have none.
        fewer: `function` and `tokens` with fewer at hand.
        sums: As `Traced.mixes` takes it, and so the rest.
        counts: Whether a count of tokens is a sum.
        lenient: Whether an unknown operation is let through.
    """
    traced = Traced.of(function, num_tokens, tokens, *others)
    if fewer is None:
        return traced.mixes(sums=sums, counts=counts, lenient=lenient)
    # A function that mixes tokens may take no fewer.
    found = traced.mixes(lenient=lenient)
    if found is not None:
        return found
    less = Traced.of(fewer[0], _num_tokens(fewer[1]), fewer[1], *others)
    return traced.mixes(fewer=less, sums=sums, counts=counts, lenient=lenient)


def _num_tokens(tokens: Any) -> int:
    """How many tokens a tree of (shape, dim of the tokens or None) has."""
    pairs = jax.tree.leaves(tokens, is_leaf=lambda node: isinstance(node, tuple))
    return next(shape.shape[dim] for shape, dim in pairs if dim is not None)


def _number(constant: Any) -> Any:
    """A constant's one value; None if it has several, or is no number."""
    if isinstance(constant, np.generic | np.ndarray):
        return constant.item() if constant.ndim == 0 else None
    return constant if isinstance(constant, int | float) else None


def _source(equation: JaxprEqn) -> str:
    traceback = equation.source_info.traceback
    frames: list[Any] = [] if traceback is None else list(traceback.frames)
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


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
