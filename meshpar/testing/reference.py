"""The single-device program: what every layout is compared with.

Plain `jax.value_and_grad` of `model.contract.loss` and optax: no mesh, no rules, no
`shard_map`, and none of the training step's code but the key of dropout, so that no
error of it can cancel.
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

from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.model.scope import EXAMPLE, Batch, Scope
from meshpar.model.single import loss
from meshpar.parallel.placement import dropout_key
from meshpar.testing.batches import Arrays
from meshpar.testing.bounds import rounding_chains

NUM_STEPS = 3
MOMENTUM = 0.9
_STEP_SHARE = 0.05  # of the parameters' norm, that the first step moves them by


@dataclass(frozen=True, kw_only=True)
class Values:
    """What is compared: numpy arrays, whole.

    Args:
        initial: Parameters before the first step.
        loss, grad_norm, gradients: Of the first step.
        parameters: After the last step.
    """

    initial: Params
    loss: Any
    grad_norm: Any
    gradients: Params
    parameters: Params


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The single-device program's values, and the learning rate that they used."""

    values: Values
    learning_rate: float


def optimizer_of(learning_rate: Any) -> optax.GradientTransformation:
    """SGD with momentum.

    Its update is linear in the gradients, so that it neither hides nor magnifies their
    errors. (Adam's first update is the gradient's sign: rounding of a gradient near 0
    would move its parameter by the whole learning rate.) And its momentum after one
    step from zero IS the gradient that the step applied, so that one compiled program
    gives both gradients and updates.
    """
    return optax.sgd(learning_rate, momentum=MOMENTUM)


def gradients_in(opt_state: Any) -> Params:
    """The gradients of the first step, from the state that it left."""
    return optax.tree_utils.tree_get(opt_state, "trace")


def single_device(
    model: Model,
    batches: Sequence[Arrays],
    seed: int,
    compiler_options: Mapping[str, Any] | None = None,
) -> Reference:
    """The values of an fp32 run on one device.

    Args:
        model: The model.
        batches: One a step.
        seed: Of initial values and dropout.
        compiler_options: XLA's options.
    """
    init, value_and_grad, update = _programs(
        model, tuple((compiler_options or {}).items())
    )
    initial = jax.device_get(init(np.uint32(seed)))
    first_loss, gradients = jax.device_get(
        value_and_grad(initial, _indexed(batches[0]), np.uint32(seed), np.int32(0))
    )
    norm = tree_norm(gradients)
    rate = np.float32(_STEP_SHARE * tree_norm(initial) / norm if norm else 0.0)
    params, opt_state = update(initial, None, gradients, rate)
    for step, batch in enumerate(batches[1:], start=1):
        _, later = value_and_grad(
            params, _indexed(batch), np.uint32(seed), np.int32(step)
        )
        params, opt_state = update(params, opt_state, later, rate)
    values = Values(
        initial=initial,
        loss=first_loss,
        grad_norm=norm,
        gradients=gradients,
        parameters=jax.device_get(params),
    )
    return Reference(values=values, learning_rate=float(rate))


def bf16_chains(
    model: Model, batch: Arrays, *, sum_parts: int = 1
) -> tuple[int, list[int]]:
    """bf16 roundings before the loss and before each gradient, in tree order.

    Counted in the single-device program with bf16 blocks.
    """
    params = jax.eval_shape(model.init, 0)

    def half_loss(params: Params, batch: Batch) -> jax.Array:
        half = jax.tree.map(lambda value: value.astype(jnp.bfloat16), params)
        return _loss(model, half, batch, jnp.uint32(0), jnp.int32(0))

    program = jax.make_jaxpr(jax.value_and_grad(half_loss))(params, _indexed(batch))
    of_loss, *of_gradients = rounding_chains(program, sum_parts=sum_parts)
    return of_loss, of_gradients


def tree_norm(tree: Any) -> float:
    """Euclidean norm of all the values of a tree, summed in fp64."""
    squares = (np.sum(np.square(leaf, dtype=np.float64)) for leaf in _leaves(tree))
    return float(np.sqrt(sum(squares)))


@functools.lru_cache(maxsize=16)
def _programs(model: Model, compiler_options: tuple) -> tuple:
    jit = functools.partial(jax.jit, compiler_options=dict(compiler_options))

    def update(params: Params, opt_state: Any, gradients: Params, rate: Any) -> tuple:
        optimizer = optimizer_of(rate)
        if opt_state is None:
            opt_state = optimizer.init(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    value_and_grad = jax.value_and_grad(functools.partial(_loss, model))
    return jit(model.init), jit(value_and_grad), jit(update)


def _loss(
    model: Model, params: Params, batch: Batch, seed: jax.Array, step: jax.Array
) -> jax.Array:
    scope = Scope(batch=batch, dropout_key=dropout_key(seed, step))
    return loss(model, params, batch, scope)


def _indexed(batch: Arrays) -> Arrays:
    num_examples = len(next(iter(batch.values())))
    return {EXAMPLE: np.arange(num_examples, dtype=np.uint32), **batch}


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
