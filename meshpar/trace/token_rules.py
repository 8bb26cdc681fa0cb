"""How tokens flow through each operation: a rule for every primitive that has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from meshpar.trace.token_flow import (
    Flow,
    Mixed,
    Rule,
    check_no_places,
    elementwise,
    gives_fractions,
    token_dim,
)
from meshpar.trace.walk import array_shape


def _broadcast(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, [x, *_] = flows[0], equation.invars
    places = equation.params["broadcast_dimensions"]
    shape = equation.params["shape"]
    if flow.total:
        return [flow]
    if flow.dim is not None:
        return [Flow(dim=places[flow.dim])]
    widened = {p for d, p in enumerate(places) if array_shape(x)[d] != shape[p]}
    moved = flow.moved(lambda dim: places[dim])
    spread = frozenset(range(len(shape))) - {*places} | widened | moved.uniform
    return [Flow(uniform=spread, numbered=moved.numbered - widened)]


def _reshape(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, before = flows[0], array_shape(equation.invars[0])
    after = array_shape(equation.outvars[0])
    if flow.total:
        return [Flow(total=True)]
    if flow.dim is not None:
        return [_reshaped(flow, before, after, num_tokens)]
    return [flow.moved(lambda dim: _same_place(before, after, dim))]


def _reshaped(flow: Flow, before: tuple, after: tuple, num_tokens: int) -> Flow:
    """Return the flow of tokens that a reshape keeps, merges or splits off again."""
    above = math.prod(before[: flow.dim]) * flow.merged[0]
    for place, size in enumerate(after):
        first = math.prod(after[:place])
        outer, inner = above // first, size * first // (above * num_tokens)
        whole = outer * num_tokens * inner == size and outer * first == above
        if whole and inner:
            return Flow(dim=place, merged=(outer, inner))
    raise Mixed("a reshape that merges or cuts the sequence")


def check_not_merged(name: str, flows: list[Flow]) -> None:
    """Raise if tokens share a dim in an operation that may not keep them apart."""
    if name in ("reshape", "conv_general_dilated"):
        return
    if any(flow.merged != (1, 1) for flow in flows):
        what = f"{name} after a reshape that merges or cuts the sequence"
        raise Mixed(what, unknown=True)


def _same_place(before: tuple, after: tuple, dim: int) -> int | None:
    """Return the place where a reshape keeps a dim whole; None if it does not."""
    above = math.prod(before[:dim])
    for place, size in enumerate(after):
        if size == before[dim] and math.prod(after[:place]) == above:
            return place
    return None


_RUNNING = ("cumsum", "cumprod", "cumlogsumexp")
"""Operations whose result at each place is made of all places before it."""


def _along(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through an operation along one dim that keeps the others."""
    params, name = equation.params, equation.primitive.name
    given = params.get("axis", params.get("dimension", params.get("dimensions")))
    if name == "top_k":
        given = len(array_shape(equation.invars[0])) - 1
    along = given if isinstance(given, tuple) else (given,)
    for flow in flows:
        if flow.total or flow.dim in along:
            raise Mixed(
                f"{name} along the sequence",
                certain=name in _RUNNING and gives_fractions(equation),
                picks=name in ("sort", "top_k"),
            )
    dim = None
    if any(flow.has_tokens for flow in flows):
        dim = token_dim(equation, flows, num_tokens)
    return [Flow(dim=dim)] * len(equation.outvars)


