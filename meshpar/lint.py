"""Lint: what a model, its rules and a layout do to each other, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layout import Layout
from meshpar.model import (
    EXAMPLE,
    Model,
    Parameter,
    Params,
    Scope,
    is_parameter,
    spec_axes,
)
from meshpar.rule_presets import default_rules
from meshpar.rule_table import RuleError
from meshpar.rules import LogicalAxes, Rules

LARGE_BYTES = 1 << 20
"""A parameter above this size should not be whole on every device."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a layout should not do silently.

    Args:
        kind: `unknown`, `shadowed`, `repeated`, `claimed_twice`, `rank`, `dead`,
            `indivisible`, `replicated` or `idle`.
        path: The parameter, activation, logical axis or mesh axis that it is about.
        message: What is wrong and the ways out.
        bytes: Bytes per device that it costs, where it costs memory.
    """

    kind: str
    path: str
    message: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter under a layout; `bytes` are per device, `mesh_axes` per dim."""

    path: str
    shape: tuple[int, ...]
    logical_axes: LogicalAxes
    mesh_axes: tuple[str | tuple[str, ...] | None, ...]
    local_shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """Every parameter, and every finding; no findings is a clean layout."""

    findings: tuple[Finding, ...]
    parameters: tuple[ParameterRow, ...]


@dataclass(frozen=True, kw_only=True)
class _Activation:
    logical_axes: LogicalAxes
    shape: tuple[int, ...]


def lint(
    model: Model,
    layout: Layout,
    rules: Rules | Sequence[tuple[str, Any]] | None = None,
    *,
    global_batch: int | None = None,
    seq: int = 128,
    large_bytes: int = LARGE_BYTES,
) -> LintReport:
    """All parameters of a model under a layout, and all findings. Uses no devices.

    Args:
        model: The model.
        layout: The layout, with the size of every mesh axis given.
        rules: Logical axis -> mesh axes, `default_rules(layout)` when absent. Pairs
            may hold two rules for one logical axis; the second is a finding.
        global_batch: Examples in a step; one per batch shard when absent.
        seq: Tokens of an example.
        large_bytes: Parameters above this size that no mesh axis splits are findings.
    """
    shadowed: list[Finding] = []
    if rules is not None and not isinstance(rules, Rules):
        rules, shadowed = _first_of_each(rules)
    rules = rules or default_rules(layout)
    rows, row_findings = _parameter_rows(model, layout, rules)
    examples = layout.batch_shards if global_batch is None else global_batch
    activations, trace_findings = _activations(model, examples, seq)
    axes, activation_findings = _axes_of_activations(activations, layout, rules)
    used_by_parameters = {name for row in rows for name in row.logical_axes}
    used = used_by_parameters | {
        name for activation in activations for name in activation.logical_axes
    }
    return LintReport(
        findings=(
            *row_findings,
            *trace_findings,
            *activation_findings,
            *shadowed,
            *_shadowing_overrides(rules),
            *(() if trace_findings else _dead_rules(rules, used, used_by_parameters)),
            *_large_and_replicated(rows, layout, large_bytes),
            *(() if trace_findings else _idle_mesh_axes(rows, axes, layout)),
        ),
        parameters=tuple(rows),
    )


