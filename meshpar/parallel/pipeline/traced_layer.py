"""Trace a model's layers in a pipeline: FLOPs of F, I and W, and the stash of I."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from meshpar.model.contract import Model
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing_scope,
)
from meshpar.parallel.blocks import Residuals, restore_vjp, vjp_without
from meshpar.parallel.pipeline.split_backward import split_program
from meshpar.parallel.remat import rematerialised
from meshpar.trace.costs import Operand, matmul_flops


class TracedLayer(NamedTuple):
    """A layer of one example, whose backward is cut in two.

    Args:
        forward_flops: FLOPs of F.
        input_grad_flops: FLOPs of I, with what it recomputes.
        weight_grad_flops: FLOPs of W.
        weight_flops: FLOPs of F's matmuls with weights, and so of all gradients of
            weights, in I or in W.
        stash_bytes: Bytes that I leaves for W.
    """

    forward_flops: float
    input_grad_flops: float
    weight_grad_flops: float
    weight_flops: float
    stash_bytes: float


def mean_layer(model: Model, *, seq: int, dtype: Any, remat: str) -> TracedLayer:
    """Return the mean of a model's layers; nothing is computed.

    Args:
        model: The model.
        seq: Tokens of the example.
        dtype: Dtype of its blocks.
        remat: The policy of recomputation.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshpar.models.presets import build
        >>> full = mean_layer(build("test"), seq=16, dtype=jnp.float32, remat="full")
        >>> none = mean_layer(build("test"), seq=16, dtype=jnp.float32, remat="none")
        >>> full.weight_grad_flops == none.weight_grad_flops
        True
        >>> full.input_grad_flops > none.input_grad_flops
        True
    """
    streams = in_dtype(traced_streams(model, 1, seq), dtype)
    layers = [
        (group.num_layers, traced_layer(model, at, x, seq=seq, remat=remat))
        for at, (group, x) in enumerate(zip(model.groups, streams, strict=True))
    ]
    count = sum(number for number, _ in layers)
    sums = (
        sum(number * value for (number, _), value in zip(layers, values, strict=True))
        for values in zip(*(layer for _, layer in layers), strict=True)
    )
    return TracedLayer(*(one / count for one in sums))


def traced_layer(model: Model, at: int, x: Any, *, seq: int, remat: str) -> TracedLayer:
    """Return a layer of one group.

    Args:
        model: The model.
        at: Index of the group.
        x: Shapes of the stream that it takes.
        seq: Tokens of the example.
        remat: The policy of recomputation.
    """
    call = rematerialised(model.groups[at].run, remat)
    params = in_dtype(one_layer_shapes(model)[1][at], jax.tree.leaves(x)[0].dtype)
    known = traced_batch(model, 1, seq), one_layer_state(model)[1][at]
    traced: list[Residuals] = []

    def forward(params: Any, x: Any, known: tuple) -> tuple[Any, list[jax.Array]]:
        def apply(params: Any, x: Any) -> Any:
            return call(lambda known: tracing_scope(*known, layer=0), params, x, known)

        y, residuals = vjp_without(apply, (params, x), (params, known))
        traced.append(residuals)
        return y, residuals.kept

    def backward(given: tuple, kept: Any, dy: Any) -> tuple[Any, Any]:
        residuals = replace(traced[-1], kept=kept)
        of_params, dx = restore_vjp(residuals, given)(dy)
        return dx, of_params

    forward_program, (dy, kept) = jax.make_jaxpr(forward, return_shape=True)(
        params, x, known
    )
    given = params, known
    program, of = jax.make_jaxpr(backward, return_shape=True)(given, kept, dy)
    num_given, num_others = (len(jax.tree.leaves(one)) for one in (given, (kept, dy)))
    halves = split_program(
        program,
        [at == 0 for at in (0, 1) for _ in jax.tree.leaves(of[at])],
        [True] * num_given + [False] * num_others,
    )
    num_weights = len(jax.tree.leaves(params))
    flops = _flops(forward_program, num_weights)
    return TracedLayer(
        forward_flops=flops.total,
        input_grad_flops=_flops(halves.first).total,
        weight_grad_flops=_flops(halves.second).total,
        weight_flops=flops.with_weights,
        stash_bytes=sum(
            math.prod(one.shape) * one.dtype.itemsize for one in halves.stash
        ),
    )


def _flops(program: Any, num_weights: int = 0) -> Any:
    operands = [
        Operand(is_weight=at < num_weights) for at in range(len(program.jaxpr.invars))
    ]
    return matmul_flops(program, operands, while_length=1)


def in_dtype(tree: Any, dtype: Any) -> Any:
    """Return the shapes of a tree of arrays or parameters in another dtype."""
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, dtype), tree)