def _same_size(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through slices and pads, which keep a dim if they take all of it."""
    flow, name = flows[0], equation.primitive.name
    others = [one for one in flows[1:] if one.has_tokens]
    before, after = (array_shape(v) for v in (equation.invars[0], equation.outvars[0]))
    if flow.total or others:
        raise Mixed(f"{name} with places from tokens" if others else f"{name} of a sum")
    if flow.dim is not None:
        padding = equation.params.get("padding_config")
        moved = padding is not None and any(padding[flow.dim])
        if moved or before[flow.dim] != after[flow.dim]:
            raise Mixed(f"{name} along the sequence")
    return [Flow(dim=flow.dim)]


def _update(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through writing one array into another: all of its tokens, or none."""
    name, arrays = equation.primitive.name, flows[:2]
    if any(flow.has_tokens for flow in flows[2:]):
        raise Mixed(f"{name} with places from tokens")
    if any(flow.total for flow in arrays):
        if not all(flow.total or flow.zero for flow in arrays):
            raise Mixed(f"{name} of a sum over tokens")
        return [Flow(total=True)]
    if not any(flow.has_tokens for flow in arrays):
        return [Flow()]
    dim = token_dim(equation, flows, num_tokens)
    into, update = (array_shape(x) for x in equation.invars[:2])
    if into[dim] != update[dim]:
        raise Mixed(f"{name} along the sequence")
    return [Flow(dim=dim)]


def _stack(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    if not any(flow.has_tokens for flow in flows):
        return [Flow()]
    if any(flow.total for flow in flows):
        if not all(flow.total or flow.zero for flow in flows):
            raise Mixed("stack of a sum over tokens")
        return [Flow(total=True)]
    dim = token_dim(equation, flows, num_tokens)
    return [Flow(dim=dim + (dim >= equation.params["axis"]))]


def _without(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through a squeeze or unstack, whose results lack some dims."""
    gone = equation.params.get("dimensions") or (equation.params["axis"],)
    if flows[0].dim in gone:
        raise Mixed(f"{equation.primitive.name} along the sequence")
    kept = [d for d in range(len(array_shape(equation.invars[0]))) if d not in gone]
    return [flows[0].kept(kept)] * len(equation.outvars)


def _concatenate(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    along = equation.params["dimension"]
    dims = {flow.dim for flow in flows if flow.dim is not None}
    if any(flow.total for flow in flows) or along in dims or len(dims) > 1:
        raise Mixed("concatenate along the sequence")
    if not dims:
        return [Flow()]
    [dim] = dims
    for flow, x in zip(flows, equation.invars, strict=True):
        check_no_places(flow, x, dim, num_tokens, "concatenate")
    return [Flow(dim=dim)]


def _gather(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    table, indices = flows[:2]
    numbers = equation.params["dimension_numbers"]
    rank = len(array_shape(equation.outvars[0]))
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
    if indices.dim == len(array_shape(equation.invars[1])) - 1:
        raise Mixed("gather with places from tokens")
    for dim, of_indices in paired.items():
        if of_indices == indices.dim:
            check_no_places(table, equation.invars[0], dim, num_tokens, "gather")
    places = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return [Flow(dim=places[indices.dim])]


def _whole_window(equation: JaxprEqn, dim: int, indices: Flow) -> int:
    """Return the place of a dim that a gather takes all of."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape = array_shape(equation.invars[0])
    picked = dim in gone or dim in numbers.start_index_map
    if picked or params["slice_sizes"][dim] != shape[dim] or indices.has_tokens:
        raise Mixed("gather from the tokens at hand")
    kept = [d for d in range(len(shape)) if d not in gone]
    return numbers.offset_dims[kept.index(dim)]


DIM_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda equation, flows, num_tokens: [
        flows[0].moved(list(equation.params["permutation"]).index)
    ],
    "reshape": _reshape,
    "squeeze": _without,
    "concatenate": _concatenate,
    "gather": _gather,
    "iota": lambda equation, flows, num_tokens: [
        Flow(
            uniform=frozenset(range(len(array_shape(equation.outvars[0]))))
            - {equation.params["dimension"]},
            numbered=frozenset([equation.params["dimension"]]),
        )
    ],
    "stack": _stack,
    "unstack": _without,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _along),
    **dict.fromkeys(("cumlogsumexp", "sort", "rev", "top_k", "split"), _along),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _same_size),
    "dynamic_update_slice": _update,
}


