"""An optimizer of stacked parameters that does what it does to each layer by itself.

A block's parameters are stacked over their layers, in the order and with the empty
places that a pipeline's stages have. The optimizer is traced on one layer's shapes, so
that it sees each parameter's own rank and size (Muon's matrices, Adafactor's means,
weight decay by `ndim`), and the trace is run for all layers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.parallel.by_owners import Owners
from meshpar.parallel.matrices import ON_MATRICES, OnMatrices
from meshpar.trace.primitives import ELEMENTWISE
from meshpar.trace.walk import equations
from meshpar.train.optimizer.flow import (
    REDUCTIONS,
    SUMS,
    NotByLayer,
    Slot,
    Traced,
    Value,
    check_owner,
    run,
    single_owner,
    traced,
    update_with_loss,
)
from meshpar.train.optimizer.proof import by_layer_refusal
from meshpar.train.optimizer_state import full_dtype

_WAY_OUT = (
    "take an optimizer that treats each parameter by itself, such as adamw or muon, "
    "and max_grad_norm= of make_train_step to clip by the global norm, or "
    "unroll_optimizer=True, which gives it each layer alone"
)


def by_layer(
    optimizer: optax.GradientTransformation,
    model: Model,
    layout: Layout,
    make_owners: Callable[[], Owners] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of stacked parameters; nothing is computed.

    Its update takes the loss as `value`. Updates are 0 at places without a layer. An
    optimizer that is made for the stacked arrays, as it raises on one layer's shapes,
    gets those where they hold the layers first to last, if it treats each value by
    itself.

    Args:
        optimizer: As for a tree in which every parameter is one layer's.
        model: Arranged for its stages.
        layout: The step's layout, for messages.
        make_owners: Makes the devices that compute what it does to whole matrices
            (`on_matrices`); each device with a shard computes them when absent.

    Raises:
        InputError: Its effect on each layer cannot be told, with the reason.
    """
    parameters = model.flat_parameters()
    stacked = [path for path, one in parameters.items() if one.num_layers is not None]
    as_given = optax.GradientTransformationExtraArgs(
        optimizer.init, update_with_loss(optimizer)
    )
    shapes = _shapes(model, lambda one: one.shape)
    try:
        trace = traced(optimizer, shapes)
    except Exception as error:  # whatever it raises: it may be made for stacked arrays
        if stacked:
            _refuse_for_stacked(optimizer, model, layout, stacked, error)
        return as_given
    operations = (equation.primitive for equation in equations(trace.update))
    if not stacked and ON_MATRICES not in operations:
        return as_given
    reason = by_layer_refusal(optimizer, shapes, trace, stacked)
    if reason is not None:
        raise InputError(
            f"the optimizer cannot be run on each layer by itself: {reason}; "
            f"{_WAY_OUT}",
            key="optimizer.not_by_layer",
        )
    filled = {path: np.asarray(parameters[path].places) >= 0 for path in stacked}
    return _optimizer(trace, _Layers(filled, make_owners))


