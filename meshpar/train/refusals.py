"""What the training step refuses of a layout and its rules, for the lint to say too."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.layout import BATCH_AXES, Layout
from meshpar.parallel.placement import is_pipelined
from meshpar.rule_table import RuleError
from meshpar.rules import Rules

_PLAIN = Layout()
_OPTION_OF = {
    "schedule": "stage",
    "chunks": "stage",
    "splits": "stage",
    "execution": "stage",
    "attention": "context",
}
"""Keys of a layout that mean something on one mesh axis only."""


def layout_refusals(layout: Layout) -> dict[str, str]:
    """Key of a layout -> why `make_train_step` refuses the value it has."""
    refusals = {
        name: f"layout {str(layout)!r}: make_train_step lays out data, fsdp, stage and "
        f"tensor; {name}={getattr(layout, name)} is not supported: set {name}=1"
        for name in ("context", "expert")
        if getattr(layout, name) != 1
    }
    for name, mesh_axis in _OPTION_OF.items():
        value = getattr(layout, name)
        if value != getattr(_PLAIN, name) and getattr(layout, mesh_axis) == 1:
            refusals[name] = (
                f"layout {str(layout)!r}: {name} changes nothing while "
                f"{mesh_axis}=1; leave it out, or give {mesh_axis!r} a size"
            )
    if layout.execution != "uniform" and "execution" not in refusals:
        refusals["execution"] = (
            f"layout {str(layout)!r}: execution={layout.execution} is not supported; "
            "leave it out: all ranks run the same instructions every tick"
        )
    names = layout.residual_names
    if names is not None and names.offload and is_pipelined(layout):
        refusals["remat"] = (
            f"layout {str(layout)!r}: remat=offload is not supported where "
            "microbatches wait in slots on the device; write remat=save:..., or set "
            "stage=1 and microbatches=1"
        )
    if layout.zero != 3:
        refusals["zero"] = (
            f"layout {str(layout)!r}: zero={layout.zero} is not supported; 'fsdp' "
            "splits parameters, gradients and optimizer state alike (zero=3), 'data' "
            "none"
        )
    return refusals


def offload_refusal(layout: Layout, platform: str) -> str | None:
    """Why a kind of device cannot move residuals to the host; None if it can."""
    names = layout.residual_names
    if names is None or not names.offload or platform != "cpu":
        return None
    return (
        f"layout {str(layout)!r}: a CPU's memory is the host's own, so remat=offload "
        f"would move nothing; write remat=save:{'/'.join(names.every)}"
    )


def rule_refusals(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Each logical axis whose rule `make_train_step` refuses, with the error."""
    if "layers" in rules.stored.table:
        error = _layers_error(rules.stored.table["layers"], layout)
        if error is not None:
            yield "layers", error
    for logical_axis, mesh_axes in rules.stored.table.items():
        if "stage" in mesh_axes and logical_axis != "layers" and layout.stage > 1:
            yield logical_axis, _stage_error(logical_axis)
    batch = rules.table.get("batch", ())
    if batch != BATCH_AXES:
        yield (
            "batch",
            RuleError(
                "unknown",
                f"logical axis 'batch' is mapped to {batch or None}; the training step "
                f"splits the batch over {BATCH_AXES}: map it to both (a mesh axis of "
                "size 1 costs nothing)",
            ),
        )
    for logical_axis, mesh_axes in rules.table.items():
        for mesh_axis in mesh_axes:
            if logical_axis != "batch" and mesh_axis in BATCH_AXES:
                yield logical_axis, _batch_axis_error(logical_axis, mesh_axis)


def batch_refusal(
    layout: Layout,
    num_examples: int,
    name: str = "tokens",
    microbatches: int | None = None,
) -> str | None:
    """Why a global batch of that size does not suit a layout; None if it does.

    `microbatches` counts instead of the layout's own, where it is given.
    """
    microbatches = microbatches or layout.microbatches
    if num_examples % (layout.batch_shards * microbatches) == 0:
        return None
    times = f" x microbatches={microbatches}"
    return (
        f"batch[{name!r}] has {num_examples} examples, which do not divide over "
        f"{layout.batch_shards} devices of data={layout.data},fsdp={layout.fsdp}"
        f"{times if microbatches > 1 else ''}; pad with examples of weight 0, "
        "or change the global batch"
    )


def _layers_error(mesh_axes: tuple[str, ...], layout: Layout) -> RuleError | None:
    at_work = tuple(axis for axis in mesh_axes if layout.mesh_shape[axis] > 1)
    if set(mesh_axes) & set(BATCH_AXES) or set(at_work) - {"stage"}:
        return RuleError(
            "claimed_twice",
            f"logical axis 'layers' is mapped to {mesh_axes}, but every device runs "
            "every layer of its stage: map another dim of the parameters, such as "
            "'embed', and 'layers' to 'stage' or nothing",
        )
    if layout.stage > 1 and not at_work:
        return RuleError(
            "unknown",
            f"logical axis 'layers' is mapped to {mesh_axes or None}, but "
            f"stage={layout.stage} splits the layers: pass "
            "Rules(..., parameters={'layers': 'stage'}), or set stage=1",
        )
    return None


def _stage_error(logical_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"logical axis {logical_axis!r} is mapped to 'stage', which splits the layers; "
        "map 'layers' alone to it",
    )


def _batch_axis_error(logical_axis: str, mesh_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"mesh axis {mesh_axis!r} is claimed by both 'batch' and {logical_axis!r} in "
        f"activations; if {logical_axis!r} is meant for stored parameters, pass "
        f"Rules(..., parameters={{{logical_axis!r}: {mesh_axis!r}}})",
    )
