"""What the training step refuses of rules beside a layout, for the lint to say too."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.layout import BATCH_AXES, ZERO_AXES, Layout
from meshpar.parallel.storage import split_axes_of
from meshpar.rules.rules import Rules
from meshpar.rules.spatial import SPATIAL
from meshpar.rules.table import RuleError
from meshpar.train.layout_refusals import PLAIN, zero_refusals


def rule_refusals(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Each logical axis whose rule `make_train_step` refuses, with the error."""
    if "layers" in rules.stored.table:
        error = _layers_error(rules.stored.table["layers"], layout)
        if error is not None:
            yield "layers", error
    for logical_axis, mesh_axes in rules.stored.table.items():
        if "stage" in mesh_axes and logical_axis != "layers" and layout.stage > 1:
            yield logical_axis, _stage_error(logical_axis)
    for logical_axis, mesh_axes in rules.stored.table.items():
        shared = logical_axis in ("experts", "batch") or "expert" in layout.split_axes
        if "expert" in mesh_axes and not shared and layout.expert > 1:
            yield logical_axis, _expert_error(logical_axis)
    yield from _unused_zero_keys(rules, layout)
    yield from _split_replicas(rules, layout)
    yield from _batch_rule(rules, layout)
    for logical_axis, mesh_axes in rules.table.items():
        if (
            "context" in mesh_axes
            and layout.context > 1
            and logical_axis not in SPATIAL
        ):
            yield logical_axis, _context_error(logical_axis)
        if logical_axis == "experts" and mesh_axes == ("expert",):
            continue
        for mesh_axis in mesh_axes:
            if logical_axis != "batch" and mesh_axis in _split_by(layout):
                yield logical_axis, _batch_axis_error(logical_axis, mesh_axis)


def _split_by(layout: Layout) -> tuple[str, ...]:
    """The mesh axes that split its batch."""
    if layout.expert > 1:
        return BATCH_AXES
    return tuple(axis for axis in BATCH_AXES if axis != "expert")


def _batch_rule(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    batch = rules.table.get("batch", ())
    if batch not in (BATCH_AXES, _split_by(layout)):
        error = RuleError(
            "unknown",
            f"logical axis 'batch' is mapped to {batch or None}; the training step "
            f"splits the batch over {BATCH_AXES}: map it to all (a mesh axis of "
            "size 1 costs nothing)",
            key="rules.wrong_batch_axes",
        )
        yield "batch", error


def _unused_zero_keys(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Keys of ZeRO that the rules for stored parameters leave without effect."""
    if layout.zero != 3 or "zero_axes" in zero_refusals(layout):
        return
    split, text = split_axes_of(layout, rules), repr(str(layout))
    if layout.zero_axes and set(split) != set(layout.zero_axes):
        error = RuleError(
            "dead",
            f"layout {text}: the rules split stored parameters over "
            f"{'/'.join(split) or 'nothing'}, not over "
            f"zero_axes={'/'.join(layout.zero_axes)}; leave the key out, or map a "
            "logical axis to them in Rules(..., parameters=...)",
            key="layout.zero_axes_without_effect",
        )
        yield "zero_axes", error
    for key in ("fsdp_gather", "fsdp_prefetch"):
        value = getattr(layout, key)
        if value != getattr(PLAIN, key) and not split:
            error = RuleError(
                "dead",
                f"layout {text}: {key}={value} changes nothing, as the rules split "
                "no stored parameter; leave it out, or give 'fsdp' a size",
                key=f"layout.{key}_without_effect",
            )
            yield key, error


def _split_replicas(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Local steps of replicas that have no parameters of their own."""
    for logical_axis, mesh_axes in rules.stored.table.items():
        shares = layout.sync_every > 1 and logical_axis != "batch"
        if shares and "data" in mesh_axes:
            error = RuleError(
                "claimed_twice",
                f"layout {str(layout)!r}: stored parameters are split over 'data' "
                f"along {logical_axis!r}, but sync_every={layout.sync_every} has a "
                "replica of them there each; split them over 'fsdp', or set "
                "sync_every=1",
                key="rules.split_replicas",
            )
            yield logical_axis, error


def _context_error(logical_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"mesh axis 'context' is claimed by {logical_axis!r}, but it splits the "
        f"sequence of every array of tokens by itself; map {logical_axis!r} elsewhere, "
        "or stored parameters alone by "
        f"Rules(..., parameters={{{logical_axis!r}: 'context'}})",
        key="rules.claimed_twice",
    )


def _layers_error(mesh_axes: tuple[str, ...], layout: Layout) -> RuleError | None:
    at_work = tuple(axis for axis in mesh_axes if layout.mesh_shape[axis] > 1)
    if set(mesh_axes) & (set(ZERO_AXES) - {"expert"}) or set(at_work) - {"stage"}:
        return RuleError(
            "claimed_twice",
            f"logical axis 'layers' is mapped to {mesh_axes}, but every device runs "
            "every layer of its stage: map another dim of the parameters, such as "
            "'embed', and 'layers' to 'stage' or nothing",
            key="rules.split_layers",
        )
    if layout.stage > 1 and not at_work:
        return RuleError(
            "unknown",
            f"logical axis 'layers' is mapped to {mesh_axes or None}, but "
            f"stage={layout.stage} splits the layers: pass "
            "Rules(..., parameters={'layers': 'stage'}), or set stage=1",
            key="rules.layers_not_on_stage",
        )
    return None


def _stage_error(logical_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"logical axis {logical_axis!r} is mapped to 'stage', which splits the layers; "
        "map 'layers' alone to it",
        key="rules.claimed_twice",
    )


def _expert_error(logical_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"logical axis {logical_axis!r} is mapped to 'expert', which splits the batch "
        "and the experts; map 'experts' alone to it",
        key="rules.claimed_twice",
    )


def _batch_axis_error(logical_axis: str, mesh_axis: str) -> RuleError:
    if mesh_axis == "expert":
        return _expert_error(logical_axis)
    return RuleError(
        "claimed_twice",
        f"mesh axis {mesh_axis!r} is claimed by both 'batch' and {logical_axis!r} in "
        f"activations; if {logical_axis!r} is meant for stored parameters, pass "
        f"Rules(..., parameters={{{logical_axis!r}: {mesh_axis!r}}})",
        key="rules.claimed_twice",
    )
