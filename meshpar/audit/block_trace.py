"""A model of one's own as a workload of the planner: its blocks, traced and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from meshpar.audit.head_trace import in_dtype, logits_bytes
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
from meshpar.trace.walk import dot_flops, inner_jaxprs

_POLICIES = ("none", "selective", "dots", "full")


def traced_workload(
    model: Model,
    *,
    seq: int,
    precision: str = "bf16",
    name: str = "traced",
    order: TokenOrder | None = None,
) -> Workload:
    """The workload of a model, by tracing one block of each group.

    Nothing is computed. Sizes are those that parameters' logical axes name; a model
    without `heads` or `vocab` has one of them, which `tensor` does not split. FLOPs are
    those of its dots: with weights, which grow with the tokens, and between
    activations, which grow with the sequence too. Bytes are the residuals of `jax.vjp`
    without the parameters, under every remat policy.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        precision: Arithmetic of the blocks.
        name: What reports call it.
        order: As if the devices of another one shared the sequence, of one device:
            attention then keeps no softmax. None for whole sequences.

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
    """Sizes by the logical axes that parameters name, 1 where none does."""
    found: dict[str, int] = {}
    for parameter in model.flat_parameters().values():
        for axis, size in zip(parameter.logical_axes, parameter.shape, strict=True):
            if axis is not None:
                found.setdefault(axis, size)
    heads = found.get("heads", found.get("kv_heads", 1))
    return {
        "hidden": hidden,
        "vocab": found.get("vocab", 1),
        "heads": heads,
        "kv_heads": found.get("kv_heads", heads),
        "head_dim": found.get("head_dim", hidden // heads),
        "ffn": found.get("mlp", 4 * hidden),
    }


def _tables(model: Model) -> list[tuple[int, ...]]:
    """Shapes of the parameters outside the blocks that have a vocabulary."""
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
    """Of one forward, parameters left out; the block's input is among them."""
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
    """FLOPs of every dot, and whether one of its sides comes from weights alone."""
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
