"""An optimizer's functions traced on shapes, and whose each array of its state is."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.errors import InputError
from meshpar.rules.sharding import path_name
from meshpar.train.optimizer.flow import NotByLayer, Value
from meshpar.train.optimizer.program import Program, program_of
from meshpar.train.optimizer_state import path_of_owner

_LOSS = jax.ShapeDtypeStruct((), jnp.float32)


@dataclass(frozen=True)
class Slot:
    """One array of the parameters or of an optimizer's state.

    Args:
        path: What it is called.
        owner: Path of the parameter that it belongs to; None for no one's.
        copy: Which layer's it is, where layers are parameters of their own.
    """

    path: str
    owner: str | None
    copy: int | None = None


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What an optimizer does with a tree of parameters.

    Args:
        init: Parameters -> state.
        update: Gradients, state, parameters and loss -> updates and state.
        params: What each parameter is.
        state: What each array of the state is.
        state_shapes: The state's shapes.
    """

    init: Program
    update: Program
    params: tuple[Slot, ...]
    state: tuple[Slot, ...]
    state_shapes: Any


def traced(
    optimizer: optax.GradientTransformation,
    params: Any,
    slots: Sequence[Slot] | None = None,
) -> Traced:
    """The trace of an optimizer on parameters of these shapes; nothing is computed.

    What the optimizer itself raises is passed on.

    Args:
        optimizer: The optimizer.
        params: Shapes.
        slots: What each parameter is; what its path says when absent.
    """
    paths = [tuple(path) for path, _ in jax.tree.leaves_with_path(params)]
    if slots is None:
        slots = [Slot(path_name(path), path_name(path)) for path in paths]
    init, state = program_of(optimizer.init, params)
    update, returned = program_of(update_of(optimizer), params, state, params, _LOSS)
    _check_returned(returned, (params, state))
    return Traced(
        init=init,
        update=update,
        params=tuple(slots),
        state=_state_slots(state, paths, slots),
        state_shapes=state,
    )


def update_of(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The update as a function of gradients, state, parameters and the loss.

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


def _check_returned(returned: Any, wanted: Any) -> None:
    """Refuses an update that returns other trees than it was given."""
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


def check_owner(slot: Slot, value: Value, stacked: frozenset[str]) -> None:
    """Refuses an array of one parameter that is made of another's layers.

    Args:
        slot: What the array is.
        value: What it is made of.
        stacked: Paths of the parameters that have layers.

    Raises:
        NotByLayer: It is.
    """
    if value.owner == slot.owner or not stacked.intersection((value.owner, slot.owner)):
        return
    if value.owner is not None:
        raise NotByLayer(f"{slot.path} is made of values of {value.owner}")


def _state_slots(
    state: Any, paths: Sequence[tuple], slots: Sequence[Slot]
) -> tuple[Slot, ...]:
    """Of each array of a state, whose paths hold a parameter's; copies are in order."""
    known: dict[tuple, list[Slot]] = {}
    for path, slot in zip(paths, slots, strict=True):
        known.setdefault(path, []).append(slot)
    seen: Counter[tuple] = Counter()
    found = []
    for path, _ in jax.tree.leaves_with_path(state):
        owner = path_of_owner(path, known)
        if owner is None:
            found.append(Slot(path_name(path), None))
            continue
        of_path, at = known[owner.path], seen[tuple(path)]
        seen[tuple(path)] += 1
        slot = of_path[min(at, len(of_path) - 1)]
        name = ".".join(
            part
            for part in (path_name(owner.before), slot.path, path_name(owner.after))
            if part
        )
        found.append(Slot(name, slot.owner, slot.copy))
    return tuple(found)
