"""The single-device program: what every layout is compared with.

Plain `jax.value_and_grad` of `model.contract.loss` and optax: no mesh, no rules, no
`shard_map`, and none of the training step's code but the keys, so that no error of it
can cancel. A model of Flax modules starts as Flax builds them, layer by layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshpar.model.contract import Model
from meshpar.model.parameter import (
    ENDS,
    Params,
    initial_key,
    initial_values,
    is_mapped,
    is_parameter,
)
from meshpar.model.scope import Scope
from meshpar.model.tracing import loss_and_state
from meshpar.parallel.reduction import random_key
from meshpar.rules.sharding import path_name
from meshpar.testing.batches import Arrays

Batch = Mapping[str, Any]

NUM_STEPS = 3
MOMENTUM = 0.9
_STEP_SHARE = 0.05
"""Share of an array's norm that the first step moves it by, down to `_LEAST_STEP`.

More would turn small vectors about, such as the one row of a table that a lone token
trains: a norm after it then magnifies every rounding of the steps before.
"""
_LEAST_STEP = 0.05
"""Least step, as a share of the one that moves all parameters by `_STEP_SHARE`.

An array near 0, such as a new bias, would leave all others where they are.
"""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of a training run that are compared: whole numpy arrays.

    Args:
        initial: Parameters before the first step.
        state: The model's state after the last step.
        loss, grad_norm, gradients: Of the first step.
        parameters: After the last step.
    """

    initial: Params
    state: Params
    loss: Any
    grad_norm: Any
    gradients: Params
    parameters: Params


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The single-device program's values, and the learning rate that they used."""

    values: Values
    learning_rate: float


def momentum_sgd(learning_rate: Any) -> optax.GradientTransformation:
    """SGD with momentum.

    Its update is linear in the gradients, so that it neither hides nor magnifies their
    errors. (Adam's first update is the gradient's sign: rounding of a gradient near 0
    would move its parameter by the whole learning rate.) And its momentum after one
    step from zero IS the gradient that the step applied, so that one compiled program
    gives both gradients and updates.
    """
    return optax.sgd(learning_rate, momentum=MOMENTUM)


def gradients_in(opt_state: Any) -> Params:
    """Return the gradients of the first step, from its optimizer state."""
    return optax.tree_utils.tree_get(opt_state, "trace")


def single_device(
    model: Model,
    batches: Sequence[Arrays],
    seed: int,
    compiler_options: Mapping[str, Any] | None = None,
) -> Reference:
    """Train in fp32 on one device; return the values.

    Args:
        model: The model.
        batches: One a step.
        seed: Of initial values and dropout.
        compiler_options: XLA's options.
    """
    init, value_and_grad, update = _programs(
        model, tuple((compiler_options or {}).items())
    )
    initial, state = init(np.uint32(seed))
    (first_loss, state), gradients = value_and_grad(
        initial, state, batches[0], np.uint32(seed), np.int32(0)
    )
    norm = tree_norm(jax.device_get(gradients))
    rate = compared_learning_rate(*jax.device_get((initial, gradients)))
    params, opt_state = update(initial, None, gradients, rate)
    for step, batch in enumerate(batches[1:], start=1):
        (_, state), later = value_and_grad(
            params, state, batch, np.uint32(seed), np.int32(step)
        )
        params, opt_state = update(params, opt_state, later, rate)
    values = Values(
        initial=jax.device_get(initial),
        state=jax.device_get(state),
        loss=jax.device_get(first_loss),
        grad_norm=norm,
        gradients=jax.device_get(gradients),
        parameters=jax.device_get(params),
    )
    return Reference(values=values, learning_rate=float(rate))


def tree_norm(tree: Any) -> float:
    """Return the Euclidean norm of all values of a tree, summed in fp64."""
    leaves = (np.abs(leaf) for leaf in _leaves(tree))
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)
    return float(np.sqrt(sum(squares)))


def compared_learning_rate(params: Params, gradients: Params) -> np.float32:
    """Return the largest rate whose first step moves no array by over `_STEP_SHARE`.

    Arrays that are 0 do not count. At least `_LEAST_STEP` of the one that moves all
    together by that share; 0 where all gradients are.
    """
    whole = tree_norm(gradients)
    if not whole:
        return np.float32(0.0)
    of_all = tree_norm(params) / whole
    pairs = zip(_leaves(params), _leaves(gradients), strict=True)
    norms = [(tree_norm(param), tree_norm(gradient)) for param, gradient in pairs]
    least = min((size / moved for size, moved in norms if size and moved), default=0.0)
    return np.float32(_STEP_SHARE * max(least, _LEAST_STEP * of_all))


@functools.lru_cache(maxsize=16)
def _programs(model: Model, compiler_options: tuple) -> tuple:
    jit = functools.partial(jax.jit, compiler_options=dict(compiler_options))

    def update(params: Params, opt_state: Any, gradients: Params, rate: Any) -> tuple:
        optimizer = momentum_sgd(rate)
        if opt_state is None:
            opt_state = optimizer.init(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    value_and_grad = jax.value_and_grad(
        functools.partial(single_device_loss, model), has_aux=True
    )
    init = functools.partial(_initial, model)
    return jit(init), jit(value_and_grad), jit(update)


def _initial(model: Model, seed: jax.Array) -> tuple[Params, Params]:
    """Return parameters and state; of modules, as Flax makes them."""
    if not model.modules:
        return initial_values(model, seed)
    found = _arrays(model.modules[ENDS], initial_key(seed, ENDS))
    for group in model.groups:
        build = functools.partial(_arrays, model.modules[group.name])
        layers = jnp.arange(group.num_layers)
        keys = jax.vmap(lambda at, of=group.name: initial_key(seed, of, at))(layers)
        # Compiled as the step's, so that LLVM contracts the same sums and products.
        mapped = is_mapped(build, keys[0])
        every = jax.vmap(build)(keys) if mapped else jax.lax.map(build, keys)
        for path, stacked in every.items():
            found[f"{group.name}.{path}"] = stacked
    return tuple(
        jax.tree.map_with_path(
            lambda path, _: found[path_name(path)], tree, is_leaf=is_parameter
        )
        for tree in (model.parameters, model.state)
    )


def _arrays(builder: Any, key: jax.Array) -> dict[str, jax.Array]:
    """Return the arrays of a module that Flax builds, by path."""
    with nnx.use_eager_sharding(False):
        module = builder(nnx.Rngs(key))
    found = {}
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Variable):
            found[name] = node.get_value()
        elif isinstance(node, nnx.Pytree):
            arrays = {k: v for k, v in vars(node).items() if isinstance(v, jax.Array)}
            found |= {f"{name}.{k}" if name else k: v for k, v in arrays.items()}
    return found


def single_device_loss(
    model: Model,
    params: Params,
    state: Params,
    batch: Batch,
    seed: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, Params]:
    """Return the loss of a batch on one device, and the model's state after it."""
    num_examples = len(next(iter(batch.values())))
    scope = Scope(
        random=random_key(seed, step),
        examples=jnp.arange(num_examples, dtype=jnp.uint32),
        training=True,
        platform="",  # so that short sequences keep their scores, whatever the device
    )
    return loss_and_state(model, params, batch, scope, state)


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
