"""Cost of each layer of a model: matmul FLOPs of its forward, read from its trace.

A block is one function of all its layers; layers differ where it branches on
`scope.layer` (`lax.cond`, `lax.switch`): that index is known for each layer, and with
it the branch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import BlockGroup, Model
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing,
    tracing_scope,
)
from meshpar.trace.costs import Operand, matmul_flops

SEQ = 8
"""Tokens of the sequence that is traced; every model takes so short a one."""


def layer_costs(model: Model, *, seq: int = SEQ) -> tuple[float, ...]:
    """Return the matmul FLOPs of every layer's forward on one example; nothing runs.

    Args:
        model: The model, its groups of blocks in order.
        seq: Tokens of the example; as long as in training where layers differ in how
            they attend.

    Raises:
        InputError: The model cannot be traced on tokens, targets and weights alone, or
            has matmuls in a `while_loop`.

    Example:
        >>> from meshpar.models.presets import build
        >>> costs = layer_costs(build("test", layers=3))
        >>> len(costs), len(set(costs))
        (3, 1)
    """
    problem = f"no layer's cost can be measured on a batch of shape {(1, seq)}"
    with tracing(problem, "give layer_costs="):
        streams = traced_streams(model, 1, seq)
        (_, params), (_, states) = one_layer_shapes(model), one_layer_state(model)
        batch = traced_batch(model, 1, seq)
        return tuple(
            cost
            for group, param, stream, state in zip(
                model.groups, params, streams, states, strict=True
            )
            for cost in _costs(group, param, stream, state, batch)
        )


def _costs(
    group: BlockGroup, params: Any, x: Any, state: Any, batch: Any
) -> list[float]:
    def call(layer: jax.Array, params: Any, x: Any, state: Any, batch: Any) -> Any:
        return group.run(params, x, tracing_scope(batch, state, layer=layer))

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(call)(layer, params, x, state, batch)
    unknown = [Operand()] * (len(program.jaxpr.invars) - 1)
    return [
        matmul_flops(program, [Operand(jnp.int32(index)), *unknown]).total
        for index in range(group.num_layers)
    ]
