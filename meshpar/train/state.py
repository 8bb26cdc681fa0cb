"""The state of a training run: all that the next step depends on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.parameter import Params, Specs, initial_values
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.rules.sharding import insert, path_name
from meshpar.train.optimizer_state import (
    Mastered,
    in_full,
    initial_optimizer_state,
    stored,
)
from meshpar.train.state_table import state_html, state_text

Leaf = TypeVar("Leaf")
"""Leaf of a state's tree: an array, its shape or its sharding."""

_OWN = "give one that this step's own init or an earlier call of it returned"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState(Generic[Leaf]):
    """Step number, seed, parameters and optimizer state, each a global array.

    Args:
        step: Steps done.
        seed: What initial values and all random numbers derive from.
        skipped: Steps that changed nothing, as their gradients were not finite or all
            weights 0.
        params: Nested dict, in the layout's `param_dtype`.
        opt_state: As the optimizer made it, in `optimizer_state.Mastered` with a master
            copy where parameters are stored in bf16.
        model_state: The model's arrays that are no parameters (`Model.state`).
    """

    step: Leaf
    seed: Leaf
    skipped: Leaf
    params: Params
    opt_state: Any
    model_state: Any = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return state_text(self)

    def _repr_html_(self) -> str:
        return state_html(self)


def initial_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: jax.Array,
    param_dtype: str = "fp32",
    specs: Specs | None = None,
    given: tuple[Params, Params] = ({}, {}),
) -> TrainState:
    """Return the state before the first step.

    Updates are made in fp32, so optimizer state and master copy start in fp32, whatever
    the dtype of a model's initial values.

    Args:
        model: The model, arranged for its stages.
        optimizer: The optimizer of the stacked parameters.
        seed: Seed of the run.
        param_dtype: As in `Layout`.
        specs: Specs of parameters and model state on the mesh that is set.
        given: Parameters and state in place of those that would be drawn.
    """
    drawn = initial_values(model, seed, specs)
    params, model_state = map(_with_given, drawn, given)
    values = jax.tree.map(in_full, params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(seed, jnp.uint32),
        skipped=jnp.zeros((), jnp.int32),
        params=stored(values, param_dtype, model),
        opt_state=initial_optimizer_state(optimizer, values, param_dtype),
        model_state=model_state,
    )


def _with_given(drawn: Params, given: Params) -> Params:
    """Return a tree with given values in the place of those at the same paths."""
    values = {
        path_name(path): value for path, value in jax.tree.leaves_with_path(given)
    }

    def one(path: tuple, value: jax.Array) -> jax.Array:
        return values.get(path_name(path), value).astype(value.dtype)

    return jax.tree.map_with_path(one, drawn)


def in_memory(memory: str, shardings: Any) -> Any:
    """Return shardings in a memory, `device` or `host`; whole arrays stay."""
    if memory == "device":
        return shardings
    return jax.tree.map(
        lambda one: one.with_memory_kind(HOST_MEMORY) if one.spec else one, shardings
    )


def without_optimizer(state: TrainState) -> TrainState:
    """Return a state, or a tree like it, for programs that update nothing."""
    return dataclasses.replace(state, opt_state=())


def check_seed(seed: int) -> None:
    """Refuse a seed that no first state derives from.

    Raises:
        InputError: `seed` is no whole number from 0 to 2**32 - 1.
    """
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole:
        raise InputError(
            f"seed={seed!r}: must be a whole number below {2**32}",
            key="value.not_whole_number",
        )
    if not 0 <= seed < 2**32:
        raise InputError(
            f"seed={seed}: must be at least 0 and below {2**32}",
            key="value.seed_out_of_range",
        )


def check_state(
    state: TrainState, shapes: TrainState, mesh: Mesh | AbstractMesh | None = None
) -> None:
    """Refuse a state that a step cannot take: one that is gone, or another step's.

    Args:
        state: The state that was given.
        shapes: Shape and dtype of every array that the step keeps.
        mesh: The step's mesh; None for any.

    Raises:
        InputError: Its arrays are gone, or it is no state; or an array is missing,
            unknown, or of another shape or dtype; or the state is on another mesh.
    """
    check_not_donated(state)
    has, its_tree = jax.tree.flatten(state)
    keeps, tree = jax.tree.flatten(shapes)
    if its_tree != tree:
        _check_paths(state, shapes)
    for at, (array, wanted) in enumerate(zip(has, keeps, strict=False)):
        dtype = getattr(array, "dtype", wanted.dtype)
        if np.shape(array) != wanted.shape or dtype != wanted.dtype:
            path, _ = jax.tree.leaves_with_path(shapes)[at]
            raise InputError(
                f"the state's {path_name(path)} is {_in_words(array)}, and this step's "
                f"is {_in_words(wanted)}: it is of another model, layout or precision; "
                f"{_OWN}",
                key="step.state_array_differs",
            )
    there = getattr(getattr(state.step, "sharding", None), "mesh", None)
    if mesh is not None and there is not None and there.shape != mesh.shape:
        raise InputError(
            f"the state lies on a mesh of {_sizes(there)}, and this step's has "
            f"{_sizes(mesh)}; {_OWN}, or restore a checkpoint of it, which any layout "
            "reads",
            key="step.state_on_other_mesh",
        )


