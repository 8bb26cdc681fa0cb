"""How operations that join places of some dims pass on tokens that stand in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from meshpar.model.token_flow import Flow, Mixed, Rule, shape_of, the_dim

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