_STILL = {
    **dict.fromkeys(("window_dimensions", "window_strides", "window_dilation"), 1),
    **{"base_dilation": 1, "padding": (0, 0)},
}
"""Parameters of a window that leaves the places of a dim as they are."""


def _across(
    equation: JaxprEqn, flows: list[Flow], num_tokens: int, touched: Sequence[int]
) -> list[Flow]:
    """Flow through an operation that joins places along `touched` dims alone."""
    if not any(flow.has_tokens for flow in flows):
        return [Flow() for _ in equation.outvars]
    name = equation.primitive.name
    if any(flow.total for flow in flows):
        raise Mixed(f"{name} of a sum over tokens")
    dim = token_dim(equation, flows, num_tokens)
    if dim in touched:
        raise Mixed(f"{name} along the sequence")
    return [Flow(dim=dim) for _ in equation.outvars]


def _last_dims(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through an FFT, or linear algebra on matrices in the last two dims."""
    rank = len(array_shape(equation.invars[0]))
    count = len(equation.params.get("fft_lengths", (1, 1)))
    return _across(equation, flows, num_tokens, range(rank - count, rank))


def _window(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    params = equation.params
    touched = [
        dim
        for dim in range(len(array_shape(equation.invars[0])))
        if any(params[name][dim] != value for name, value in _STILL.items())
    ]
    return _across(equation, flows, num_tokens, touched)


def _reduce_by(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through a reduction by a function that the model gives."""
    gone = equation.params["dimensions"]
    rank = len(array_shape(equation.invars[0]))
    found = _across(equation, flows, num_tokens, gone)
    kept = [dim for dim in range(rank) if dim not in gone]
    return [flow.moved(kept.index) for flow in found]


def _convolution(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow through a convolution, across its examples or a dim with a window of 1."""
    image, kernel = flows
    if not (image.has_tokens or kernel.has_tokens):
        return [Flow()]
    name, params = equation.primitive.name, equation.params
    if image.total or kernel.has_tokens:
        what = "a sum over tokens" if image.total else "what tokens have made"
        raise Mixed(f"{name} of {what}")
    lhs, rhs, out = params["dimension_numbers"]
    place = lhs.index(image.dim)
    if place == 0 and params["batch_group_count"] == 1:
        return [replace(image, dim=out[0])]
    size = array_shape(equation.invars[1])[rhs[place]]
    merged = image.merged != (1, 1)
    if merged or place < 2 or size != 1:
        raise Mixed(f"{name} along the sequence")
    dim = place - 2  # A window of one place keeps the places of its dim in order.
    steps = params["window_strides"][dim], params["lhs_dilation"][dim]
    if steps != (1, 1) or tuple(params["padding"][dim]) != (0, 0):
        raise Mixed(f"{name} along the sequence")
    return [Flow(dim=out[place])]


_LINEAR_ALGEBRA = (
    *("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr"),
    *("geqrf", "schur", "svd", "triangular_solve", "tridiagonal"),
)
WINDOW_RULES: dict[str, Rule] = {
    "fft": _last_dims,
    "conv_general_dilated": _convolution,
    "reduce": _reduce_by,
    **dict.fromkeys(_LINEAR_ALGEBRA, _last_dims),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max"), _window
    ),
    "reduce_window_min": _window,
}
"""Rules of operations along some dims that keep the others."""


def _drawn(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Flow of random numbers, which differ from place to place."""
    if flows[0].has_tokens:
        return elementwise(equation, flows, num_tokens)
    keys, drawn = (len(array_shape(x)) for x in (*equation.invars, *equation.outvars))
    numbered = flows[0].numbered.union(range(keys, drawn))
    return [Flow(uniform=flows[0].uniform, numbered=numbered)]


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
"""Rules of all operations but those on each element (`token_flow.elementwise`)."""
