"""An optimizer that gets each layer of a stacked parameter as one of its own.

Any optimizer runs so, also one that looks at several parameters at once, counts them,
or draws random numbers for each. Its program grows with the number of layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.train.optimizer.flow import update_with_loss


def unrolled(
    optimizer: optax.GradientTransformation, model: Model, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of stacked parameters; nothing is computed.

    Its update takes the loss as `value`. Updates are 0 at places without a layer. Its
    state has the layers of each stacked parameter first to last, as a tuple.

    Args:
        optimizer: As for a tree in which every parameter is one layer's.
        model: Arranged for its stages.
        layout: The step's layout.
    """
    update_layers = update_with_loss(optimizer)

    def layers(parameter: Parameter, stacked: jax.Array) -> Any:
        if parameter.num_layers is None:
            return stacked
        places = map(parameter.places.index, range(parameter.num_layers))
        return tuple(stacked[place] for place in places)

    def stack(parameter: Parameter, layers: Any) -> jax.Array:
        if parameter.num_layers is None:
            return layers
        empty = jnp.zeros_like(layers[0])
        return jnp.stack([empty if at < 0 else layers[at] for at in parameter.places])

    def by_parameter(function: Any, tree: Any) -> Any:
        return jax.tree.map(function, model.parameters, tree, is_leaf=is_parameter)

    def init(params: Any) -> Any:
        return optimizer.init(by_parameter(layers, params))

    def update(
        gradients: Any, state: Any, params: Any, *, value: jax.Array
    ) -> tuple[Any, Any]:
        given = by_parameter(layers, gradients), state, by_parameter(layers, params)
        updates, state = update_layers(*given, value)
        return by_parameter(stack, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
