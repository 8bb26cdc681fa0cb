"""Findings of an optimizer: state that no device shares, matrices that all compute."""

from __future__ import annotations

import warnings

import optax
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.lint.findings import Finding, unsupported
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.parallel.by_owners import Owners
from meshpar.rules.rules import Rules, spec_axes
from meshpar.train.make_step import make_train_step
from meshpar.train.optimizer.mixing import mixed_parameters
from meshpar.train.optimizer_state import StateSpec, whole_state_message
from meshpar.train.step import TrainStep


def optimizer_findings(
    model: Model,
    layout: Layout,
    rules: Rules,
    optimizer: optax.GradientTransformation,
    state_spec: StateSpec | None,
) -> list[Finding]:
    """Return findings of large state that is whole on every device, and of mixed rows.

    Args:
        model: The model.
        layout: A layout that a step may have.
        rules: Its rules.
        optimizer: The optimizer.
        state_spec: As for `make_train_step`.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            step = make_train_step(
                model,
                optimizer,
                layout,
                rules=rules,
                mesh=absent_mesh(layout),
                state_spec=state_spec,
            )
    except InputError as error:
        return unsupported("optimizer", error)
    whole = [
        Finding(
            kind="replicated",
            path=path,
            message=whole_state_message(path, num_bytes),
            bytes=num_bytes,
            key="optimizer.whole_state",
        )
        for path, num_bytes in step.whole_states()
    ]
    return [*whole, *_mixed_rows(step, optimizer)]


def _mixed_rows(
    step: TrainStep, optimizer: optax.GradientTransformation
) -> list[Finding]:
    """Return a finding if an optimizer mixes the rows of split matrices."""
    placement = step.placement
    parameters = placement.model.flat_parameters()
    specs = Owners.from_placement(placement).specs
    found = []
    for path, primitive in mixed_parameters(optimizer, placement.model).items():
        dims = zip(parameters[path].stacked_axes, specs[path], strict=True)
        axes = [entry for name, entry in dims if name not in ("layers", "experts")]
        if split := spec_axes(PartitionSpec(*axes)):
            found.append((path, primitive, split))
    if not found:
        return []
    (path, primitive, split), others = found[0], len(found) - 1
    more = f" and {others} more" if others else ""
    return [
        Finding(
            kind="mixed",
            path=path,
            message=(
                f"the optimizer mixes the rows of {path}{more} by {primitive}, whose "
                f"gradients are split over {' and '.join(map(repr, split))}: devices "
                "gather each matrix, and several compute the same; for Muon take "
                "meshpar.optimizers.muon, which gives each matrix to one device"
            ),
            key="optimizer.mixes_rows",
        )
    ]
