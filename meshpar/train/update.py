"""One optimizer step from gradients: clipped, skipped if need be, stored again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshpar.collectives import asked
from meshpar.parallel.mean_loss import scaled
from meshpar.parallel.norm import global_norm
from meshpar.parallel.placement import Placement
from meshpar.train.precision import (
    in_full,
    inner_state,
    master_values,
    stored,
    with_updated,
)
from meshpar.train.state import TrainState

_ROUNDING = 0x50
"""Tells the keys of random rounding from those of dropout."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a step does with its gradients.

    Args:
        placement: Where parameters, gradients and states lie.
        optimizer: What updates the stacked parameters (`optimizer.by_layer`).
        max_grad_norm: Gradients are scaled down to this global norm; None for none.
        of_states: Sharding of each parameter's gradient and optimizer state.
    """

    placement: Placement
    optimizer: optax.GradientTransformationExtraArgs
    max_grad_norm: float | None
    of_states: Any

    def __call__(
        self,
        state: TrainState,
        loss: jax.Array,
        gradients: Any,
        model_state: Any,
        *,
        counts: jax.Array | bool = True,
    ) -> tuple[TrainState, jax.Array]:
        """Return the next state, and the global norm of the gradients before scaling.

        Where loss or norm is not finite, or `counts` is false, parameters and optimizer
        state stay as they are and `skipped` counts one more.
        """
        placement = self.placement
        norm = global_norm(
            gradients, self.of_states, placement.mesh, apart=placement.apart
        )
        state = self._on_device(state)
        counts = jnp.isfinite(norm) & jnp.isfinite(loss) & counts
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            gradients = scaled(gradients, scale, jnp.float32)
        values = jax.tree.map(
            lax.with_sharding_constraint,
            master_values(state.params, state.opt_state),
            self.of_states,
        )
        new_values, new_opt_state = self._updated(
            values, gradients, state.opt_state, loss
        )
        keep = lambda new, old: jnp.where(counts, new, old)  # noqa: E731
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + jnp.where(counts, 0, 1),
            params=self.at_rest(state, jax.tree.map(keep, new_values, values)),
            opt_state=jax.tree.map(keep, new_opt_state, state.opt_state),
            model_state=jax.tree.map(keep, model_state, state.model_state),
        )
        return new_state, norm

    def at_rest(self, state: TrainState, values: Any) -> Any:
        """Values of parameters as they lie between steps, rounded if they are to be.

        Args:
            state: Its seed and step are what random rounding derives from.
            values: fp32, laid out as states.
        """
        placement = self.placement
        key = jax.random.fold_in(jax.random.key(state.seed), jnp.uint32(_ROUNDING))
        return placement.at_rest(
            stored(
                values,
                placement.layout.param_dtype,
                placement.model,
                jax.random.fold_in(key, state.step),
            )
        )

    def _on_device(self, state: TrainState) -> TrainState:
        if self.placement.layout.optimizer_memory == "device":
            return state
        moved = jax.device_put(state.opt_state, jax.memory.Space.Device)
        return dataclasses.replace(state, opt_state=moved)

    def _updated(
        self, values: Any, gradients: Any, opt_state: Any, loss: jax.Array
    ) -> tuple[Any, Any]:
        gradients = jax.tree.map(in_full, gradients)
        with asked("optimizer"):
            updates, inner = self.optimizer.update(
                gradients, inner_state(opt_state), values, value=loss
            )
        values = optax.apply_updates(values, updates)
        return values, with_updated(opt_state, inner, values)
