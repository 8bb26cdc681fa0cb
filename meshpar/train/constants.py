"""Parameters of integers and booleans: among a state's parameters, but never trained.

To a program they are part of the model's state, which no gradient reaches.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.rules.sharding import insert, path_name
from meshpar.train.state import TrainState


def take_out(model: Model, state: TrainState) -> TrainState:
    """A state with its constants among the model's state."""
    trained, constants = _parted(state.params, set(model.constants))
    others = merged(state.model_state, constants)
    return replace(state, params=trained, model_state=others)


def put_in(model: Model, state: TrainState) -> TrainState:
    """Undoes `take_out`; the arrays may be anything, shapes and shardings too."""
    others, constants = _parted(state.model_state, set(model.constants))
    return replace(state, params=merged(state.params, constants), model_state=others)


def merged(one: Params, other: Params) -> Params:
    """The arrays of two nested dicts that share no path."""
    if not other:
        return one
    both: Params = {}
    for tree in (one, other):
        for path, value in jax.tree.leaves_with_path(tree):
            insert(both, tuple(key.key for key in path), value)
    return both


def _parted(tree: Params, paths: set[str]) -> tuple[Params, Params]:
    """What is not at the paths, and what is."""
    if not paths:
        return tree, {}
    parts: tuple[Params, Params] = ({}, {})
    for path, value in jax.tree.leaves_with_path(tree):
        keys = tuple(key.key for key in path)
        insert(parts[path_name(path) in paths], keys, value)
    return parts
