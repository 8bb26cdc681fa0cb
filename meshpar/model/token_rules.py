"""How single operations pass tokens on: which dim has them, and what joins them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn


class Mixed(Exception):
    """An operation joins different tokens.

    Args:
        what: The operation, in words.
        where: Its line; empty where that is not known yet.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.where = where


@dataclass(frozen=True)
class Flow:
    """How an array has tokens.

    Args:
        dim: The dim of the tokens, or None.
        total: Whether it is a sum over tokens, of which each device has a part.
        uniform: Where it has no tokens: the dims along which its values are all alike.
    """

    dim: int | None = None
    total: bool = False
    uniform: frozenset[int] = frozenset()

    @property
    def has_tokens(self) -> bool:
        """Whether its values differ between the devices that share a sequence."""
        return self.dim is not None or self.total

    def moved(self, place: Callable[[int], int]) -> Flow:
        """The same with dims elsewhere."""
        dim = None if self.dim is None else place(self.dim)
        return replace(self, dim=dim, uniform=frozenset(map(place, self.uniform)))

    def joined(self, other: Flow) -> Flow:
        """What holds for either."""
        if self.has_tokens != other.has_tokens:
            return self if self.has_tokens else other
        if (self.dim, self.total) != (other.dim, other.total):
            raise Mixed("tokens in different dims of a loop or branch")
        return replace(self, uniform=self.uniform & other.uniform)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or constant of a trace."""
    return tuple(atom.aval.shape)


Rule = Callable[[JaxprEqn, list[Flow], int], list[Flow]]

_LINEAR = {
    *("add", "add_any", "sub", "neg", "mul", "div", "convert_element_type", "copy"),
    *("select_n", "reduce_precision", "sharding_constraint", "name", "stop_gradient"),
    *("optimization_barrier", "copy_p"),
}
_ORDERED = {
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "conv_general_dilated"),
    *("fft", "triangular_solve", "reduce_window", "reduce_window_sum", "scatter"),
    *("scatter_add", "scatter-add", "select_and_scatter_add", "ppermute", "psum"),
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
        raise Mixed(f"{name} along the sequence")
    if any(flow.total for flow in flows):
        return _of_total(equation, flows)
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if len(dims) > 1:
        raise Mixed(f"{name} of every token with every token")
    [dim] = dims
    if not _of_each_element(equation):
        raise Mixed(f"{name}, of which it is not known whether it mixes tokens")
    for flow, x in zip(flows, equation.invars, strict=True):
        _check_no_places(flow, x, dim, num_tokens, name)
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


def _check_no_places(flow: Flow, x: Any, dim: int, num_tokens: int, name: str) -> None:
    shape = shape_of(x)
    places = len(shape) > dim and shape[dim] == num_tokens
    if places and not flow.has_tokens and dim not in flow.uniform:
        raise Mixed(
            f"{name} of tokens and an array of places counted from the first at hand; "
            "take scope.positions(seq)"
        )


def _of_total(equation: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    name = equation.primitive.name
    totals = [flow.total for flow in flows]
    tokens = [flow.dim is not None for flow in flows]
    nonlinear = name in ("mul", "select_n") and sum(totals) > 1 and name == "mul"
    if name not in _LINEAR or any(tokens) or nonlinear:
        raise Mixed(f"{name} of a sum over tokens")
    if (name == "div" and totals[1]) or (name == "select_n" and totals[0]):
        raise Mixed(f"{name} of a sum over tokens")
    return [Flow(total=True) for _ in equation.outvars]


def _broadcast(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, [x, *_] = flows[0], equation.invars
    places = equation.params["broadcast_dimensions"]
    shape = equation.params["shape"]
    if flow.total:
        return [flow]
    if flow.dim is not None:
        return [Flow(dim=places[flow.dim])]
    spread = {dim for dim in range(len(shape)) if dim not in places}
    for dim, place in enumerate(places):
        if dim in flow.uniform or (shape_of(x)[dim] == 1 and shape[place] != 1):
            spread.add(place)
    return [Flow(uniform=frozenset(spread))]


def _transpose(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    order = list(equation.params["permutation"])
    return [flows[0].moved(order.index)]


def _reshape(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, before = flows[0], shape_of(equation.invars[0])
    after = shape_of(equation.outvars[0])
    if flow.total or not (flow.has_tokens or flow.uniform):
        return [Flow(total=flow.total)]
    found = {dim: _same_place(before, after, dim) for dim in range(len(before))}
    if flow.dim is not None:
        place = found[flow.dim]
        if place is None:
            raise Mixed("a reshape that merges or cuts the sequence")
        return [Flow(dim=place)]
    kept = (found[dim] for dim in flow.uniform)
    return [Flow(uniform=frozenset(dim for dim in kept if dim is not None))]


def _same_place(before: tuple, after: tuple, dim: int) -> int | None:
    """Where a reshape leaves a dim whole, or None."""
    above = math.prod(before[:dim])
    for place, size in enumerate(after):
        if size == before[dim] and math.prod(after[:place]) == above:
            return place
    return None


def _squeeze(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    gone = equation.params["dimensions"]
    kept = [d for d in range(len(shape_of(equation.invars[0]))) if d not in gone]
    flow = replace(flows[0], uniform=flows[0].uniform & frozenset(kept))
    return [flow.moved(kept.index)]


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


def _along(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of an operation along one dim that keeps the others."""
    params, name = equation.params, equation.primitive.name
    given = params.get("axis", params.get("dimension", params.get("dimensions")))
    if name == "top_k":
        given = len(shape_of(equation.invars[0])) - 1
    along = given if isinstance(given, tuple) else (given,)
    for flow in flows:
        if flow.total or flow.dim in along:
            raise Mixed(f"{name} along the sequence")
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if len(dims) > 1:
        raise Mixed(f"{name} of every token with every token")
    return [Flow(dim=dims.pop() if dims else None)] * len(equation.outvars)


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
            raise Mixed("a matmul along the sequence")
        return [Flow(total=True)]
    return [Flow(dim=int(places[0]))]


