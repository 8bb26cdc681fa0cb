"""Lint: what a model, its rules and a layout do to each other, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import optax

from meshpar.checks.sequences import context_errors
from meshpar.errors import InputError, whole_number
from meshpar.html import details, element
from meshpar.layout import BATCH_AXES, Layout
from meshpar.layout.requirements import layout_errors
from meshpar.lint import LARGE_BYTES
from meshpar.lint.findings import (
    Finding,
    ParameterRow,
    cut_dims,
    dead_rules,
    findings_html,
    idle_mesh_axes,
    large_and_replicated,
    moved_because,
    parameter_row,
    replicated_row,
    rows_html,
    shadowing_overrides,
    unsplit_axes,
    unsplit_message,
    unsupported,
)
from meshpar.lint.optimizer import optimizer_findings
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter_dims import parameter_dims
from meshpar.model.tracing import Activation, traced_activations
from meshpar.parallel.grids.space import space_errors, splits_tokens
from meshpar.parallel.parameter_specs import parameter_specs
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.parallel.remat import check_residual_names
from meshpar.parallel.sequence import token_order
from meshpar.planner.plan import gigabytes
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import (
    MeshAxes,
    RuleError,
    Rules,
    Target,
    check_rules,
    rule_axes,
    shadowed_message,
    spec_axes,
)
from meshpar.train.optimizer_state import StateSpec
from meshpar.train.refusals import (
    batch_refusal,
    experts_refusal,
    inputs_refusal,
    rule_refusals,
)


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """Every parameter, and every finding; no findings is a clean layout.

    Args:
        findings: What should be mended.
        parameters: A row each.
        notes: Small parameters that ZeRO cannot split, and what it splits along another
            dim than a rule says.
    """

    findings: tuple[Finding, ...]
    parameters: tuple[ParameterRow, ...]
    notes: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        findings = [f"{finding.kind}: {finding.message}" for finding in self.findings]
        return "\n".join([*self.note_lines, *(findings or ["no findings"])])

    @property
    def note_lines(self) -> list[str]:
        """Lines of the notes, one of each kind, with the first note in full."""
        lines = []
        for key in dict.fromkeys(note.key for note in self.notes):
            first, *others = (note for note in self.notes if note.key == key)
            more = f" (and {len(others)} more)" if others else ""
            lines.append(f"note: {first.message}{more}")
        return lines

    def _repr_html_(self) -> str:
        number, each = len(self.findings), sum(row.bytes for row in self.parameters)
        title = f"Lint: {number} finding{'' if number == 1 else 's'}"
        parts = [findings_html(self.findings)] if self.findings else []
        if self.notes:
            parts.append(details(f"{len(self.notes)} notes", findings_html(self.notes)))
        count = f"{len(self.parameters)} parameters, {gigabytes(each)} on a device"
        parts.append(details(count, rows_html(self.parameters)))
        return element(title, parts)


def lint(
    model: Model,
    layout: Layout | str,
    rules: Rules | Sequence[tuple[str, Target]] | None = None,
    *,
    global_batch: int | None = None,
    seq: int = 128,
    large_bytes: int = LARGE_BYTES,
    optimizer: optax.GradientTransformation | None = None,
    state_spec: StateSpec | None = None,
) -> LintReport:
    """Check a model under a layout: all parameters, all findings. Uses no devices.

    Args:
        model: The model.
        layout: The layout or its text, with the size of every mesh axis given.
        rules: Logical axis -> mesh axes, `default_rules(layout)` when absent. Pairs
            may hold two rules for one logical axis; the second is a finding.
        global_batch: Examples in a step; one per batch shard when absent.
        seq: Tokens of an example, and every other size that the inputs leave open.
        large_bytes: Parameters above this size that no mesh axis splits are findings.
        optimizer: The optimizer. Large state that is whole on every device is a
            finding, and so is what it does to the rows of split matrices other than by
            owners (`meshpar.optimizers`); None for no check.
        state_spec: As for `make_train_step`.

    Raises:
        InputError: `model` is no model, or the layout cannot be read.
        RuleError: `rules` are pairs that are no rules, such as an unknown mesh axis.

    Example:
        >>> from meshpar.models.presets import build
        >>> lint(build("test"), "data=2,tensor=2").findings
        ()
    """
    check_model(model)
    layout = Layout.of(layout)
    if global_batch is not None:
        whole_number("global_batch", global_batch, least=0)
    whole_number("seq", seq)
    whole_number("large_bytes", large_bytes, least=0)
    rules, shadowed = _read_rules(rules, layout)
    stored, stage_findings = _stored(model, layout)
    # One finding is enough for stages that cannot be.
    sized = replace(layout, stage=1) if stage_findings else layout
    rows, row_findings = _parameter_rows(stored, sized, rules)
    unsplit, notes = _states(stored, sized, rules, large_bytes)
    examples, batch_findings = _examples(layout, global_batch)
    splits = splits_tokens(model, layout, rules)
    order = token_order(layout) if splits else None
    here = seq if order is None else order.padded(seq) // order.num_ranks
    activations, trace_findings = _activations(model, examples, here)
    axes, activation_findings = _activation_axes(activations, layout, rules)
    names = {name for row in rows for name in row.logical_axes}
    used = names.union(*(activation.logical_axes for activation in activations))
    unmatched = [
        Finding(kind="names", path=path, message=problem, key="model.unmatched_name")
        for path, problem in model.name_problems.items()
    ]
    return LintReport(
        findings=(
            *_refusals(model, layout, rules, seq),
            *stage_findings,
            *batch_findings,
            *row_findings,
            *unmatched,
            *(() if trace_findings else _cut(model, layout, rules, examples, here)),
            *unsplit,
            *trace_findings,
            *activation_findings,
            *shadowed,
            *shadowing_overrides(rules),
            *(() if trace_findings else dead_rules(rules, used, names)),
            *large_and_replicated(rows, sized, large_bytes),
            *(
                ()
                if optimizer is None or layout_errors(layout)
                else optimizer_findings(model, layout, rules, optimizer, state_spec)
            ),
            *(() if trace_findings else idle_mesh_axes(rows, axes, sized)),
        ),
        parameters=tuple(rows),
        notes=tuple(notes),
    )


def _cut(
    model: Model, layout: Layout, rules: Rules, examples: int, seq: int
) -> list[Finding]:
    """Return findings of split dims that a model's own functions cut into pieces."""
    whole = (*BATCH_AXES, "context", "stage")
    splits = any(n > 1 for axis, n in layout.mesh_shape.items() if axis not in whole)
    builders = [getattr(one, "func", one) for one in model.modules.values()]
    from_library = builders and all(
        getattr(one, "__module__", "").startswith("meshpar.models.") for one in builders
    )
    if not splits or from_library:
        return []
    return cut_dims(parameter_dims(model, examples, seq), layout, rules)