def row_of(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> ParameterRow:
    """A parameter's row; raises `RuleError` where it cannot be laid out."""
    spec = rules.stored.spec(
        parameter.stacked_axes,
        parameter.stacked_shape,
        mesh_shape=layout.mesh_shape,
        path=path,
    )
    return _row(path, parameter, spec, layout)


def _row(
    path: str, parameter: Parameter, spec: PartitionSpec, layout: Layout
) -> ParameterRow:
    sizes = layout.mesh_shape
    local = tuple(
        size // math.prod(sizes[axis] for axis in spec_axes(PartitionSpec(entry)))
        for size, entry in zip(parameter.stacked_shape, spec, strict=True)
    )
    return ParameterRow(
        path=path,
        shape=parameter.stacked_shape,
        logical_axes=parameter.stacked_axes,
        mesh_axes=tuple(spec),
        local_shape=local,
        bytes=math.prod(local) * jnp.dtype(parameter.dtype).itemsize,
    )


def _parameter_rows(
    model: Model, layout: Layout, rules: Rules
) -> tuple[list[ParameterRow], list[Finding]]:
    rows, findings = [], []
    for path, parameter in model.flat_parameters().items():
        try:
            rows.append(row_of(path, parameter, layout, rules))
        except RuleError as error:
            replicated = PartitionSpec(*(None for _ in parameter.stacked_shape))
            row = _row(path, parameter, replicated, layout)
            rows.append(row)
            findings.append(
                Finding(kind=error.kind, path=path, message=str(error), bytes=row.bytes)
            )
    return rows, findings


class _Recorder:
    """Stands in for `Rules` while a model is traced, and notes what it names."""

    def __init__(self) -> None:
        self.activations: list[_Activation] = []

    def constrain(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        self.activations.append(_Activation(logical_axes=logical_axes, shape=x.shape))
        return x

    def spec(self, logical_axes: LogicalAxes, *_: Any, **__: Any) -> PartitionSpec:
        return PartitionSpec(*(None for _ in logical_axes))


def _activations(
    model: Model, examples: int, seq: int
) -> tuple[list[_Activation], list[Finding]]:
    recorder = _Recorder()
    shape = (examples, seq)
    batch = {
        "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
        "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
        "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        EXAMPLE: jax.ShapeDtypeStruct(shape[:1], jnp.uint32),
    }
    ends, groups = model.split(
        jax.tree.map(_one_layer, model.parameters, is_leaf=is_parameter)
    )

    def once(ends: Params, groups: list[Params], batch: dict) -> Any:
        scope = Scope(rules=recorder, batch=batch)  # type: ignore[arg-type]
        x = model.embed(ends, batch, scope)
        for group, params in zip(model.groups, groups, strict=True):
            x = group.block(params, x, scope)
        return model.head(ends, x, batch, scope)

    try:
        jax.eval_shape(once, ends, groups, batch)
    except (TypeError, ValueError) as error:
        message = f"the model cannot be traced on a batch of shape {shape}: {error}"
        return [], [Finding(kind="rank", path="model", message=message)]
    unique = {(a.logical_axes, a.shape): a for a in recorder.activations}
    batch_dims = _Activation(logical_axes=("batch",), shape=(examples,))
    return [batch_dims, *unique.values()], []


def _one_layer(parameter: Parameter) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype)


def _axes_of_activations(
    activations: list[_Activation], layout: Layout, rules: Rules
) -> tuple[set[str], list[Finding]]:
    axes, findings = set(), []
    for activation in activations:
        path = f"activation {activation.logical_axes}"
        try:
            spec = rules.spec(
                activation.logical_axes,
                activation.shape,
                mesh_shape=layout.mesh_shape,
                path=path,
            )
            axes.update(spec_axes(spec))
        except RuleError as error:
            findings.append(Finding(kind=error.kind, path=path, message=str(error)))
            # One finding is enough: its mesh axes have work once it is mended.
            axes.update(_axes_asked_for(activation, rules))
    return axes, findings


def _axes_asked_for(activation: _Activation, rules: Rules) -> set[str]:
    return {
        axis
        for name in activation.logical_axes
        if name is not None
        for axis in rules.table.get(name) or ()
    }


def _first_of_each(pairs: Sequence[tuple[str, Any]]) -> tuple[Rules, list[Finding]]:
    first: dict[str, Any] = {}
    findings = []
    for logical_axis, target in pairs:
        if logical_axis in first:
            message = (
                f"logical axis {logical_axis!r} has two rules, {first[logical_axis]!r} "
                f"and {target!r}; only one can hold: remove the other"
            )
            findings.append(
                Finding(kind="shadowed", path=logical_axis, message=message)
            )
        first.setdefault(logical_axis, target)
    return Rules(first), findings


def _shadowing_overrides(rules: Rules) -> list[Finding]:
    return [
        Finding(
            kind="shadowed",
            path=logical_axis,
            message=(
                f"the parameters' rule for {logical_axis!r} is {axes or None}, the "
                "same as the rule for all arrays, so it changes nothing: remove it"
            ),
        )
        for logical_axis, axes in rules.parameters.items()
        if rules.table.get(logical_axis) == axes
    ]


def _dead_rules(
    rules: Rules, used: set[str | None], used_by_parameters: set[str | None]
) -> list[Finding]:
    dead = [(name, "no array") for name in rules.table if name not in used]
    dead += [
        (name, "no parameter")
        for name in rules.parameters
        if name not in used_by_parameters and (name in used or name not in rules.table)
    ]
    return [
        Finding(
            kind="dead",
            path=name,
            message=(
                f"the rule for logical axis {name!r} is used by {whom} of the model; "
                "remove it, or check the spelling"
            ),
        )
        for name, whom in dead
    ]


def _large_and_replicated(
    rows: list[ParameterRow], layout: Layout, large_bytes: int
) -> list[Finding]:
    splitting = {
        axis: size
        for axis, size in layout.mesh_shape.items()
        if size > 1 and axis != "data"
    }
    if not splitting:
        return []
    names = " or ".join(map(repr, splitting))
    return [
        Finding(
            kind="replicated",
            path=row.path,
            message=(
                f"{row.path}: shape {row.shape} as {row.logical_axes} is whole "
                f"on every device, {row.bytes} bytes, more than {large_bytes}; map one "
                f"of its logical axes to {names}, or raise the limit"
            ),
            bytes=row.bytes,
        )
        for row in rows
        if row.bytes > large_bytes and not any(row.mesh_axes)
    ]


def _idle_mesh_axes(
    rows: list[ParameterRow], axes: set[str], layout: Layout
) -> list[Finding]:
    busy = axes | {
        axis for row in rows for axis in spec_axes(PartitionSpec(*row.mesh_axes))
    }
    return [
        Finding(
            kind="idle",
            path=axis,
            message=(
                f"mesh axis {axis!r} of size {size} shards nothing: its devices repeat "
                f"each other's work; set {axis}=1 or map a logical axis to it"
            ),
        )
        for axis, size in layout.mesh_shape.items()
        if size > 1 and axis not in busy
    ]
