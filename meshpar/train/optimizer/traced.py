"""Traces of the functions of an optimizer, and the owner of each array of its state."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr

from meshpar.errors import InputError
from meshpar.rules.sharding import path_name
from meshpar.train.optimizer.flow import NotByLayer, Value
from meshpar.train.optimizer_state import owned_path


@dataclass(frozen=True)
class Slot:
    """One array of the parameters or of an optimizer's state.

    Args:
        path: Its name.
        owner: Path of the parameter that it belongs to; None if it belongs to none.
        layer: Its layer, where layers are parameters of their own.
    """

    path: str
    owner: str | None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The traces of an optimizer on a tree of parameters.

    Args:
        init: Parameters -> state.
        update: Gradients, state, parameters and loss -> updates and state.
        params: A slot for each parameter.
        state: A slot for each array of the state.
        state_shapes: The state's shapes.
    """

    init: ClosedJaxpr
    update: ClosedJaxpr
    params: tuple[Slot, ...]
    state: tuple[Slot, ...]
    state_shapes: Any


def traced(
    optimizer: optax.GradientTransformation,
    params: Any,
    slots: Sequence[Slot] | None = None,
) -> Traced:
    """Return the traces of an optimizer on parameters of these shapes.

    Nothing is computed. Errors of the optimizer itself are passed on.

    Args:
        optimizer: The optimizer.
        params: Shapes.
        slots: A slot for each parameter; named by their paths when absent.
    """
    paths = [tuple(path) for path, _ in jax.tree.leaves_with_path(params)]
    if slots is None:
        slots = [Slot(path_name(path), path_name(path)) for path in paths]
    init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    update, returned = jax.make_jaxpr(update_with_loss(optimizer), return_shape=True)(
        params, state, params, loss
    )
    _check_returned(returned, (params, state))
    return Traced(
        init=init,
        update=update,
        params=tuple(slots),
        state=_state_slots(state, paths, slots),
        state_shapes=state,
    )


def update_with_loss(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Return the update as a function of gradients, state, parameters and the loss.

    Optimizers that can take it get the loss as `value`.
    """
    update = optax.with_extra_args_support(optimizer).update
    parameters = inspect.signature(update).parameters.values()
    takes_loss = any(
        one.name == "value" or one.kind == one.VAR_KEYWORD for one in parameters
    )

    def with_loss(gradients: Any, state: Any, params: Any, value: jax.Array) -> Any:
        more = {"value": value} if takes_loss else {}
        return update(gradients, state, params, **more)

    return with_loss


def check_owner(slot: Slot, value: Value, stacked: frozenset[str]) -> None:
    """Raise NotByLayer if an array is made of the layers of another parameter."""
    other = value.owner
    if other not in (None, slot.owner) and stacked.intersection((other, slot.owner)):
        raise NotByLayer(f"{slot.path} is made of values of {other}")


def _check_returned(returned: Any, wanted: Any) -> None:
    if jax.tree.structure(returned) != jax.tree.structure(wanted):
        raise InputError(
            "its update returns other trees than the gradients and the state that it "
            "is given",
            key="optimizer.update_changes_tree",
        )
    leaves = zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(returned), strict=True
    )
    for (path, one), other in leaves:
        if one.shape != other.shape:
            raise InputError(
                f"its update makes {path_name(path[1:])} of shape {one.shape} one of "
                f"shape {other.shape}",
                key="optimizer.update_changes_shape",
            )


def _state_slots(
    state: Any, paths: Sequence[tuple], slots: Sequence[Slot]
) -> tuple[Slot, ...]:
    """Return a slot for each array of a state; those of one path in layer order."""
    known: dict[tuple, list[Slot]] = {}
    for path, slot in zip(paths, slots, strict=True):
        known.setdefault(path, []).append(slot)
    seen: Counter[tuple] = Counter()
    found = []
    for path, _ in jax.tree.leaves_with_path(state):
        owned = owned_path(path, known)
        if owned is None:
            found.append(Slot(path_name(path), None))
            continue
        layers, at = known[owned.path], seen[tuple(path)]
        seen[tuple(path)] += 1
        slot = layers[min(at, len(layers) - 1)]
        parts = path_name(owned.before), slot.path, path_name(owned.after)
        found.append(Slot(".".join(filter(None, parts)), slot.owner, slot.layer))
    return tuple(found)
