"""What the training step refuses of a layout and its rules, for the lint to say too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from numbers import Real
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, ZERO_AXES, Layout
from meshpar.mesh import platform_of
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import flat
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.parallel.placement import DTYPES
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.parallel.storage import split_axes_of
from meshpar.rules.rules import Rules
from meshpar.rules.spatial import SPATIAL
from meshpar.rules.table import RuleError
from meshpar.train.layout_refusals import PLAIN, layout_refusals, zero_refusals


def refuse(
    layout: Layout,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    gradient_dtype: str,
    max_grad_norm: float | None,
) -> None:
    """Refuses what `make_train_step` cannot make a step of.

    Raises:
        InputError: A value of the layout or an option is not supported, or the mesh is
            not the layout's.
        RuleError: A rule is not.
    """
    if dict(mesh.shape) != layout.mesh_shape:
        raise InputError(
            f"layout {str(layout)!r} has mesh axes {layout.mesh_shape}, but the mesh "
            f"has {dict(mesh.shape)}; make it with make_mesh(layout)"
        )
    for message in layout_refusals(layout).values():
        raise InputError(message)
    if layout.optimizer_memory == "host" and isinstance(mesh, Mesh):
        _check_host_memory(layout, mesh)
    refused = offload_refusal(layout, platform_of(mesh))
    if refused is not None and isinstance(mesh, Mesh):
        raise InputError(refused)
    if gradient_dtype not in DTYPES:
        raise InputError(
            f"gradient_dtype={gradient_dtype!r}: must be one of {', '.join(DTYPES)}"
        )
    limited = max_grad_norm is not None
    if limited and not (isinstance(max_grad_norm, Real) and max_grad_norm > 0):
        raise InputError(
            f"max_grad_norm={max_grad_norm!r}: must be positive, or None for no limit"
        )
    for _, error in rule_refusals(rules, layout):
        raise error


def _check_host_memory(layout: Layout, mesh: Mesh) -> None:
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise InputError(
            f"layout {str(layout)!r}: optimizer_memory=host needs devices with memory "
            f"{HOST_MEMORY!r}; {device.device_kind} has {', '.join(kinds)}: leave it "
            "out"
        )


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
    for logical_axis, mesh_axes in rules.stored.table.items():
        shared = logical_axis in ("experts", "batch") or "expert" in layout.split_axes
        if "expert" in mesh_axes and not shared and layout.expert > 1:
            yield logical_axis, _expert_error(logical_axis)
    yield from _unused_zero_keys(rules, layout)
    yield from _split_replicas(rules, layout)
    batch = rules.table.get("batch", ())
    without_expert = tuple(axis for axis in BATCH_AXES if axis != "expert")
    if batch != BATCH_AXES and (layout.expert > 1 or batch != without_expert):
        yield (
            "batch",
            RuleError(
                "unknown",
                f"logical axis 'batch' is mapped to {batch or None}; the training step "
                f"splits the batch over {BATCH_AXES}: map it to all (a mesh axis of "
                "size 1 costs nothing)",
            ),
        )
    splits = BATCH_AXES if layout.expert > 1 else without_expert
    for logical_axis, mesh_axes in rules.table.items():
        in_space = logical_axis in SPATIAL
        if "context" in mesh_axes and layout.context > 1 and not in_space:
            yield (
                logical_axis,
                RuleError(
                    "claimed_twice",
                    f"mesh axis 'context' is claimed by {logical_axis!r}, but it "
                    "splits the sequence of every array of tokens by itself; map "
                    f"{logical_axis!r} elsewhere, or stored parameters alone by "
                    f"Rules(..., parameters={{{logical_axis!r}: 'context'}})",
                ),
            )
        if logical_axis == "experts" and mesh_axes == ("expert",):
            continue
        for mesh_axis in mesh_axes:
            if logical_axis != "batch" and mesh_axis in splits:
                yield logical_axis, _batch_axis_error(logical_axis, mesh_axis)


def inputs_refusal(model: Model, layout: Layout) -> str | None:
    """Why a layout does not suit an input that has a gradient; None if it does."""
    names = [name for name, one in model.known_inputs.items() if one.has_gradient]
    if not names or (layout.sync_every == 1 and layout.context == 1):
        return None
    return (
        f"layout {str(layout)!r}: the gradient of input {names[0]!r} is found once a "
        f"step and for whole sequences, but sync_every={layout.sync_every} and "
        f"context={layout.context}; leave sync_every and context out"
    )


def experts_refusal(model: Model, layout: Layout) -> str | None:
    """Why a layout's `expert` does not suit a model; None if it does.

    Raises:
        InputError: A model with experts cannot be traced on a batch of one token.
    """
    if layout.expert == 1:
        return None
    asked = f"layout {str(layout)!r}: expert={layout.expert} splits experts, but"
    parameters = model.flat_parameters().values()
    if not any("experts" in one.logical_axes for one in parameters):
        return (
            f"{asked} no parameter of the model has the logical axis 'experts'; set "
            "expert=1, and give 'data' or 'fsdp' its devices"
        )
    silent = _sends_no_tokens(model)
    if silent is not None:
        return (
            f"{asked} block group {silent!r} sends no tokens to its experts, so that "
            "each would see its device's experts alone; call "
            "meshpar.parallel.expert.experts.routed_mlp, or set expert=1"
        )
    return None


def _sends_no_tokens(model: Model) -> str | None:
    """The first group of blocks with experts that sends them no tokens, if any."""
    sent: list[str] = []
    sends: dict[str, bool] = {}

    def noted(group: BlockGroup) -> BlockGroup:
        def block(params: Any, x: Any, scope: Any) -> Any:
            before = len(sent)
            found = group.block(params, x, scope)
            sends[group.name] = len(sent) > before
            return found

        return replace(group, block=block)

    watched = replace(model, groups=tuple(map(noted, model.groups)))
    with tracing("whether a block sends tokens to its experts cannot be found"):
        batch = traced_batch(model, 1, 1)
        once, *shapes = traced_forward(watched, batch, exchanges=sent)
        jax.eval_shape(once, *shapes)
    for group in model.groups:
        own = flat(model.parameters[group.name]).values()
        has_experts = any("experts" in one.logical_axes for one in own)
        if has_experts and not sends[group.name]:
            return group.name
    return None


def refuse_schedule(layout: Layout) -> None:
    """Refuses a layout that a schedule of one's own is given beside.

    Raises:
        InputError: It names a schedule itself, or has no stages.
    """
    if layout.schedule != PLAIN.schedule:
        raise InputError(
            f"layout {str(layout)!r} names schedule={layout.schedule}, but a schedule "
            "is given beside it; leave one of them out"
        )
    if layout.stage == 1:
        raise InputError(
            f"layout {str(layout)!r} has stage=1, but a schedule is given beside it; "
            "leave it out, or give 'stage' a size"
        )


def batch_refusal(
    layout: Layout,
    num_examples: int,
    name: str = "",
    microbatches: int | None = None,
) -> str | None:
    """Why a global batch of that size does not suit a layout; None if it does.

    `microbatches` counts instead of the layout's own, where it is given.
    """
    microbatches = microbatches or layout.microbatches
    if num_examples % (layout.batch_shards * microbatches) == 0:
        return None
    times = f" x microbatches={microbatches}"
    what = f"batch[{name!r}]" if name else "the batch"
    return (
        f"{what} has {num_examples} examples, which do not divide over "
        f"{layout.batch_shards} devices of data={layout.data},fsdp={layout.fsdp}"
        f"{f',expert={layout.expert}' if layout.expert > 1 else ''}"
        f"{times if microbatches > 1 else ''}; pad with examples of weight 0, "
        "or change the global batch"
    )


def _unused_zero_keys(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Keys of ZeRO that the rules for stored parameters leave without effect."""
    if layout.zero != 3 or "zero_axes" in zero_refusals(layout):
        return
    split, text = split_axes_of(layout, rules), repr(str(layout))
    if layout.zero_axes and set(split) != set(layout.zero_axes):
        yield (
            "zero_axes",
            RuleError(
                "dead",
                f"layout {text}: the rules split stored parameters over "
                f"{'/'.join(split) or 'nothing'}, not over "
                f"zero_axes={'/'.join(layout.zero_axes)}; leave the key out, or map a "
                "logical axis to them in Rules(..., parameters=...)",
            ),
        )
    for key in ("fsdp_gather", "fsdp_prefetch"):
        value = getattr(layout, key)
        if value != getattr(PLAIN, key) and not split:
            yield (
                key,
                RuleError(
                    "dead",
                    f"layout {text}: {key}={value} changes nothing, as the rules split "
                    "no stored parameter; leave it out, or give 'fsdp' a size",
                ),
            )