def checked_without_optimizer(
    state: TrainState, shapes: TrainState, mesh: Mesh | AbstractMesh | None = None
) -> TrainState:
    """Return a state without optimizer state, once `check_state` has passed it."""
    _check_kind(state)
    state = without_optimizer(state)
    check_state(state, without_optimizer(shapes), mesh)
    return state


def _check_paths(state: TrainState, shapes: TrainState) -> None:
    has, keeps = _paths(state), _paths(shapes)
    missing, more = sorted(keeps - has), sorted(has - keeps)
    if missing or more:
        lacks, keeps_it = ("has no", "keeps") if missing else ("has", "does not keep")
        first, *others = missing or more
        raise InputError(
            f"the state {lacks} {first}{f' and {len(others)} more' if others else ''}, "
            f"which this step {keeps_it}; {_OWN}",
            key="step.state_tree_differs",
        )


def _in_words(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)} {np.shape(array)}"


def _sizes(mesh: Mesh | AbstractMesh) -> str:
    sizes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    return ",".join(sizes) or "one device"


def _paths(state: TrainState) -> set[str]:
    return {path_name(path) for path, _ in jax.tree.leaves_with_path(state)}


def check_not_donated(state: TrainState) -> None:
    """Refuse a state that an earlier step has taken: XLA would end the process.

    Raises:
        InputError: Its arrays are gone, or it is no `TrainState`.
    """
    _check_kind(state)
    if not any(map(_is_gone, jax.tree.leaves(state))):
        return
    leaves = jax.tree.leaves_with_path(state)
    path = next(path for path, array in leaves if _is_gone(array))
    raise InputError(
        f"the state's {path_name(path)} is gone: a step donates the state that it is "
        "given; go on with the one that it returned",
        key="step.donated_state",
    )


def _check_kind(state: TrainState) -> None:
    if not isinstance(state, TrainState):
        raise InputError(
            f"state is a {type(state).__name__}; give what step.init or an earlier "
            "step returned",
            key="step.not_a_state",
        )


def _is_gone(array: Any) -> bool:
    is_here = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    return is_here and array.is_deleted()


def split_constants(model: Model, state: TrainState) -> TrainState:
    """Return a state with its constants moved from parameters to the model's state.

    Constants are parameters of integers and booleans: never trained, and for a program
    a part of the model's state, which no gradient reaches.
    """
    trained, constants = _partition(state.params, set(model.constants))
    others = _merged(state.model_state, constants)
    return replace(state, params=trained, model_state=others)


def join_constants(model: Model, state: TrainState) -> TrainState:
    """Undo `split_constants`; leaves may be arrays, shapes or shardings."""
    others, constants = _partition(state.model_state, set(model.constants))
    return replace(state, params=_merged(state.params, constants), model_state=others)


def _merged(one: Params, other: Params) -> Params:
    """Return the union of two nested dicts that share no path."""
    if not other:
        return one
    both: Params = {}
    for tree in (one, other):
        for path, value in jax.tree.leaves_with_path(tree):
            insert(both, tuple(key.key for key in path), value)
    return both


def _partition(tree: Params, paths: set[str]) -> tuple[Params, Params]:
    """Return the leaves that are not at the paths, and those that are."""
    if not paths:
        return tree, {}
    parts: tuple[Params, Params] = ({}, {})
    for path, value in jax.tree.leaves_with_path(tree):
        keys = tuple(key.key for key in path)
        insert(parts[path_name(path) in paths], keys, value)
    return parts


def portable(state: TrainState) -> TrainState:
    """Return the state, or a tree like it, without copies that can be made again."""
    if not isinstance(state.opt_state, Mastered):
        return state
    params = _with(state.params, state.opt_state.master)
    return dataclasses.replace(state, params=params, opt_state=state.opt_state.inner)


def unported(
    state: TrainState, shapes: TrainState, shardings: TrainState
) -> TrainState:
    """Undo `portable` for a state of those shapes, which may have a master copy.

    Args:
        state: From `portable`, arrays of the dtypes and shardings of
            `portable(shapes)`.
        shapes: Shapes of the wanted state.
        shardings: Shardings of the wanted state.
    """
    if not isinstance(shapes.opt_state, Mastered):
        return state
    params = jax.tree.map(
        lambda master, shape, sharding: _rounded(
            shape.dtype, sharding, master.sharding.memory_kind == HOST_MEMORY
        )(master),
        state.params,
        shapes.params,
        shardings.params,
    )
    master = _with(shapes.opt_state.master, state.params)
    return dataclasses.replace(
        state, params=params, opt_state=Mastered(master, state.opt_state)
    )


def _with(tree: Any, other: Any) -> Any:
    """Return a tree with the leaves of another at the same paths."""
    known = dict(jax.tree.leaves_with_path(other))
    return jax.tree.map_with_path(lambda path, leaf: known.get(path, leaf), tree)


@functools.lru_cache
def _rounded(
    dtype: Any, sharding: NamedSharding, from_host: bool
) -> Callable[[jax.Array], jax.Array]:
    """Return the function that casts an array, with this sharding."""

    def rounded(array: jax.Array) -> jax.Array:
        if from_host:
            array = jax.device_put(array, jax.memory.Space.Device)
        return array.astype(dtype)

    return jax.jit(rounded, out_shardings=sharding)