def by_layer_on_one_rank(
    optimizer: optax.GradientTransformation, model: Model, ranks: int
) -> tuple[Traced, optax.GradientTransformationExtraArgs]:
    """Return the trace of an optimizer, and the optimizer for one rank's layers.

    Its stacked arrays have as many places as one of `ranks` ranks holds. It updates
    empty places too; the caller discards these updates.

    Raises:
        InputError: The optimizer is made for the stacked arrays of all layers.
    """
    try:
        trace = traced(optimizer, _shapes(model, lambda one: one.shape))
    except Exception as error:  # whatever it raises
        raise InputError(
            "the optimizer raises on arrays of one layer's shape "
            f"({type(error).__name__}: {error}), so that no rank can run it on its "
            f"own layers; {_WAY_OUT}",
            key="optimizer.raises",
        ) from error
    filled = {
        path: np.ones(len(one.places) // ranks, bool)
        for path, one in model.flat_parameters().items()
        if one.num_layers is not None
    }
    return trace, _optimizer(trace, _Layers(filled))


def _refuse_for_stacked(
    optimizer: optax.GradientTransformation,
    model: Model,
    layout: Layout,
    stacked: Collection[str],
    error: Exception,
) -> None:
    """Refuse an optimizer made for stacked arrays that these would lead astray.

    `error` is what it raised on one layer's shapes.
    """
    raised = (
        "the optimizer raises on arrays of one layer's shape "
        f"({type(error).__name__}: {error})"
    )
    for path in stacked:
        parameter = model.flat_parameters()[path]
        layers, places = parameter.num_layers or 0, len(parameter.places)
        if parameter.places == tuple(range(layers)):
            continue
        order = "in another order"
        if layers < places:
            order = f"in {places} places, {places - layers} of them empty"
        raise InputError(
            f"{raised}, so it is taken to be made for arrays of all layers first "
            f"to last, but layout {str(layout)!r} stacks {path} rank by rank, "
            f"{layers} layers {order}; make it for one layer's shapes, or take a "
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
    reason = stacked_refusal(trace, shapes, stacked)
    if reason is not None:
        raise InputError(
            f"{raised}, and on arrays of all layers {reason}",
            key="optimizer.joins_stacked_layers",
        ) from error


def _shapes(model: Model, shape: Callable[[Parameter], tuple[int, ...]]) -> Any:
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(shape(one), full_dtype(one.dtype)),
        model.parameters,
        is_leaf=is_parameter,
    )


def _optimizer(trace: Traced, layers: _Layers) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that runs a trace of one layer for all layers."""
    in_params = [slot.owner for slot in trace.params]
    in_state = [slot.owner for slot in trace.state]

    def values(owners: list[str | None], tree: Any) -> list[Value]:
        pairs = zip(owners, jax.tree.leaves(tree), strict=True)
        return [Value(owner, leaf) for owner, leaf in pairs]

    def outputs(
        program: ClosedJaxpr, inputs: list[Value], owners: list[str | None]
    ) -> list[jax.Array]:
        results = run(program, inputs, layers)
        return [layers.stacked(*one) for one in zip(owners, results, strict=True)]

    def init(params: Any) -> Any:
        arrays = outputs(trace.init, values(in_params, params), in_state)
        return jax.tree.unflatten(jax.tree.structure(trace.state_shapes), arrays)

    def update(
        gradients: Any, state: Any, params: Any, *, value: jax.Array
    ) -> tuple[Any, Any]:
        inputs = [
            *values(in_params, gradients),
            *values(in_state, state),
            *values(in_params, params),
            Value(None, value),
        ]
        arrays = outputs(trace.update, inputs, [*in_params, *in_state])
        updates = [
            layers.without_empty(owner, array)
            for owner, array in zip(in_params, arrays, strict=False)
        ]
        new_state = arrays[len(in_params) :]
        return jax.tree.unflatten(jax.tree.structure(params), updates), (
            jax.tree.unflatten(jax.tree.structure(trace.state_shapes), new_state)
        )

    return optax.GradientTransformationExtraArgs(init, update)


@dataclass(frozen=True)
class _Layers:
    """The domain of arrays, stacked over the places of layers where they have them.

    `filled` has, for each parameter with layers, which places of its leading dim hold
    one.
    """

    filled: Mapping[str, np.ndarray]
    make_owners: Callable[[], Owners] | None = None

    def constant(self, value: Any) -> Any:
        return value

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[Any]:
        primitive = equation.primitive

        def bind(*contents: Any) -> list[Any]:
            results = primitive.bind(*contents, **equation.params)
            return list(results) if primitive.multiple_results else [results]

        contents = [operand.content for operand in operands]
        dims = [0 if operand.owner in self.filled else None for operand in operands]
        return jax.vmap(bind, dims)(*contents) if 0 in dims else bind(*contents)

    def total(self, name: str, terms: Sequence[Value]) -> jax.Array:
        add = SUMS[name]

        def summed(term: Value) -> jax.Array:
            if term.owner is None or term.owner not in self.filled:
                return jnp.asarray(term.content)
            neutral = _neutral(name, term.content.dtype)
            array = _masked(term.content, self.filled[term.owner], neutral)
            return lax.reduce(array, neutral, add, (0,))

        return functools.reduce(add, map(summed, terms))

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        owners: list[str | None] = []

        def results(branch: ClosedJaxpr, contents: Sequence[Any]) -> list[Value]:
            pairs = zip(inputs, contents, strict=True)
            return run(branch, [Value(one.owner, it) for one, it in pairs], self)

        def note_owners(*contents: Any) -> None:
            by_branch = (results(branch, contents) for branch in branches)
            for options in zip(*by_branch, strict=True):
                owners.append(single_owner("cond", options))

        def stacked(branch: ClosedJaxpr, *contents: Any) -> list[jax.Array]:
            pairs = zip(owners, results(branch, contents), strict=True)
            return [self.stacked(*one) for one in pairs]

        contents = [one.content for one in inputs]
        jax.eval_shape(note_owners, *contents)
        arrays = lax.switch(
            jnp.int32(index.content),
            [functools.partial(stacked, branch) for branch in branches],
            *contents,
        )
        return [Value(*one) for one in zip(owners, arrays, strict=True)]

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[Any]:
        others = [jnp.asarray(one.content) for one in shared]
        owners = [one.owner for one in arrays if one.owner is not None]
        contents = [one.content for one in arrays]
        if self.make_owners is not None and len(owners) == len(arrays):
            return self.make_owners().run(owners, operations, contents, others)
        in_axes = (0, *(None,) * len(others))
        return [
            jax.vmap(operation, in_axes)(one.content, *others)
            if one.owner in self.filled
            else operation(one.content, *others)
            for operation, one in zip(operations, arrays, strict=True)
        ]

    def stacked(self, owner: str | None, value: Value) -> jax.Array:
        """Return a value's array, once for each place if its owner has layers."""
        if owner is None or owner not in self.filled or value.owner == owner:
            return jnp.asarray(value.content)
        shape = (len(self.filled[owner]), *jnp.shape(value.content))
        return jnp.broadcast_to(value.content, shape)

    def without_empty(self, owner: str | None, array: jax.Array) -> jax.Array:
        """Return the array, 0 at places without a layer."""
        if owner is None or owner not in self.filled:
            return array
        return _masked(array, self.filled[owner], 0)


def _masked(array: jax.Array, filled: np.ndarray, neutral: Any) -> jax.Array:
    if filled.all():
        return array
    return jnp.where(filled.reshape(-1, *(1,) * (array.ndim - 1)), array, neutral)


def _neutral(name: str, dtype: Any) -> np.ndarray:
    """Return the value that changes no sum by a primitive of `SUMS`."""
    if name in ("add", "add_any", "or"):
        return np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(name in ("and", "min"))
    if name == "and":
        return ~np.zeros((), dtype)
    sign = -1 if name == "max" else 1
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(sign * np.inf, dtype)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min if name == "max" else limits.max, dtype)


