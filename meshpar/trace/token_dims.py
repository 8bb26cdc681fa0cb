"""Operations that move, cut or join dims: where they put that of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from meshpar.trace.token_flow import (
    Flow,
    Mixed,
    Rule,
    check_no_places,
    gives_fractions,
    shape_of,
    the_dim,
)


def _broadcast(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, [x, *_] = flows[0], equation.invars
    places = equation.params["broadcast_dimensions"]
    shape = equation.params["shape"]
    if flow.total:
        return [flow]
    if flow.dim is not None:
        return [Flow(dim=places[flow.dim])]
    widened = {p for d, p in enumerate(places) if shape_of(x)[d] != shape[p]}
    moved = flow.moved(lambda dim: places[dim])
    spread = frozenset(range(len(shape))) - {*places} | widened | moved.uniform
    return [Flow(uniform=spread, numbered=moved.numbered - widened)]


def _transpose(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    order = list(equation.params["permutation"])
    return [flows[0].moved(order.index)]


def _reshape(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    flow, before = flows[0], shape_of(equation.invars[0])
    after = shape_of(equation.outvars[0])
    if flow.total:
        return [Flow(total=True)]
    if flow.dim is not None:
        return [_reshaped(flow, before, after, num_tokens)]
    return [flow.moved(lambda dim: _same_place(before, after, dim))]


def _reshaped(flow: Flow, before: tuple, after: tuple, num_tokens: int) -> Flow:
    """Of tokens that a reshape leaves alone, merges with other dims or parts again."""
    above = math.prod(before[: flow.dim]) * flow.merged[0]
    for place, size in enumerate(after):
        first = math.prod(after[:place])
        outer, inner = above // first, size * first // (above * num_tokens)
        whole = outer * num_tokens * inner == size and outer * first == above
        if whole and inner:
            return Flow(dim=place, merged=(outer, inner))
    raise Mixed("a reshape that merges or cuts the sequence")


def check_not_merged(name: str, flows: list[Flow]) -> None:
    """Refuses dims that tokens share where nothing is known to leave them alone."""
    if name in ("reshape", "conv_general_dilated"):
        return
    if any(flow.merged != (1, 1) for flow in flows):
        what = f"{name} after a reshape that merges or cuts the sequence"
        raise Mixed(what, unknown=True)


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
    return [flows[0].kept(kept)]


_RUNNING = ("cumsum", "cumprod", "cumlogsumexp")
"""Operations along a dim each of whose results is made of all places before it."""


def _along(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of an operation along one dim that keeps the others."""
    params, name = equation.params, equation.primitive.name
    given = params.get("axis", params.get("dimension", params.get("dimensions")))
    if name == "top_k":
        given = len(shape_of(equation.invars[0])) - 1
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
        dim = the_dim(equation, flows, num_tokens)
    return [Flow(dim=dim)] * len(equation.outvars)


def _same_size(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of slices and pads, which keep a dim only if they take all of it as it is."""
    flow, name = flows[0], equation.primitive.name
    others = [one for one in flows[1:] if one.has_tokens]
    before, after = (shape_of(v) for v in (equation.invars[0], equation.outvars[0]))
    if flow.total or others:
        raise Mixed(f"{name} with places from tokens" if others else f"{name} of a sum")
    if flow.dim is not None:
        padding = equation.params.get("padding_config")
        moved = padding is not None and any(padding[flow.dim])
        if moved or before[flow.dim] != after[flow.dim]:
            raise Mixed(f"{name} along the sequence")
    return [Flow(dim=flow.dim)]


def _update(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of writing one array into another: all of its tokens, or none."""
    name, arrays = equation.primitive.name, flows[:2]
    if any(flow.has_tokens for flow in flows[2:]):
        raise Mixed(f"{name} with places from tokens")
    if any(flow.total for flow in arrays):
        if not all(flow.total or flow.zero for flow in arrays):
            raise Mixed(f"{name} of a sum over tokens")
        return [Flow(total=True)]
    if not any(flow.has_tokens for flow in arrays):
        return [Flow()]
    dim = the_dim(equation, flows, num_tokens)
    into, update = (shape_of(x) for x in equation.invars[:2])
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
    dim = the_dim(equation, flows, num_tokens)
    return [Flow(dim=dim + (dim >= equation.params["axis"]))]


def _unstack(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    axis, flow = equation.params["axis"], flows[0]
    if flow.dim == axis:
        raise Mixed("unstack along the sequence")
    kept = [d for d in range(len(shape_of(equation.invars[0]))) if d != axis]
    return [flow.kept(kept)] * len(equation.outvars)


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
    if indices.dim == len(shape_of(equation.invars[1])) - 1:
        raise Mixed("gather with places from tokens")
    for dim, of_indices in paired.items():
        if of_indices == indices.dim:
            check_no_places(table, equation.invars[0], dim, num_tokens, "gather")
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


def _iota(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    dims = frozenset(range(len(shape_of(equation.outvars[0]))))
    numbered = frozenset([equation.params["dimension"]])
    return [Flow(uniform=dims - numbered, numbered=numbered)]


DIM_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "gather": _gather,
    "iota": _iota,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _along),
    **dict.fromkeys(("cumlogsumexp", "sort", "rev", "top_k", "split"), _along),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _same_size),
    "dynamic_update_slice": _update,
}


