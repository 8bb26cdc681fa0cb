"""An optimizer traced on shapes, and run while it is known what each value is made of.

The trace has one layer in the place of each stacked parameter, so that a value made of
one parameter exists once for each of its layers. Where values of several parameters
meet in a sum (a global norm, a test that all is finite), the sum runs over the layers
too. Any other mix of parameters has no meaning for layers. A domain says what a value
is: arrays, their shapes, or digests of what computes them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.errors import InputError
from meshpar.parallel.matrices import ON_MATRICES, OnMatrices
from meshpar.rules.sharding import path_name
from meshpar.trace.primitives import ELEMENTWISE
from meshpar.trace.walk import called_program, walk
from meshpar.train.optimizer_state import owned_path

SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "add_any": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""Primitives whose two operands may come in any order and grouping."""

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""Reductions of an array -> the primitive of `SUMS` that reduces two values."""


class NotByLayer(Exception):
    """An optimizer mixes parameters, or their layers, as its text says."""


@dataclass(frozen=True)
class Value:
    """A value and the path of the one parameter that it is made of.

    The owner is None for a value made of no parameter, or of a sum over all.
    """

    owner: str | None
    content: Any


@dataclass(frozen=True)
class _Terms:
    """A sum by a primitive of `SUMS`; `joined` if all terms are of one parameter."""

    name: str
    parts: tuple[Value, ...]
    joined: Value | None = None


@dataclass(frozen=True)
class _Stack:
    """Values of several parameters along the leading dim, which they may lack."""

    parts: tuple[Value, ...]
    dim_is_new: bool


@dataclass(frozen=True)
class _Mixed:
    """A value that is an error if an output needs it."""

    reason: str


_Any = Value | _Terms | _Stack | _Mixed


class Domain(Protocol):
    """The meaning of values and operations."""

    def constant(self, value: Any) -> Any:
        """Return the content of a constant."""

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[Any]:
        """Return the results of an operation on values of one parameter at most."""

    def total(self, name: str, terms: Sequence[Value]) -> Any:
        """Return the sum of terms of several parameters, and over their layers."""

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        """Return the results of `cond` by an index that is made of no parameter."""

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[Any]:
        """Return the results of `on_matrices`, each of the parameter of its array."""


def run(program: ClosedJaxpr, inputs: Sequence[Value], domain: Domain) -> list[Value]:
    """Return the outputs of a traced function in a domain.

    Raises:
        NotByLayer: An output mixes values of several parameters other than by a sum.
    """
    outputs = []
    for value in _outputs(program, inputs, domain):
        whole = _joined(value, domain)
        if isinstance(whole, _Mixed):
            raise NotByLayer(whole.reason)
        if isinstance(whole, _Stack):
            raise NotByLayer(_mixing("concatenate", _owners([whole])))
        outputs.append(whole)
    return outputs


def single_owner(name: str, values: Sequence[Any]) -> str | None:
    """Return the owner that values have in common, if any has one.

    Raises:
        NotByLayer: They have several.
    """
    owners = _owners(values)
    if len(owners) > 1:
        raise NotByLayer(_mixing(name, owners))
    return owners[0] if owners else None


def _outputs(program: Any, inputs: Sequence[_Any], domain: Domain) -> list[_Any]:
    def apply(equation: JaxprEqn, operands: list[_Any]) -> Sequence[_Any]:
        called = called_program(equation)
        if called is not None and equation.primitive.name != "shard_map":
            return _outputs(called, operands, domain)
        try:
            return _results(equation, operands, domain)
        except NotByLayer as reason:
            return [_Mixed(str(reason))] * len(equation.outvars)

    return walk(
        program, inputs, apply, lambda value: Value(None, domain.constant(value))
    )


def _results(
    equation: JaxprEqn, operands: list[_Any], domain: Domain
) -> Sequence[_Any]:
    name = equation.primitive.name
    for one in operands:
        if isinstance(one, _Mixed):
            raise NotByLayer(one.reason)
    if name in SUMS and not any(isinstance(one, _Stack) for one in operands):
        return [_added(equation, operands, domain)]
    wholes = [_joined(one, domain) for one in operands]
    if name in ("concatenate", "stack") and len(_owners(wholes)) > 1:
        return [_stacked(equation, wholes)]
    if len(wholes) == 1 and isinstance(wholes[0], _Stack):
        return [_stack_result(equation, wholes[0], domain)]
    values = [one for one in wholes if isinstance(one, Value)]
    if len(values) < len(wholes):
        raise NotByLayer(_mixing(name, _owners(wholes)))
    if name == "cond" and values[0].owner is None:
        return domain.choose(values[0], values[1:], equation.params["branches"])
    if equation.primitive is ON_MATRICES:
        return _on_matrices(equation, values, domain)
    owner = single_owner(name, values)
    return [Value(owner, content) for content in domain.apply(equation, values)]


def _on_matrices(
    equation: JaxprEqn, values: Sequence[Value], domain: Domain
) -> list[Value]:
    operations = equation.params["operations"]
    arrays, shared = values[: len(operations)], values[len(operations) :]
    owners = _owners(shared)
    if owners:
        raise NotByLayer(f"every matrix takes values of {owners[0]}")
    contents = domain.on_matrices(operations, arrays, shared)
    pairs = zip(arrays, contents, strict=True)
    return [Value(array.owner, content) for array, content in pairs]


def _joined(value: _Any, domain: Domain) -> Any:
    """Return the value itself, the sum where it is terms."""
    if not isinstance(value, _Terms):
        return value
    return value.joined or Value(None, domain.total(value.name, value.parts))


def _added(equation: JaxprEqn, operands: list[_Any], domain: Domain) -> _Any:
    name = equation.primitive.name
    parts: list[Any] = []
    for one in operands:
        if isinstance(one, _Terms) and one.name == name:
            parts += one.parts
        else:
            parts.append(_joined(one, domain))
    owners = _owners(parts)
    if len(owners) > 1:
        return _Terms(name, tuple(parts))
    values = [_joined(one, domain) for one in operands]
    if not owners:
        return Value(None, domain.apply(equation, values)[0])
    joined = Value(owners[0], domain.apply(equation, values)[0])
    return _Terms(name, tuple(parts), joined)


def _stacked(equation: JaxprEqn, operands: list[Any]) -> _Stack:
    name = equation.primitive.name
    dim_is_new = name == "stack"
    parts: list[Value] = []
    for one in operands:
        if isinstance(one, Value):
            parts.append(one)
        elif one.dim_is_new or dim_is_new:
            raise NotByLayer(_mixing(name, _owners(operands)))
        else:
            parts += one.parts
    if equation.params["axis" if dim_is_new else "dimension"] != 0:
        raise NotByLayer(_mixing(name, _owners(operands)))
    return _Stack(tuple(parts), dim_is_new)


def _stack_result(equation: JaxprEqn, stack: _Stack, domain: Domain) -> _Any:
    """Apply an operation to each part; add the parts if it reduces the leading dim."""
    name = equation.primitive.name
    reduces = name in REDUCTIONS and tuple(equation.params["axes"]) == (0,)
    if not reduces and name not in ELEMENTWISE:
        raise NotByLayer(_mixing(name, _owners([stack])))
    parts = stack.parts
    if not (reduces and stack.dim_is_new):
        parts = tuple(
            Value(part.owner, domain.apply(equation, [part])[0]) for part in parts
        )
    if reduces:
        return _Terms(REDUCTIONS[name], parts)
    return _Stack(parts, stack.dim_is_new)


def _owners(values: Sequence[Any]) -> list[str]:
    """Return the different owners, in order."""
    owners: dict[str, None] = {}
    for value in values:
        parts = value.parts if isinstance(value, _Stack) else (value,)
        owners.update((part.owner, None) for part in parts if part.owner is not None)
    return list(owners)


def _mixing(name: str, owners: Sequence[str]) -> str:
    return f"it mixes values of {owners[0]} and {owners[1]} ({name})"


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
