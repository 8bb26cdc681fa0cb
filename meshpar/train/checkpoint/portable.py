"""A state that every `param_dtype` can read: parameters once, in full precision.

A master copy stands in the parameters' place: they are its values rounded to nearest,
so they can be made from it again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshpar.parallel.remat import HOST_MEMORY
from meshpar.train.optimizer_state import Mastered
from meshpar.train.state import TrainState


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
