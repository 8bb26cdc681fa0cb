"""How single operations pass tokens on: which dim has them, and what joins them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from meshpar.model.token_dims import DIM_RULES
from meshpar.model.token_flow import Flow, Mixed, Rule, check_no_places, shape_of

_LINEAR = {
    *("add", "add_any", "sub", "neg", "mul", "div", "convert_element_type", "copy"),
    *("select_n", "reduce_precision", "sharding_constraint", "name", "stop_gradient"),
    *("optimization_barrier", "copy_p"),
}
_ORDERED = {
    *("conv_general_dilated", "fft", "triangular_solve", "reduce_window"),
    *("reduce_window_sum", "scatter", "scatter_add", "scatter-add", "ppermute"),
    *("select_and_scatter_add", "psum"),
}


def elementwise(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of an operation on each element."""
    if not any(flow.has_tokens for flow in flows):
        uniform = [
            flow.uniform
            for flow, x in zip(flows, equation.invars, strict=True)
            if shape_of(x)
        ]
        alike = frozenset.intersection(*uniform) if uniform else frozenset()
        return [Flow(uniform=alike) for _ in equation.outvars]
    name = equation.primitive.name
    if name in _ORDERED:
        raise Mixed(f"{name} along the sequence", certain=False)
    if any(flow.total for flow in flows):
        return _of_total(equation, flows)
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if len(dims) > 1:
        raise Mixed(f"{name} of every token with every token")
    [dim] = dims
    if not _of_each_element(equation):
        raise Mixed(
            f"{name}, of which it is not known whether it mixes tokens", certain=False
        )
    for flow, x in zip(flows, equation.invars, strict=True):
        check_no_places(flow, x, dim, num_tokens, name)
    return [Flow(dim=dim) for _ in equation.outvars]


def _of_each_element(equation: JaxprEqn) -> bool:
    """Whether all shapes are alike, but for dims of 1 that are spread."""
    [shape, *others] = [shape_of(var) for var in equation.outvars]
    given = [shape_of(x) for x in equation.invars if shape_of(x)]
    return all(other == shape for other in others) and all(
        len(one) == len(shape)
        and all(size in (1, full) for size, full in zip(one, shape, strict=True))
        for one in given
    )


def _of_total(equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    """Of an operation that is linear in a sum over tokens, of which each has a part."""
    name = equation.primitive.name
    totals = [flow.total for flow in flows]
    scales = name == "mul" or (name == "div" and not totals[1])
    unlike = (scales and sum(totals) > 1) or (name == "select_n" and totals[0])
    if name not in _LINEAR or unlike or (name == "div" and totals[1]):
        raise Mixed(f"{name} of a sum over tokens")
    if any(flow.dim is not None for flow in flows):
        raise Mixed(f"{name} of a sum over tokens")
    terms = flows[1:] if name == "select_n" else flows
    if not scales and not all(flow.total or flow.zero for flow in terms):
        raise Mixed(
            f"{name} of a sum over tokens and what each device has alike, which would "
            "count once for each; take a share of it, of the tokens at hand"
        )
    return [Flow(total=True)]


def _reduce(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    axes, flow = equation.params["axes"], flows[0]
    name = equation.primitive.name
    if flow.total:
        if name != "reduce_sum":
            raise Mixed(f"{name} of a sum over tokens")
        return [flow]
    if flow.dim in axes:
        if name != "reduce_sum":
            raise Mixed(f"{name} over the sequence")
        return [Flow(total=True)]
    kept = [d for d in range(len(shape_of(equation.invars[0]))) if d not in axes]
    flow = replace(flow, uniform=flow.uniform & frozenset(kept))
    return [flow.moved(kept.index)] * len(equation.outvars)


def _dot(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    contracted, batched = equation.params["dimension_numbers"]
    if any(flow.total for flow in flows):
        if all(flow.has_tokens for flow in flows):
            raise Mixed("dot_general of a sum over tokens")
        return [Flow(total=True)]
    places: list[Any] = []
    for at, (flow, x) in enumerate(zip(flows, equation.invars, strict=True)):
        if flow.dim is None:
            continue
        if flow.dim in contracted[at]:
            places.append("contracted")
        elif flow.dim in batched[at]:
            places.append(list(batched[at]).index(flow.dim))
        else:
            used = {*contracted[at], *batched[at]}
            free = [d for d in range(len(shape_of(x))) if d not in used]
            first = len(shape_of(equation.invars[0])) - len(contracted[0])
            places.append(
                (len(batched[0]) if at == 0 else first) + free.index(flow.dim)
            )
    if not places:
        return [Flow()]
    if len(places) == 2 and places[0] != places[1]:
        raise Mixed("a matmul of every token with every token")
    if places[0] == "contracted":
        if len(places) == 1:
            raise Mixed("a matmul along the sequence", certain=False)
        return [Flow(total=True)]
    return [Flow(dim=int(places[0]))]


RULES: dict[str, Rule] = {
    **DIM_RULES,
    "dot_general": _dot,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"), _reduce
    ),
    **dict.fromkeys(("reduce_or", "reduce_xor", "argmax", "argmin"), _reduce),
}
