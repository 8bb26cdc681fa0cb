"""How many logits a model's head makes at a time, found by tracing it."""

from __future__ import annotations

import math
from typing import Any

import jax

from meshpar.audit.needs import MATMUL
from meshpar.model.contract import Model
from meshpar.model.tracing import (
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing_scope,
)
from meshpar.trace.walk import array_shape, equations

_EXAMPLE_BYTES = 2**33
"""Logits of the traced tokens: more than any head should make at a time."""


def logits_bytes(model: Model, *, seq: int, vocab: int, dtype: Any) -> int:
    """Most bytes of logits at a time, in fp32; 0 if those of all tokens.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        vocab: Size of the vocabulary.
        dtype: Of the head's input and parameters.
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
    """Shapes of a tree of arrays or parameters in another dtype."""
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, dtype), tree)
