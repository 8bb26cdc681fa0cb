"""Optimizer step in plain JAX, as an optax user writes it around a loss."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import Sharding


def state_shardings(
    optimizer: optax.GradientTransformation,
    params: Any,
    param_shardings: Any,
    replicated: Sharding,
) -> Any:
    """Shardings of an optimizer's state: its parameters', the rest replicated."""
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        param_shardings,
        transform_non_params=lambda _: replicated,
    )


def updated(
    optimizer: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    loss: jax.Array,
    gradients: Any,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """The next parameters and state, and metrics."""
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(gradients)}
    return optax.apply_updates(params, updates), opt_state, metrics
