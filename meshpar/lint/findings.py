"""Findings of lint: dead rules, idle mesh axes, large replicated arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from meshpar.html import table
from meshpar.layout import BATCH_AXES, Layout
from meshpar.layout.requirements import layout_errors
from meshpar.lint.rows import ParameterRow
from meshpar.model.parameter_dims import ParameterDims, cuts_in_words
from meshpar.rules.rules import Rules, spec_axes
from meshpar.train.refusals import idle_message


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a layout should not do silently.

    Args:
        kind: `unknown`, `shadowed`, `repeated`, `claimed_twice`, `rank`, `dead`,
            `indivisible`, `replicated`, `idle`, `names`, `cut` or `unsupported`; of a
            note, `moved`.
        path: The parameter, activation, logical axis, mesh axis or key of the layout
            that it is about.
        message: What is wrong and the ways out.
        bytes: Bytes per device that it costs, where it costs memory.
        key: Stable name of the fault, `room.fault`, for programs (`InputError.key`).
    """

    kind: str
    path: str
    message: str
    bytes: int = 0
    key: str = ""


def findings_html(findings: Sequence[Finding]) -> str:
    """Return a table of findings."""
    rows = [(finding.kind, finding.path, finding.message) for finding in findings]
    return table(["kind", "about", "finding and ways out"], rows)


def shadowing_overrides(rules: Rules) -> list[Finding]:
    return [
        Finding(
            kind="shadowed",
            path=logical_axis,
            message=(
                f"the parameters' rule for {logical_axis!r} is {axes or None}, the "
                "same as the rule for all arrays, so it changes nothing: remove it"
            ),
            key="rules.same_for_parameters",
        )
        for logical_axis, axes in rules.parameters.items()
        if rules.table.get(logical_axis) == axes
    ]


_OF_PRESETS = {"embed", "layers"}
"""Logical axes with other rules for stored parameters in the presets."""


def dead_rules(
    rules: Rules, used: set[str | None], used_by_parameters: set[str | None]
) -> list[Finding]:
    """Return findings of rules written for this model that it does not use."""
    written = rules.table.keys() - rules.of_preset
    dead = [(name, "no array") for name in written - used]
    dead += [
        (name, "no parameter")
        for name in rules.parameters.keys() - (_OF_PRESETS & rules.of_preset)
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
            key="rules.dead",
        )
        for name, whom in sorted(dead)
    ]


def large_and_replicated(
    rows: list[ParameterRow], layout: Layout, large_bytes: int
) -> list[Finding]:
    # Only routed experts can be split over `expert`.
    of_batch = ("data", "expert") if layout.zero == 3 else BATCH_AXES
    whole = (*of_batch, "context")
    splitting = [axis for axis in _axes_at_work(layout) if axis not in whole]
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
            key="rules.replicated",
        )
        for row in rows
        if row.bytes > large_bytes and not any(row.mesh_axes)
    ]


def idle_mesh_axes(
    rows: list[ParameterRow], axes: set[str], layout: Layout
) -> list[Finding]:
    busy = axes | {
        axis for row in rows for axis in spec_axes(PartitionSpec(*row.mesh_axes))
    }
    return [
        Finding(
            kind="idle",
            path=axis,
            message=idle_message(axis, size),
            key="mesh.idle_axis",
        )
        for axis, size in _axes_at_work(layout).items()
        if axis not in busy and axis != "context"  # which splits tokens by itself
    ]


def cut_dims(dims: ParameterDims, layout: Layout, rules: Rules) -> list[Finding]:
    """Return a finding for each split dim of which plain slices take pieces.

    GSPMD moves every piece between devices, as of a projection to q, k and v in one.
    A lookup in a table that is split over its rows, and a cross-entropy of logits that
    are, are none: it adds up each device's part, as functions of this library do.
    """
    findings: dict[int, Finding] = {}
    for path, parameter, classes in zip(
        dims.paths, dims.parameters, dims.dims, strict=True
    ):
        for dim, (name, one) in enumerate(
            zip(parameter.logical_axes, classes, strict=True)
        ):
            axes = [
                axis
                for axis in (rules.table.get(name) or () if name else ())
                if layout.mesh_shape.get(axis, 1) > 1
            ]
            cuts = dims.cuts(one) if axes else []
            if not cuts or id(cuts[0]) in findings:
                continue
            where = ".".join(path)
            findings[id(cuts[0])] = Finding(
                kind="cut",
                path=where,
                message=(
                    f"{where}: dim {dim} of shape {parameter.shape}, {name!r}, is "
                    f"split over {'/'.join(axes)}, and cut into pieces or a piece "
                    f"itself, {cuts_in_words(cuts)}: every piece moves between "
                    "devices; make a parameter of each piece, put the pieces into a "
                    "dim of their own, as in (embed, 3, heads, head_dim), or name the "
                    "dims None that are cut, and those that read the pieces"
                ),
                key="model.split_dim_cut",
            )
    return list(findings.values())


def _axes_at_work(layout: Layout) -> dict[str, int]:
    # One finding is enough for a mesh axis that the training step refuses.
    refused = layout_errors(layout)
    return {
        axis: size
        for axis, size in layout.mesh_shape.items()
        if size > 1 and axis not in refused
    }
