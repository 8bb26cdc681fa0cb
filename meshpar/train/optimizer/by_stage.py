"""An optimizer that updates the parameters of one stage, apart from all others.

For schedules in which each stage updates its weights when its gradient is there. The
optimizer is traced on one layer's shapes, as in `by_layer`, and must treat every
parameter by itself: a sum over parameters, such as a global norm, would need all stages
at once, and the loss is known to none of them. What belongs to no parameter, such as a
step count, is kept for each part by itself while stages are at different updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.parallel.matrices import OnMatrices
from meshpar.parallel.pipeline.crossing import STAGE
from meshpar.parallel.pipeline.weight_stash import Part
from meshpar.rules.sharding import path_name
from meshpar.trace.dependence import arguments_read
from meshpar.train.optimizer.by_layer import by_layer_on_one_rank
from meshpar.train.optimizer.flow import (
    NotByLayer,
    Traced,
    Value,
    run,
    single_owner,
)
from meshpar.train.optimizer_state import in_full


@dataclass(frozen=True, kw_only=True)
class StageOptimizer:
    """An optimizer of the stacked layers of one rank and of the ends.

    Args:
        optimizer: Of one rank's stacked parameters (`by_layer_on_one_rank`).
        parts: The `Part` of each parameter.
        state_parts: The `Part` of each array of the state; None for those of none.
        filled: For each parameter with empty places, whether each rank has a layer at
            each of its places, (ranks, places); None for others.
    """

    optimizer: optax.GradientTransformationExtraArgs
    parts: Params
    state_parts: Sequence[Part | None]
    filled: Sequence[np.ndarray | None]

    def for_parts(self, opt_state: Any) -> Any:
        """Return the state with what belongs to no parameter once for each part."""
        return self._map_unowned(
            lambda x: jnp.broadcast_to(x, (len(Part), *x.shape)), opt_state
        )

    def whole(self, opt_state: Any) -> Any:
        """Undo `for_parts` where all parts have had the same number of updates."""
        return self._map_unowned(lambda x: x[Part.STAGE], opt_state)

    def update(
        self,
        gradients: Params,
        opt_state: Any,
        params: Params,
        active: tuple[jax.Array, ...],
    ) -> tuple[Params, Any]:
        """Return parameters and state, updated in the parts that are active.

        Args:
            gradients: Gradients, of active parts at least.
            opt_state: From `for_parts`.
            params: The parameters.
            active: Whether each `Part` is updated.
        """
        gradients = jax.tree.map(in_full, gradients)
        for part in Part:
            own = self._map_unowned(lambda x, part=part: x[part], opt_state)
            updates, updated = self.optimizer.update(
                gradients, own, params, value=jnp.float32(jnp.nan)
            )
            params = self._with_updates(part, params, updates, active[part])
            opt_state = self._with_state(part, opt_state, updated, active[part])
        return params, opt_state

    def _with_updates(
        self, part: Part, params: Params, updates: Params, active: jax.Array
    ) -> Params:
        leaves, treedef = jax.tree.flatten(params)
        new = []
        for value, update, of, filled in zip(
            leaves,
            jax.tree.leaves(updates),
            jax.tree.leaves(self.parts),
            self.filled,
            strict=True,
        ):
            counts = active
            if filled is not None:
                own = jnp.asarray(filled)[lax.axis_index(STAGE)]
                counts &= own.reshape(-1, *(1,) * (value.ndim - 1))
            new.append(
                jnp.where(counts, value + update, value) if of is part else value
            )
        return treedef.unflatten(new)

    def _with_state(
        self, part: Part, opt_state: Any, updated: Any, active: jax.Array
    ) -> Any:
        leaves, treedef = jax.tree.flatten(opt_state)
        new = []
        for old, value, of in zip(
            leaves, jax.tree.leaves(updated), self.state_parts, strict=True
        ):
            if of is None:
                old = old.at[part].set(jnp.where(active, value, old[part]))
            elif of is part:
                old = jnp.where(active, value, old)
            new.append(old)
        return treedef.unflatten(new)

    def _map_unowned(self, function: Any, opt_state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(opt_state)
        return treedef.unflatten(
            function(leaf) if of is None else leaf
            for leaf, of in zip(leaves, self.state_parts, strict=True)
        )


def by_stage(
    optimizer: optax.GradientTransformation, model: Model, parts: Params, stages: int
) -> StageOptimizer:
    """Return the optimizer of one stage and the ends; nothing is computed.

    Args:
        optimizer: As for a tree in which every parameter is one layer's.
        model: Arranged for its stages.
        parts: The `Part` of each parameter.
        stages: Number of stages.

    Raises:
        InputError: It looks at several parameters at once, or at the loss.
    """
    trace, of_rank = by_layer_on_one_rank(optimizer, model, stages)
    reason = _reason_for_one_update(trace)
    if reason is not None:
        raise InputError(
            f"schedule=pipedream_stash updates each stage by itself, but {reason}; "
            "take an optimizer that treats each parameter by itself, such as adamw or "
            "sgd, or schedule=1f1b",
            key="optimizer.needs_one_update",
        )
    by_path = {path_name(path): part for path, part in jax.tree.leaves_with_path(parts)}
    filled = []
    for parameter in model.flat_parameters().values():
        places = np.asarray(parameter.places).reshape(stages, -1) >= 0
        padded = parameter.num_layers is not None and not places.all()
        filled.append(places if padded else None)
    return StageOptimizer(
        optimizer=of_rank,
        parts=parts,
        state_parts=[
            None if slot.owner is None else by_path[slot.owner] for slot in trace.state
        ],
        filled=filled,
    )


def _reason_for_one_update(trace: Traced) -> str | None:
    """Return why an optimizer needs all gradients of a batch at once, or None."""
    update = trace.update
    if arguments_read(jax.extend.core.jaxpr_as_fun(update), *update.in_avals)[-1]:
        return "the optimizer reads the loss, which no stage knows"
    owners = [
        *(slot.owner for slot in trace.params),
        *(slot.owner for slot in trace.state),
        *(slot.owner for slot in trace.params),
        None,
    ]
    try:
        run(update, [Value(owner, None) for owner in owners], _Owners())
    except NotByLayer as reason:
        return f"the optimizer {reason}"
    return None


class _Owners:
    """The domain of owners alone, in which no value is of several parameters."""

    def constant(self, value: Any) -> None:
        return None

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[None]:
        return [None] * len(equation.outvars)

    def total(self, name: str, terms: Sequence[Value]) -> None:
        owners = [term.owner for term in terms if term.owner is not None]
        raise NotByLayer(f"adds up values of {' and '.join(sorted({*owners})[:2])}")

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[None]:
        return [None] * len(arrays)

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        by_branch = [run(branch, inputs, self) for branch in branches]
        return [
            Value(single_owner("cond", options), None)
            for options in zip(*by_branch, strict=True)
        ]
