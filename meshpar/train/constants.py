"""Parameters of integers and booleans: among a state's parameters, but never trained.

To a program they are part of the model's state, which no gradient reaches.
"""

from __future__ import annotations

import jax

from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.rules.sharding import insert, path_name


def take_out(model: Model, params: Params, state: Params) -> tuple[Params, Params]:
    """(Parameters and constants, other state) -> (parameters, all state)."""
    trained, constants = _parted(params, set(model.constants))
    return trained, merged(state, constants)


def put_in(model: Model, params: Params, state: Params) -> tuple[Params, Params]:
    """Undoes `take_out`; trees may be of anything, shapes and shardings too."""
    others, constants = _parted(state, set(model.constants))
    return merged(params, constants), others


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
