"""Parameters under a layout, and findings: dead rules, idle mesh axes, whole arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.html import table
from meshpar.layout import BATCH_AXES, Layout
from meshpar.layout.requirements import layout_errors
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter
from meshpar.model.parameter_dims import ParameterDims, cuts_in_words
from meshpar.parallel.parameter_specs import (
    parameter_specs,
    ruled_dims,
    zero_axes_in,
    zero_split_axes,
)
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES
from meshpar.planner.plan import gigabytes
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import LogicalAxes, Rules, entry_axes, spec_axes
from meshpar.train.refusals import idle_message


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter under a layout; `bytes` are per device, `mesh_axes` per dim."""

    path: str
    shape: tuple[int, ...]
    logical_axes: LogicalAxes
    mesh_axes: tuple[str | tuple[str, ...] | None, ...]
    local_shape: tuple[int, ...]
    bytes: int

    def split_text(self, mesh_axes: tuple[str | tuple[str, ...] | None, ...]) -> str:
        """Return the dims that mesh axes split, such as `embed: fsdp, heads: tensor`.

        Args:
            mesh_axes: Mesh axes of each dim: the parameter's, or those of its state.
        """
        named = [
            f"{name or dim}: {'+'.join(entry_axes(entry))}"
            for dim, (name, entry) in enumerate(
                zip(self.logical_axes, mesh_axes, strict=True)
            )
            if entry
        ]
        return ", ".join(named) or "nothing"