def _read_rules(
    rules: Rules | Sequence[tuple[str, Target]] | None, layout: Layout
) -> tuple[Rules, list[Finding]]:
    """Return the rules, and findings of those that can never apply."""
    if rules is None:
        return default_rules(layout), []
    if isinstance(rules, list | tuple):
        return _first_rules(rules)
    check_rules(rules)
    return cast(Rules, rules), []


def _stored(model: Model, layout: Layout) -> tuple[Model, list[Finding]]:
    """Return the model as a step stores it, and a finding if stages do not fit."""
    if layout_errors(layout):
        return model, []
    try:
        return arranged_for(model, layout), []
    except InputError as error:
        return model, unsupported("stage", error)


def _examples(layout: Layout, global_batch: int | None) -> tuple[int, list[Finding]]:
    """Return the examples of one microbatch, and a finding if they do not divide."""
    if global_batch is None or layout.microbatches == 1:
        return layout.batch_shards if global_batch is None else global_batch, []
    refused = batch_refusal(layout, global_batch)
    if refused is None:
        return global_batch // layout.microbatches, []
    finding = Finding(
        kind="indivisible",
        path="microbatches",
        message=str(refused),
        key=refused.key,
    )
    return layout.batch_shards, [finding]


def _parameter_rows(
    model: Model, layout: Layout, rules: Rules
) -> tuple[list[ParameterRow], list[Finding]]:
    rows, findings = [], []
    for path, parameter in model.flat_parameters().items():
        try:
            rows.append(parameter_row(path, parameter, layout, rules))
        except RuleError as error:
            row = replicated_row(path, parameter, layout.param_dtype)
            rows.append(row)
            findings.append(
                Finding(
                    kind=error.kind,
                    path=path,
                    message=str(error),
                    bytes=row.bytes,
                    key=error.key,
                )
            )
    return rows, findings