def _same_size(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of slices, pads and their like, which keep a dim only if they take all of it."""
    flow, name = flows[0], equation.primitive.name
    others = [one for one in flows[1:] if one.has_tokens]
    before, after = (shape_of(v) for v in (equation.invars[0], equation.outvars[0]))
    if flow.total or (others and name != "dynamic_update_slice"):
        raise Mixed(f"{name} with places from tokens" if others else f"{name} of a sum")
    if flow.dim is not None and before[flow.dim] != after[flow.dim]:
        raise Mixed(f"{name} along the sequence")
    if flow.dim is None and others:
        return [others[0]]
    return [Flow(dim=flow.dim)] * len(equation.outvars)


def _concatenate(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    along = equation.params["dimension"]
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if any(flow.total for flow in flows) or along in dims or len(dims) > 1:
        raise Mixed("concatenate along the sequence")
    if not dims:
        return [Flow()]
    [dim] = dims
    for flow, x in zip(flows, equation.invars, strict=True):
        _check_no_places(flow, x, dim, num_tokens, "concatenate")
    return [Flow(dim=dim)]


def _gather(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    table, indices = flows[:2]
    numbers = equation.params["dimension_numbers"]
    rank = len(shape_of(equation.outvars[0]))
    if table.total or indices.total:
        raise Mixed("gather by a sum over tokens")
    paired = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    if table.dim is not None and table.dim not in paired:
        return [Flow(dim=_whole_window(equation, table.dim, indices))]
    if table.dim is not None and paired[table.dim] != indices.dim:
        raise Mixed("gather from the tokens at hand")
    if indices.dim is None:
        return [Flow()]
    places = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return [Flow(dim=places[indices.dim])]


def _whole_window(equation: JaxprEqn, dim: int, indices: Flow) -> int:
    """Where a gather puts a dim of which it takes all."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape = shape_of(equation.invars[0])
    picked = dim in gone or dim in numbers.start_index_map
    if picked or params["slice_sizes"][dim] != shape[dim] or indices.has_tokens:
        raise Mixed("gather from the tokens at hand")
    kept = [d for d in range(len(shape)) if d not in gone]
    return numbers.offset_dims[kept.index(dim)]


def _made(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    return [Flow() for _ in equation.outvars]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "concatenate": _concatenate,
    "gather": _gather,
    "iota": _made,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"), _reduce
    ),
    **dict.fromkeys(("reduce_or", "reduce_xor", "argmax", "argmin"), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _along),
    **dict.fromkeys(("cumlogsumexp", "sort", "rev", "top_k", "split"), _along),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _same_size),
    "dynamic_update_slice": _same_size,
}
