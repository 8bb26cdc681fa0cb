"""How many logits a model's head makes at a time, found by tracing it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from meshpar.audit.jaxprs import inner_jaxprs
from meshpar.model.contract import Model, batch_shapes, is_parameter
from meshpar.model.scope import EXAMPLE, Scope

_EXAMPLE_BYTES = 2**33
"""Logits of the traced tokens: more than any head should make at a time."""


def hidden_size(model: Model, dtype: Any) -> int:
    """Size of the residual stream, by the embedding of one token."""
    batch = batch_of(1, 1)
    x = jax.eval_shape(
        lambda params, batch: model.embed(params, batch, Scope(batch=batch)),
        _end_shapes(model, dtype),
        batch,
    )
    return x.shape[-1]


def batch_of(examples: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch as a step hands it on, each example's index beside it."""
    indices = jax.ShapeDtypeStruct((examples,), jnp.uint32)
    return {**batch_shapes(examples, seq), EXAMPLE: indices}


def logits_bytes(model: Model, *, seq: int, hidden: int, vocab: int, dtype: Any) -> int:
    """Most bytes of logits at a time, in fp32; 0 if those of all tokens.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        hidden: Size of the residual stream.
        vocab: Size of the vocabulary.
        dtype: Of the head's input and parameters.
    """
    examples = -(-_EXAMPLE_BYTES // (4 * seq * vocab))
    params = _end_shapes(model, dtype)
    jaxpr = jax.make_jaxpr(
        lambda params, x, batch: model.head(params, x, batch, Scope(batch=batch))
    )(
        params,
        jax.ShapeDtypeStruct((examples, seq, hidden), dtype),
        batch_of(examples, seq),
    )
    sizes = [math.prod(shape) for shape in _products(jaxpr.jaxpr) if vocab in shape]
    most = max(sizes, default=0)
    return 0 if most >= examples * seq * vocab else 4 * most


def _end_shapes(model: Model, dtype: Any) -> Any:
    return jax.tree.map(
        lambda parameter: jax.ShapeDtypeStruct(parameter.shape, dtype),
        model.split(model.parameters)[0],
        is_leaf=is_parameter,
    )


def _products(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    """Shapes of what matmuls give."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for inner, _ in inner_jaxprs(equation):
            yield from _products(inner)
