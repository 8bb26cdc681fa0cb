"""Workload of any model under the contract: its blocks and head, traced and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from meshpar.audit.needs import MATMUL
from meshpar.model.contract import Model
from meshpar.model.parameter import is_parameter
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing_scope,
)
from meshpar.parallel.blocks import vjp_without
from meshpar.parallel.placement import DTYPES
from meshpar.parallel.remat import rematerialised
from meshpar.planner.workload.workload import TracedBlock, Workload
from meshpar.trace.walk import array_shape, dot_flops, equations, inner_jaxprs

_POLICIES = ("none", "selective", "dots", "full")


def traced_workload(
    model: Model,
    *,
    seq: int,
    precision: str = "bf16",
    name: str = "traced",
    order: TokenOrder | None = None,
) -> Workload:
    """Return the workload of a model, by tracing one block of each group.

    Nothing is computed. Sizes are those that parameters' logical axes name; a model
    without `heads` or `vocab` has one of them, which `tensor` does not split. FLOPs are
    those of its dots: with weights, which grow with the tokens, and between
    activations, which grow with the sequence too. Bytes are the residuals of `jax.vjp`
    without the parameters, under every remat policy.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        precision: Arithmetic of the blocks.
        name: Name in reports.
        order: Trace as if the devices of this mesh axis shared the sequence: attention
            then keeps no softmax. None for whole sequences.

    Example:
        >>> from meshpar.models.presets import build
        >>> workload = traced_workload(build("tiny"), seq=64)
        >>> workload.num_parameters == build("tiny").num_parameters
        True
    """
    dtype = DTYPES[precision]
    streams = in_dtype(traced_streams(model, 1, seq), dtype)
    hidden = jax.tree.leaves(streams[0])[0].shape[-1]
    sizes = _sizes(model, hidden)
    vocab = sizes["vocab"]
    layers = sum(group.num_layers for group in model.groups)
    groups = [_trace(model, at, x, seq, order) for at, x in enumerate(streams)]
    tables = _tables(model)
    ends, blocks = model.split(model.parameters)
    traced = TracedBlock(
        parameters=_count(blocks) // layers,
        linear_flops=sum(group.linear_flops for group in groups) / layers / seq,
        mixing_flops=sum(group.mixing_flops for group in groups) / layers / seq,
        seq=seq,
        residual_bytes={
            remat: sum(group.residual_bytes[remat] for group in groups) / layers / seq
            for remat in _POLICIES
        },
        residual_dtype_bytes=jnp.dtype(dtype).itemsize,
        other_end_parameters=_count(ends) - sum(map(math.prod, tables)),
    )
    return Workload(
        name=name,
        layers=layers,
        seq=seq,
        tied=len(tables) == 1,
        logits_bytes=logits_bytes(model, seq=seq, vocab=vocab, dtype=dtype),
        traced=traced,
        **dict[str, Any](sizes),
    )


def _sizes(model: Model, hidden: int) -> dict[str, int]:
    """Sizes by the logical axes of parameters; 1 for a missing one."""
    sizes: dict[str, int] = {}
    for parameter in model.flat_parameters().values():
        for axis, size in zip(parameter.logical_axes, parameter.shape, strict=True):
            if axis is not None:
                sizes.setdefault(axis, size)
    heads = sizes.get("heads", sizes.get("kv_heads", 1))
    return {
        "hidden": hidden,
        "vocab": sizes.get("vocab", 1),
        "heads": heads,
        "kv_heads": sizes.get("kv_heads", heads),
        "head_dim": sizes.get("head_dim", hidden // heads),
        "ffn": sizes.get("mlp", 4 * hidden),
    }


def _tables(model: Model) -> list[tuple[int, ...]]:
    """Shapes of the parameters outside the blocks that have axis `vocab`."""
    group_names = {group.name for group in model.groups}
    return [
        parameter.shape
        for path, parameter in model.flat_parameters().items()
        if path.split(".")[0] not in group_names and "vocab" in parameter.logical_axes
    ]


def _count(tree: Any) -> int:
    parameters = jax.tree.leaves(tree, is_leaf=is_parameter)
    return sum(
        math.prod(parameter.shape) * (parameter.num_layers or 1)
        for parameter in parameters
    )


@dataclass(frozen=True)
class _Group:
    linear_flops: float
    mixing_flops: float
    residual_bytes: dict[str, float]


def _trace(model: Model, at: int, x: Any, seq: int, order: TokenOrder | None) -> _Group:
    group, dtype = model.groups[at], jax.tree.leaves(x)[0].dtype
    params = in_dtype(one_layer_shapes(model)[1][at], dtype)
    known = traced_batch(model, 1, seq), one_layer_state(model)[1][at]
    jaxpr = jax.make_jaxpr(
        lambda params, x, known: group.run(params, x, tracing_scope(*known, layer=0))
    )(params, x, known)
    num_weights = len(jax.tree.leaves(params))
    weights = set(jaxpr.jaxpr.invars[:num_weights]) | set(jaxpr.jaxpr.constvars)
    dots = list(_dots(jaxpr.jaxpr, weights))
    linear = sum(flops for flops, with_weights in dots if with_weights)
    mixing = sum(flops for flops, with_weights in dots if not with_weights)
    times = group.num_layers
    return _Group(
        linear * times,
        mixing * times,
        {
            remat: times * _residual_bytes(group.run, remat, params, x, known, order)
            for remat in _POLICIES
        },
    )


def _residual_bytes(
    block: Callable,
    remat: str,
    params: Any,
    x: Any,
    known: tuple,
    order: TokenOrder | None,
) -> float:
    """Bytes of the residuals of one forward, with its input, without parameters."""
    call = rematerialised(block, remat)

    def make_scope(known: tuple) -> Scope:
        return tracing_scope(*known, layer=0, order=order)

    def kept(params: Any, x: Any, known: tuple) -> list[jax.Array]:
        def apply(params: Any, x: Any) -> Any:
            return call(make_scope, params, x, known)

        return vjp_without(apply, (params, x), params)[1].kept

    leaves = jax.eval_shape(kept, params, x, known)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _dots(jaxpr: Jaxpr, weights: set[Any]) -> Iterator[tuple[float, bool]]:
    """Yield FLOPs of every dot, and True if a side comes from weights only."""
    for equation in jaxpr.eqns:
        known = [
            not isinstance(atom, Literal) and atom in weights
            for atom in equation.invars
        ]
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            yield dot_flops(equation), any(known[:2])
        for inner, times in inner_jaxprs(equation):
            inside = {
                var
                for var, is_weight in zip(
                    reversed(inner.invars), reversed(known), strict=False
                )
                if is_weight
            }
            for flops, with_weights in _dots(inner, inside | set(inner.constvars)):
                yield flops * times, with_weights
        if all(
            flag or isinstance(atom, Literal)
            for flag, atom in zip(known, equation.invars, strict=True)
        ):
            weights = weights | set(equation.outvars)


_EXAMPLE_BYTES = 2**33
"""Bytes of the logits of the traced tokens: more than a head makes at a time."""


def logits_bytes(model: Model, *, seq: int, vocab: int, dtype: Any) -> int:
    """Return the most bytes of fp32 logits at a time; 0 if those of all tokens.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        vocab: Size of the vocabulary.
        dtype: Dtype of the head's input and parameters.
    """
    examples = -(-_EXAMPLE_BYTES // (4 * seq * vocab))
    params = in_dtype(model.split(model.parameters)[0], dtype)

    def head(params: Any, x: Any, state: Any, batch: Any) -> Any:
        scope = tracing_scope(batch, state)
        return model.loss_sums(params, x, scope.batch, scope)

    jaxpr = jax.make_jaxpr(head)(
        params,
        in_dtype(traced_streams(model, examples, seq)[-1], dtype),
        one_layer_state(model)[0],
        traced_batch(model, examples, seq),
    )
    matmuls = (
        array_shape(equation.outvars[0])
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == MATMUL
    )
    most = max((math.prod(shape) for shape in matmuls if vocab in shape), default=0)
    return 0 if most >= examples * seq * vocab else 4 * most


def in_dtype(tree: Any, dtype: Any) -> Any:
    """Return the shapes of a tree of arrays or parameters in another dtype."""
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, dtype), tree)