def _states(
    model: Model, layout: Layout, rules: Rules, large_bytes: int
) -> tuple[list[Finding], list[Finding]]:
    """Return findings of states that ZeRO cannot split, and notes of moved splits."""
    findings: list[Finding] = []
    notes: list[Finding] = []
    for path, parameter in model.flat_parameters().items():
        try:
            spec = parameter_specs(path, parameter, layout, rules)["spec"]
        except RuleError:
            continue  # a finding of its own
        size = replicated_row(path, parameter, "fp32").bytes  # as states are
        whole = unsplit_axes(layout, rules, spec)
        if whole:
            message = unsplit_message(path, parameter, layout, whole)
            finding = Finding(
                kind="replicated",
                path=path,
                message=message,
                bytes=size,
                key="layout.unsplit_states",
            )
            (findings if size > large_bytes else notes).append(finding)
        why = moved_because(parameter, layout, rules, spec)
        if why is not None:
            shape = f"{path}: shape {parameter.stacked_shape}"
            message = f"{shape} is split as {tuple(spec)}: {why}"
            notes.append(
                Finding(
                    kind="moved", path=path, message=message, key="layout.moved_split"
                )
            )
    return findings, notes


def _activations(
    model: Model, examples: int, seq: int
) -> tuple[tuple[Activation, ...], list[Finding]]:
    try:
        return traced_activations(model, examples, seq), []
    except InputError as error:
        message = str(error)
        return (), [Finding(kind="rank", path="model", message=message, key=error.key)]


def _activation_axes(
    activations: Iterable[Activation], layout: Layout, rules: Rules
) -> tuple[set[str], list[Finding]]:
    axes: set[str] = set()
    findings: list[Finding] = []
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
            findings.append(
                Finding(kind=error.kind, path=path, message=str(error), key=error.key)
            )
            # One finding is enough: its mesh axes have work once it is mended.
            axes.update(_axes_asked_for(activation, rules))
    return axes, findings


def _axes_asked_for(activation: Activation, rules: Rules) -> set[str]:
    return {
        axis
        for name in activation.logical_axes
        if name is not None
        for axis in rules.table.get(name) or ()
    }


def _first_rules(
    pairs: Sequence[tuple[str, Target]],
) -> tuple[Rules, list[Finding]]:
    first: dict[str, MeshAxes] = {}
    findings = []
    for logical_axis, target in pairs:
        axes = rule_axes(target)
        if logical_axis in first:
            message = shadowed_message(logical_axis, first, axes)
            findings.append(
                Finding(
                    kind="shadowed",
                    path=logical_axis,
                    message=message,
                    key="rules.shadowed",
                )
            )
        first.setdefault(logical_axis, axes)
    return Rules(first), findings


def _refusals(model: Model, layout: Layout, rules: Rules, seq: int) -> list[Finding]:
    """Return a finding for each reason to refuse the layout, alone or of this model."""
    return [
        *(
            finding
            for key, error in layout_errors(layout).items()
            for finding in unsupported(key, error)
        ),
        *(
            Finding(
                kind=error.kind, path=logical_axis, message=str(error), key=error.key
            )
            for logical_axis, error in rule_refusals(rules, layout)
        ),
        *unsupported("expert", experts_refusal(model, layout)),
        *unsupported("inputs", inputs_refusal(model, layout)),
        *_unknown_residuals(model, layout, seq),
        *unsupported("context", *context_errors(model, layout, rules, seq)),
        *unsupported("space", *space_errors(model, layout, rules)),
    ]


def _unknown_residuals(model: Model, layout: Layout, seq: int) -> list[Finding]:
    try:
        check_residual_names(model, layout.remat, seq)
    except InputError as error:
        message = str(error)
        return [Finding(kind="unknown", path="remat", message=message, key=error.key)]
    return []
