"""Mesh axes over which nothing is split: their devices repeat each other's work."""

from __future__ import annotations

import warnings
from operator import attrgetter

import jax
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.model.activations import traced_activations
from meshpar.model.contract import Model
from meshpar.parallel.placement import Placement
from meshpar.rules.rules import Rules, spec_axes


class IdleMeshAxisWarning(UserWarning):
    """A mesh axis of several devices splits neither a parameter nor an activation."""


def idle_message(axis: str, size: int) -> str:
    """Say that a mesh axis splits nothing, and the ways out."""
    return (
        f"mesh axis {axis!r} of size {size} shards nothing: its devices repeat each "
        f"other's work; set {axis}=1 or map a logical axis to it"
    )


def warn_of_idle_tensor(model: Model, placement: Placement) -> None:
    """Warn where a layout has `tensor`, and the model names nothing that it splits.

    Every other mesh axis splits examples, tokens, layers or experts by itself.
    """
    size = placement.layout.tensor
    if size == 1 or _splits_parameters(placement):
        return
    if _splits_inputs(model, placement.rules):
        return
    if _splits_activations(model, placement.rules):
        return
    warnings.warn(idle_message("tensor", size), IdleMeshAxisWarning, stacklevel=3)


def _splits_parameters(placement: Placement) -> bool:
    specs = jax.tree.leaves(
        placement.specs(attrgetter("spec")),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return any("tensor" in spec_axes(spec) for spec in specs)


def _splits_inputs(model: Model, rules: Rules) -> bool:
    names = {name for one in model.known_inputs.values() for name in one.logical_axes}
    return any("tensor" in (rules.table.get(name) or ()) for name in names if name)


def _splits_activations(model: Model, rules: Rules) -> bool:
    try:
        activations = traced_activations(model, 1, 8)
    except (InputError, RuntimeError):
        return True  # Unknown: it cannot be traced, or names mesh axes of its own.
    names = {name for activation in activations for name in activation.logical_axes}
    return any("tensor" in (rules.table.get(name) or ()) for name in names if name)
