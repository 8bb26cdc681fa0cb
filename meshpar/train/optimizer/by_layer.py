"""An optimizer of stacked parameters that does what it does to each layer by itself.

A block's parameters are stacked over their layers, in the order and with the empty
places that a pipeline's stages have. The optimizer is traced on one layer's shapes, so
that it sees each parameter's own rank and size (Muon's matrices, Adafactor's means,
weight decay by `ndim`), and the trace is run for all layers at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model, Parameter, is_parameter
from meshpar.train.optimizer.flow import Value, run
from meshpar.train.optimizer.layers import Layers
from meshpar.train.optimizer.proof import refusal
from meshpar.train.optimizer.traced import Traced, traced

_WAYS_OUT = (
    "take an optimizer that treats each parameter by itself, such as adamw or muon, "
    "and max_grad_norm= of make_train_step to clip by the global norm"
)


def by_layer(
    optimizer: optax.GradientTransformation, model: Model, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of stacked parameters; nothing is computed.

    Its update takes the loss as `value`. Updates are 0 at places without a layer.

    Args:
        optimizer: As for a tree in which every parameter is one layer's.
        model: Arranged for its stages.
        layout: Whose they are, for messages.

    Raises:
        InputError: What it does to each layer cannot be told, with the reason.
    """
    shapes = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, jnp.float32),
        model.parameters,
        is_leaf=is_parameter,
    )
    filled = {
        path: _filled(parameter)
        for path, parameter in model.flat_parameters().items()
        if parameter.num_layers is not None
    }
    if not filled:
        return optax.with_extra_args_support(optimizer)
    trace = traced(optimizer, shapes)
    reason = refusal(optimizer, shapes, trace, filled)
    if reason is not None:
        raise InputError(f"the optimizer cannot be run by layer: {reason}; {_WAYS_OUT}")
    return _of_trace(trace, Layers(filled))


def _of_trace(trace: Traced, layers: Layers) -> optax.GradientTransformationExtraArgs:
    in_params = [slot.owner for slot in trace.params]
    in_state = [slot.owner for slot in trace.state]

    def values(owners: list[str | None], tree: Any) -> list[Value]:
        leaves = jax.tree.leaves(tree)
        return [Value(*one) for one in zip(owners, leaves, strict=True)]

    def stacked(owners: list[str | None], results: list[Value]) -> list[jax.Array]:
        pairs = zip(owners, results, strict=True)
        return [layers.stacked(owner, value) for owner, value in pairs]

    def init(params: Any) -> Any:
        results = run(trace.init, values(in_params, params), layers)
        return _tree_like(trace.state_shapes, stacked(in_state, results))

    def update(
        gradients: Any, state: Any, params: Any, *, value: jax.Array
    ) -> tuple[Any, Any]:
        inputs = [
            *values(in_params, gradients),
            *values(in_state, state),
            *values(in_params, params),
            Value(None, value),
        ]
        results = run(trace.update, inputs, layers)
        arrays = stacked([*in_params, *in_state], results)
        updates = [
            layers.without_empty(owner, array)
            for owner, array in zip(in_params, arrays, strict=False)
        ]
        new_state = _tree_like(trace.state_shapes, arrays[len(in_params) :])
        return _tree_like(params, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _filled(parameter: Parameter) -> np.ndarray:
    """For each place of the leading dim, whether it holds a layer."""
    order = parameter.layer_order or tuple(range(parameter.num_layers))
    return np.asarray(order) >= 0


def _tree_like(tree: Any, leaves: list[jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