_STILL = {
    **dict.fromkeys(("window_dimensions", "window_strides", "window_dilation"), 1),
    **{"base_dilation": 1, "padding": (0, 0)},
}
"""What a window does to a dim whose places it leaves alone."""


def _beside(
    equation: JaxprEqn, flows: list[Flow], num_tokens: int, touched: Sequence[int]
) -> list[Flow]:
    """Of an operation that joins what stands along `touched` dims alone."""
    if not any(flow.has_tokens for flow in flows):
        return [Flow() for _ in equation.outvars]
    name = equation.primitive.name
    if any(flow.total for flow in flows):
        raise Mixed(f"{name} of a sum over tokens")
    dim = the_dim(equation, flows, num_tokens)
    if dim in touched:
        raise Mixed(f"{name} along the sequence")
    return [Flow(dim=dim) for _ in equation.outvars]


def _fft(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    rank = len(shape_of(equation.invars[0]))
    count = len(equation.params["fft_lengths"])
    return _beside(equation, flows, num_tokens, range(rank - count, rank))


def _of_matrices(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of linear algebra with the matrices in the last two dims."""
    rank = len(shape_of(equation.invars[0]))
    return _beside(equation, flows, num_tokens, range(rank - 2, rank))


def _window(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    params = equation.params
    touched = [
        dim
        for dim in range(len(shape_of(equation.invars[0])))
        if any(params[name][dim] != value for name, value in _STILL.items())
    ]
    return _beside(equation, flows, num_tokens, touched)


def _reduce_by(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of a reduction by a function of the model's own."""
    gone = equation.params["dimensions"]
    rank = len(shape_of(equation.invars[0]))
    found = _beside(equation, flows, num_tokens, gone)
    kept = [dim for dim in range(rank) if dim not in gone]
    return [flow.moved(kept.index) for flow in found]


def _convolution(equation: JaxprEqn, flows: list[Flow], num_tokens: int) -> list[Flow]:
    """Of a convolution, where tokens are examples or a dim that it does not widen."""
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
    size = shape_of(equation.invars[1])[rhs[place]]
    merged = image.merged != (1, 1)
    if merged or place < 2 or size != 1 or _moves(equation, place - 2):
        raise Mixed(f"{name} along the sequence")
    return [Flow(dim=out[place])]


def _moves(equation: JaxprEqn, dim: int) -> bool:
    """Whether a kernel of one place moves those of a spatial dim."""
    params = equation.params
    steps = params["window_strides"][dim], params["lhs_dilation"][dim]
    return steps != (1, 1) or tuple(params["padding"][dim]) != (0, 0)


_LINEAR_ALGEBRA = (
    *("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr"),
    *("geqrf", "schur", "svd", "triangular_solve", "tridiagonal"),
)
WINDOW_RULES: dict[str, Rule] = {
    "fft": _fft,
    "conv_general_dilated": _convolution,
    "reduce": _reduce_by,
    **dict.fromkeys(_LINEAR_ALGEBRA, _of_matrices),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max"), _window
    ),
    "reduce_window_min": _window,
}
"""Operations along some dims, which leave the others as they are."""