def parameter_row(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> ParameterRow:
    """Return a parameter's row; raise `RuleError` if it cannot be laid out."""
    spec = parameter_specs(path, parameter, layout, rules)["spec"]
    return _row(path, parameter, spec, layout.mesh_shape, layout.param_dtype)


def replicated_row(path: str, parameter: Parameter, param_dtype: str) -> ParameterRow:
    """Return the row of a parameter that is whole on every device."""
    whole = PartitionSpec(*(None for _ in parameter.stacked_shape))
    return _row(path, parameter, whole, {}, param_dtype)


def unsplit_axes(layout: Layout, rules: Rules, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes of ZeRO that do not split optimizer states with this spec."""
    wanted = zero_split_axes(layout, rules)
    return tuple(axis for axis in wanted if axis not in spec_axes(spec))


def unsplit_message(
    path: str, parameter: Parameter, layout: Layout, mesh_axes: tuple[str, ...]
) -> str:
    """Return why a parameter's states are whole on the devices of some mesh axes."""
    sizes = " and ".join(f"{axis}={layout.mesh_shape[axis]}" for axis in mesh_axes)
    return (
        f"{path}: no dim of shape {parameter.stacked_shape} is left for {sizes}: each "
        "is split already or does not divide, so its states are whole on each of those "
        "devices; pad a dim, or take other sizes"
    )


def moved_because(
    parameter: Parameter, layout: Layout, rules: Rules, spec: PartitionSpec
) -> str | None:
    """Return why ZeRO splits another dim than a rule says; None if it does not."""
    ruled = ruled_dims(parameter, rules)
    split = [
        dim
        for dim, entry in enumerate(spec)
        if zero_axes_in(parameter.stacked_axes[dim], entry_axes(entry))
    ]
    if not split or set(ruled) & set(split):
        return None
    if ruled:
        return f"{parameter.stacked_axes[ruled[0]]!r} does not divide"
    if layout.zero != 3:  # no rule is for states alone
        return None
    axes = sorted({axis for dim in split for axis in entry_axes(spec[dim])})
    return f"no rule maps a dim to {' or '.join(map(repr, axes))}, so ZeRO chose one"


def _row(
    path: str,
    parameter: Parameter,
    spec: PartitionSpec,
    sizes: Mapping[str, int],
    param_dtype: str,
) -> ParameterRow:
    local = tuple(
        size // math.prod(sizes[axis] for axis in entry_axes(entry))
        for size, entry in zip(parameter.stacked_shape, spec, strict=True)
    )
    return ParameterRow(
        path=path,
        shape=parameter.stacked_shape,
        logical_axes=parameter.stacked_axes,
        mesh_axes=tuple(spec),
        local_shape=local,
        bytes=math.prod(local) * jnp.dtype(PARAM_DTYPES[param_dtype]).itemsize,
    )


def rows_html(rows: Sequence[ParameterRow]) -> str:
    """Return a table of parameters: shape, dims that are split, a device's shard."""
    return table(
        ["parameter", "shape", "split over", "shard", "on a device"],
        [
            (
                row.path,
                " x ".join(map(str, row.shape)),
                row.split_text(row.mesh_axes),
                " x ".join(map(str, row.local_shape)),
                gigabytes(row.bytes),
            )
            for row in rows
        ],
    )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A parameter cut into shards, numbered row-major over its dims.

    Args:
        row: Its shapes, mesh axes and bytes, as `meshpar lint` has them.
        state_mesh_axes: Mesh axes of each dim of the optimizer's state of it.
        counts: Parts of each dim.
        of_device: The shard of each device, devices numbered row-major over the mesh.
        places: The layer at each place of a leading `layers` dim, -1 for none; ()
            where there is no such dim.
    """

    row: ParameterRow
    state_mesh_axes: tuple[str | tuple[str, ...] | None, ...]
    counts: tuple[int, ...]
    of_device: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def number(self) -> int:
        """Shards in all; 1 where every device has the whole."""
        return math.prod(self.counts)

    @property
    def copies(self) -> int:
        """Devices that hold the same shard."""
        return len(self.of_device) // self.number

    def slices(self, shard: int) -> tuple[slice, ...]:
        """Return the slice of every dim that a shard holds."""
        index = np.unravel_index(shard, self.counts)
        return tuple(
            slice(int(at) * size, (int(at) + 1) * size)
            for at, size in zip(index, self.row.local_shape, strict=True)
        )


def parameter_shards(
    model: Model, layout: Layout, rules: Rules | None = None
) -> tuple[Shards, ...]:
    """Return every parameter's shards as a training step stores them between steps.

    Args:
        model: The model.
        layout: The size of every mesh axis, and how a step runs.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.

    Raises:
        InputError: The layers cannot be cut into stages.
        RuleError: A parameter cannot be laid out.

    Example:
        >>> from meshpar.models.presets import build
        >>> head = parameter_shards(build("tiny"), Layout(data=2, tensor=2))[-1]
        >>> head.row.mesh_axes, head.of_device, head.slices(1)[0]
        (('tensor', None), (0, 1, 0, 1), slice(128, 256, None))
    """
    rules = rules or default_rules(layout)
    stored = arranged_for(model, layout).flat_parameters()
    found = []
    for path, parameter in stored.items():
        row = parameter_row(path, parameter, layout, rules)
        state = parameter_specs(path, parameter, layout, rules)["spec"]
        entries = [entry_axes(entry) for entry in row.mesh_axes]
        shape = layout.mesh_shape
        found.append(
            Shards(
                row=row,
                state_mesh_axes=tuple(state),
                counts=tuple(
                    math.prod(shape[axis] for axis in axes) for axes in entries
                ),
                of_device=_shard_by_device(entries, shape),
                places=parameter.places,
            )
        )
    return tuple(found)


def _shard_by_device(
    entries: Sequence[Sequence[str]], shape: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shard of each device, row-major over dims and over their mesh axes."""
    position = dict(zip(shape, np.indices(tuple(shape.values())), strict=True))
    shard = np.zeros(tuple(shape.values()), int)
    for axis in (axis for axes in entries for axis in axes):
        shard = shard * shape[axis] + position[axis]
    return tuple(map(int, shard.ravel()))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a layout should not do silently.

    Args:
        kind: `unknown`, `shadowed`, `repeated`, `claimed_twice`, `rank`, `dead`,
            `indivisible`, `replicated`, `mixed`, `idle`, `names`, `cut` or
            `unsupported`; of a note, `moved`.
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


def unsupported(path: str, *errors: InputError | None) -> list[Finding]:
    """Return a finding for each error that is not None."""
    return [
        Finding(kind="unsupported", path=path, message=str(error), key=error.key)
        for error in errors
        if error is not None
    ]


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
    whole = {*BATCH_AXES, "context"}
    if layout.zero == 3:
        whole.difference_update(layout.split_axes)
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
