"""An optimizer of stacked parameters that does what it does to each layer by itself.

A block's parameters are stacked over their layers, in the order and with the empty
places that a pipeline's stages have. The optimizer is traced on one layer's shapes, so
that it sees each parameter's own rank and size (Muon's matrices, Adafactor's means,
weight decay by `ndim`), and the trace is run for all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import optax

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.train.optimizer.flow import Value, run
from meshpar.train.optimizer.layers import Layers
from meshpar.train.optimizer.proof import refusal
from meshpar.train.optimizer.stacked import refusal_of_stacked
from meshpar.train.optimizer.traced import Traced, traced, update_of
from meshpar.train.optimizer_state import full_dtype

_WAY_OUT = (
    "take an optimizer that treats each parameter by itself, such as adamw or muon, "
    "and max_grad_norm= of make_train_step to clip by the global norm"
)


def by_layer(
    optimizer: optax.GradientTransformation, model: Model, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of stacked parameters; nothing is computed.

    Its update takes the loss as `value`. Updates are 0 at places without a layer. An
    optimizer that is made for the stacked arrays, as it raises on one layer's shapes,
    is given those where they hold the layers first to last, if it treats each value by
    itself.

    Args:
        optimizer: As for a tree in which every parameter is one layer's.
        model: Arranged for its stages.
        layout: Whose they are, for messages.

    Raises:
        InputError: What it does to each layer cannot be told, with the reason.
    """
    parameters = model.flat_parameters()
    stacked = [path for path, one in parameters.items() if one.num_layers is not None]
    if not stacked:
        return _as_given(optimizer)
    shapes = _shapes(model, lambda one: one.shape)
    try:
        trace = traced(optimizer, shapes)
    except Exception as error:  # whatever it raises: it may be made for stacked arrays
        _refuse_for_stacked(optimizer, model, layout, stacked, error)
        return _as_given(optimizer)
    reason = refusal(optimizer, shapes, trace, stacked)
    if reason is not None:
        raise InputError(
            f"the optimizer cannot be run on each layer by itself: {reason}; "
            f"{_WAY_OUT}",
            key="optimizer.not_by_layer",
        )
    return _of_trace(
        trace, Layers({path: _filled(parameters[path]) for path in stacked})
    )


def _refuse_for_stacked(
    optimizer: optax.GradientTransformation,
    model: Model,
    layout: Layout,
    stacked: Collection[str],
    error: Exception,
) -> None:
    """Refuses an optimizer made for stacked arrays that these would lead astray.

    Args:
        optimizer: The optimizer.
        model: Arranged for its stages.
        layout: Whose they are, for messages.
        stacked: Paths of the stacked parameters.
        error: What it raised on one layer's shapes.

    Raises:
        InputError: They would.
    """
    raised = (
        "the optimizer raises on arrays of one layer's shape "
        f"({type(error).__name__}: {error})"
    )
    for path in stacked:
        parameter = model.flat_parameters()[path]
        if parameter.places != tuple(range(parameter.num_layers or 0)):
            raise InputError(
                f"{raised}, so it is taken to be made for arrays of all layers first "
                f"to last, but layout {str(layout)!r} stacks {path} rank by rank, "
                f"{_places(parameter)}; make it for one layer's shapes, or take a "
                "layout with stages of even size and no chunks",
                key="optimizer.stacked_out_of_order",
            ) from error
    shapes = _shapes(model, lambda one: one.stacked_shape)
    try:
        trace = traced(optimizer, shapes)
    except Exception as of_stacked:  # nothing is left to try
        own = of_stacked.key if isinstance(of_stacked, InputError) else None
        raise InputError(
            f"{raised}, and on arrays of all layers too "
            f"({type(of_stacked).__name__}: {of_stacked})",
            key=own or "optimizer.raises",
        ) from of_stacked
    reason = refusal_of_stacked(trace, shapes, stacked)
    if reason is not None:
        raise InputError(
            f"{raised}, and on arrays of all layers {reason}",
            key="optimizer.joins_stacked_layers",
        ) from error


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


def _as_given(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    return optax.GradientTransformationExtraArgs(optimizer.init, update_of(optimizer))


def _shapes(model: Model, shape: Callable[[Parameter], tuple[int, ...]]) -> Any:
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(shape(one), full_dtype(one.dtype)),
        model.parameters,
        is_leaf=is_parameter,
    )


def _filled(parameter: Parameter) -> np.ndarray:
    """For each place of the leading dim, whether it holds a layer."""
    return np.asarray(parameter.places) >= 0


def _places(parameter: Parameter) -> str:
    layers, places = parameter.num_layers or 0, len(parameter.places)
    if layers == places:
        return f"{layers} layers in another order"
    return f"{layers} layers in {places} places, {places - layers} of them empty"


def _tree_like(tree: Any, leaves: list[jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)