def stacked_refusal(trace: Traced, params: Any, stacked: Collection[str]) -> str | None:
    """Return the reason why an optimizer cannot be run on stacked arrays, or None.

    Args:
        trace: Its trace on them.
        params: Their shapes.
        stacked: Paths of the parameters that have layers.
    """

    def values(slots: Sequence[Slot], shapes: Any) -> list[Value]:
        pairs = zip(slots, jax.tree.leaves(shapes), strict=True)
        return [Value(slot.owner, leaf.shape) for slot, leaf in pairs]

    owners = frozenset(stacked)
    of_params = values(trace.params, params)
    of_state = values(trace.state, trace.state_shapes)
    update = [*of_params, *of_state, *of_params, Value(None, ())]
    try:
        for program, inputs, slots in (
            (trace.init, of_params, trace.state),
            (trace.update, update, (*trace.params, *trace.state)),
        ):
            results = run(program, inputs, _Shapes(owners))
            for slot, value in zip(slots, results, strict=True):
                check_owner(slot, value, owners)
                if isinstance(value.content, str):
                    raise NotByLayer(
                        f"{slot.path} is a sum over all layers of {value.owner}"
                    )
    except NotByLayer as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class _Shapes:
    """The domain of shapes, or of the primitive that all values were reduced by."""

    stacked: frozenset[str]

    def constant(self, value: Any) -> tuple[int, ...]:
        return ()

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[Any]:
        name, num_results = equation.primitive.name, len(equation.outvars)
        owned = [one for one in operands if one.owner in self.stacked]
        if not owned:
            return [()] * num_results
        owner, shape = owned[0].owner, owned[0].content
        if any(isinstance(one.content, str) for one in owned):
            raise NotByLayer(f"it takes a mean or a norm of {owner} over all layers")
        if name in ELEMENTWISE:
            return [max((one.content for one in owned), key=len)] * num_results
        if name in REDUCTIONS and len(equation.params["axes"]) == len(shape):
            return [REDUCTIONS[name]]
        raise NotByLayer(f"it does not treat each value of {owner} by itself ({name})")

    def total(self, name: str, terms: Sequence[Value]) -> tuple[int, ...]:
        for term in terms:
            if term.owner in self.stacked and term.content != name:
                raise NotByLayer(f"it adds up {term.owner} with other parameters")
        return ()

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[Any]:
        for one in arrays:
            if one.owner in self.stacked:
                raise NotByLayer(f"it takes {one.owner} as matrices")
        return [one.content for one in arrays]

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        results = []
        by_branch = [run(branch, inputs, self) for branch in branches]
        for options in zip(*by_branch, strict=True):
            owner = single_owner("cond", options)
            contents = {one.content for one in options if one.owner == owner}
            if owner in self.stacked and len(contents) > 1:
                raise NotByLayer(f"it chooses between arrays and sums of {owner}")
            results.append(Value(owner, contents.pop()))
        return results


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
