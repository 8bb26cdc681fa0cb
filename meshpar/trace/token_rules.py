"""Token flow of every operation: the rules by primitive, and of elementwise ones."""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from meshpar.trace.primitives import ELEMENTWISE, LINEAR, RANDOM, UNCHANGED
from meshpar.trace.token_dims import DIM_RULES, WINDOW_RULES
from meshpar.trace.token_flow import (
    Flow,
    Mixed,
    Rule,
    check_no_places,
    gives_fractions,
    token_dim,
)
from meshpar.trace.walk import array_shape

_ORDERED = {
    *("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"),
    *("scatter_add", "select_and_scatter_add", "ppermute", "psum"),
}
EACH_ELEMENT = ELEMENTWISE | UNCHANGED | RANDOM
"""Operations that compute each element of a result from those at the same place.

Other operations may join elements although their results have the same shape.
"""


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


def _drawn(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow of random numbers, which differ from place to place."""
    if flows[0].has_tokens:
        return elementwise(equation, flows, num_tokens)
    keys, drawn = (len(array_shape(x)) for x in (*equation.invars, *equation.outvars))
    numbered = flows[0].numbered.union(range(keys, drawn))
    return [Flow(uniform=flows[0].uniform, numbered=numbered)]


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


def _reduce(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    axes, flow = equation.params["axes"], flows[0]
    name = equation.primitive.name
    if flow.total:
        if name != "reduce_sum":
            raise Mixed(f"{name} of a sum over tokens", certain=True)
        return [flow]
    if flow.dim in axes:
        if name != "reduce_sum":
            raise Mixed(f"{name} over the sequence", picks=True)
        return [Flow(total=True)]
    kept = [d for d in range(len(array_shape(equation.invars[0]))) if d not in axes]
    return [flow.kept(kept)] * len(equation.outvars)


def _dot(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    contracted, batched = equation.params["dimension_numbers"]
    if any(flow.total for flow in flows):
        if all(flow.has_tokens for flow in flows):
            raise Mixed("dot_general of a sum over tokens", certain=True)
        return [Flow(total=True)]
    _check_pairs(equation, flows, num_tokens)
    places: list[Any] = []
    for at, (flow, x) in enumerate(zip(flows, equation.invars, strict=True)):
        if flow.dim is None:
            continue
        if flow.dim in contracted[at]:
            places.append(("contracted", list(contracted[at]).index(flow.dim)))
        elif flow.dim in batched[at]:
            places.append(list(batched[at]).index(flow.dim))
        else:
            used = {*contracted[at], *batched[at]}
            free = [d for d in range(len(array_shape(x))) if d not in used]
            first = len(array_shape(equation.invars[0])) - len(contracted[0])
            places.append(
                (len(batched[0]) if at == 0 else first) + free.index(flow.dim)
            )
    if not places:
        return [Flow()]
    if len(places) == 2 and places[0] != places[1]:
        raise Mixed("a matmul of every token with every token", certain=True)
    if isinstance(places[0], tuple):
        if len(places) == 1:
            raise Mixed("a matmul along the sequence")
        return [Flow(total=True)]
    return [Flow(dim=int(places[0]))]


def _check_pairs(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> None:
    """Raise if a matmul pairs tokens with an array that has a value for each."""
    _, batched = equation.params["dimension_numbers"]
    for at, flow in enumerate(flows):
        if flow.dim in batched[at]:
            dim = batched[1 - at][list(batched[at]).index(flow.dim)]
            one = flows[1 - at], equation.invars[1 - at]
            certain = gives_fractions(equation)
            check_no_places(*one, dim, num_tokens, "a matmul", certain=certain)


RULES: dict[str, Rule] = {
    **DIM_RULES,
    **WINDOW_RULES,
    "dot_general": _dot,
    **dict.fromkeys(("random_bits", "random_split"), _drawn),
    **dict.fromkeys(
        ("optimization_barrier", "device_put"), lambda equation, flows, _: flows
    ),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"), _reduce
    ),
    **dict.fromkeys(("reduce_or", "reduce_xor", "argmax", "argmin"), _reduce),
}