def _split_replicas(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Local steps of replicas that have no parameters of their own."""
    for logical_axis, mesh_axes in rules.stored.table.items():
        shares = layout.sync_every > 1 and logical_axis != "batch"
        if shares and "data" in mesh_axes:
            yield (
                logical_axis,
                RuleError(
                    "claimed_twice",
                    f"layout {str(layout)!r}: stored parameters are split over 'data' "
                    f"along {logical_axis!r}, but sync_every={layout.sync_every} has a "
                    "replica of them there each; split them over 'fsdp', or set "
                    "sync_every=1",
                ),
            )


def _layers_error(mesh_axes: tuple[str, ...], layout: Layout) -> RuleError | None:
    at_work = tuple(axis for axis in mesh_axes if layout.mesh_shape[axis] > 1)
    if set(mesh_axes) & (set(ZERO_AXES) - {"expert"}) or set(at_work) - {"stage"}:
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


def _expert_error(logical_axis: str) -> RuleError:
    return RuleError(
        "claimed_twice",
        f"logical axis {logical_axis!r} is mapped to 'expert', which splits the batch "
        "and the experts; map 'experts' alone to it",
    )


def _batch_axis_error(logical_axis: str, mesh_axis: str) -> RuleError:
    if mesh_axis == "expert":
        return _expert_error(logical_axis)
    return RuleError(
        "claimed_twice",
        f"mesh axis {mesh_axis!r} is claimed by both 'batch' and {logical_axis!r} in "
        f"activations; if {logical_axis!r} is meant for stored parameters, pass "
        f"Rules(..., parameters={{{logical_axis!r}: {mesh_axis!r}}})",
    )
