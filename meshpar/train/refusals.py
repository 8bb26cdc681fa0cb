"""Errors of `make_train_step` for a layout, a model and rules, which lint reports."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES, ZERO_AXES, Layout
from meshpar.layout.requirements import (
    BATCH,
    EXPERTS,
    INPUTS,
    PLAIN,
    PLATFORM,
    Facts,
    layout_errors,
    problems,
)
from meshpar.machine.mesh import mesh_hosts
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import Params, flat
from meshpar.model.parameter_dims import parameter_dims
from meshpar.model.tracing import (
    traced_activations,
    traced_batch,
    traced_forward,
    tracing,
)
from meshpar.parallel.expert.rounds import SENT_ROWS
from meshpar.parallel.parameter_specs import zero_split_axes
from meshpar.parallel.placement import Placement
from meshpar.parallel.reduction import host_groups
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.rules.rules import RuleError, Rules, spec_axes
from meshpar.rules.spatial import SPATIAL
from meshpar.trace.walk import equations


def refuse(
    layout: Layout, rules: Rules, mesh: Mesh | AbstractMesh, platform: str
) -> None:
    """Raise the first error of a layout and rules on a mesh of a platform.

    Raises:
        InputError: A value of the layout is not supported, or the mesh is not the
            layout's.
        RuleError: A rule is not supported.
    """
    if dict(mesh.shape) != layout.mesh_shape:
        raise InputError(
            f"layout {str(layout)!r} has mesh axes {layout.mesh_shape}, but the mesh "
            f"has {dict(mesh.shape)}; make it with make_mesh(layout)",
            key="mesh.not_of_layout",
        )
    for error in layout_errors(layout).values():
        raise error
    if layout.optimizer_memory == "host" and isinstance(mesh, Mesh):
        _check_host_memory(layout, mesh)
    if isinstance(mesh, Mesh):
        for problem in problems(Facts(layout=layout, platform=platform), PLATFORM):
            raise problem.error(layout)
    for _, error in rule_refusals(rules, layout):
        raise error


def _check_host_memory(layout: Layout, mesh: Mesh) -> None:
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise InputError(
            f"layout {str(layout)!r}: optimizer_memory=host needs devices with memory "
            f"{HOST_MEMORY!r}; {device.device_kind} has {', '.join(kinds)}: leave it "
            "out",
            key="layout.no_host_memory",
        )


def inputs_refusal(model: Model, layout: Layout) -> InputError | None:
    """Return the error if an input with a gradient does not suit a layout, or None."""
    names = [name for name, one in model.known_inputs.items() if one.has_gradient]
    facts = Facts(layout=layout, input_gradient=next(iter(names), ""))
    return next((one.error(layout) for one in problems(facts, INPUTS)), None)


def experts_refusal(model: Model, layout: Layout) -> InputError | None:
    """Return the error if a layout's `expert` does not suit a model, else None.

    Raises:
        InputError: A model with experts cannot be traced on a batch of one token.
    """
    if layout.expert == 1:
        return None
    parameters = model.flat_parameters()
    has_experts = any("experts" in one.logical_axes for one in parameters.values())
    facts = Facts(layout=layout, num_experts=None if has_experts else 0)
    call = "meshpar.parallel.expert.experts.routed_mlp"
    if model.unflatten is not None:  # From a loss.
        call = "meshpar.experts"
    for problem in problems(facts, EXPERTS):
        advice = ""
        if model.unflatten is not None:
            advice = (
                f"; for experts of a loss call {call}, and name the first dim of their "
                "kernels 'experts'"
            )
        return problem._replace(message=problem.message + advice).error(layout)
    asked = f"layout {str(layout)!r}: expert={layout.expert} splits experts, but"
    silent = _sends_no_tokens(model)
    if silent is not None:
        return RuleError(
            "dead",
            f"{asked} {silent} sends no tokens to its experts, so that each would see "
            f"its device's experts alone; call {call}, or set expert=1",
            key="model.experts_without_tokens",
        )
    for path, one in parameters.items():
        if "experts" in one.logical_axes[1:] or one.logical_axes == ("experts",):
            return RuleError(
                "dead",
                f"{asked} {path} has the logical axes {one.logical_axes}: a block sees "
                "its device's experts alone of what has 'experts', which is for the "
                "first dim of an expert's matrices; leave it out of a router's axes",
                key="model.experts_in_other_dim",
            )
    return _unnamed_experts(model, asked) if model.unflatten is not None else None


def _unnamed_experts(model: Model, asked: str) -> RuleError | None:
    """Return the error if a loss sends tokens to experts that are not split, or None.

    The number of a loss's experts is the size of its arrays, which tells no split.
    """
    with tracing("whether experts are named cannot be found"):
        routed = parameter_dims(model, 1, 1).routed_experts()
    for path, one in routed:
        if one.logical_axes[0] != "experts":
            return RuleError(
                "dead",
                f"{asked} {path}, which meshpar.experts reads, has the logical axes "
                f"{one.logical_axes}, so that every device would have all "
                f"{one.shape[0]} experts; name its first dim 'experts'",
                key="model.experts_without_name",
            )
    return None


def _has_expert_kernels(parameters: Params) -> bool:
    axes = (one.logical_axes for one in flat(parameters).values())
    return any(each[:1] == ("experts",) and len(each) > 1 for each in axes)


def _sends_no_tokens(model: Model) -> str | None:
    """Return the part of a model that sends its experts no tokens; None if none."""
    ends, groups = model.split(model.parameters)
    sends: dict[str, int] = {}

    def run(group: BlockGroup, layer: Any, x: Any, scope: Any) -> Any:
        block = jax.make_jaxpr(lambda layer, x: group.run(layer, x, scope))
        sends[group.name] = _num_sends(block(layer, x))
        return group.run(layer, x, scope)

    with tracing("whether experts get tokens cannot be found"):
        once, *shapes = traced_forward(
            model, traced_batch(model, 1, 1), head=_has_expert_kernels(ends), run=run
        )
        outside = _num_sends(jax.make_jaxpr(once)(*shapes)) - sum(sends.values())
    for group, parameters in zip(model.groups, groups, strict=True):
        if _has_expert_kernels(parameters) and not sends[group.name]:
            return f"block group {group.name!r}"
    if _has_expert_kernels(ends) and not outside:
        return "the model outside its blocks" if model.has_blocks else "the loss"
    return None


def _num_sends(program: Any) -> int:
    """Return how often a program sends rows to experts."""
    return sum(
        equation.primitive.name == "name" and equation.params["name"] == SENT_ROWS
        for equation in equations(program)
    )


def refuse_schedule(layout: Layout) -> None:
    """Refuse a layout that does not allow a schedule of the user's own.

    Raises:
        InputError: It names a schedule itself, or has no stages.
    """
    if layout.schedule != PLAIN.schedule:
        raise InputError(
            f"layout {str(layout)!r} names schedule={layout.schedule}, but a schedule "
            "is given too; leave one of them out",
            key="schedule.given_twice",
        )
    if layout.stage == 1:
        raise InputError(
            f"layout {str(layout)!r} has stage=1, but a schedule is given; "
            "leave it out, or give 'stage' a size",
            key="schedule.without_stages",
        )


def batch_refusal(
    layout: Layout,
    num_examples: int,
    name: str = "",
    microbatches: int | None = None,
) -> InputError | None:
    """Return the error if a batch of that size does not suit a layout, else None.

    `microbatches` counts instead of the layout's own, where it is given.
    """
    layout = replace(layout, microbatches=microbatches or layout.microbatches)
    facts = Facts(layout=layout, examples=num_examples, array=name)
    return next((one.error() for one in problems(facts, BATCH)), None)


def check_logits(model: Model) -> None:
    """Refuse a model without `logits`.

    Raises:
        InputError: It has none.
    """
    if model.logits is None:
        raise InputError(
            "the model has no logits function; give Model logits=",
            key="model.missing_logits",
        )


def rule_refusals(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Yield each logical axis whose rule `make_train_step` refuses, and the error."""
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
    """Return the mesh axes that split the batch of a layout."""
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
    """Yield keys of ZeRO without effect under the rules of stored parameters."""
    if layout.zero != 3 or "zero_axes" in layout_errors(layout):
        return
    split, text = zero_split_axes(layout, rules), repr(str(layout))
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
    if layout.fsdp_gather != PLAIN.fsdp_gather and not split:
        error = RuleError(
            "dead",
            f"layout {text}: fsdp_gather={layout.fsdp_gather} changes nothing, as the "
            "rules split no stored parameter; leave it out, or give 'fsdp' a size",
            key="layout.fsdp_gather_without_effect",
        )
        yield "fsdp_gather", error


def _split_replicas(rules: Rules, layout: Layout) -> Iterator[tuple[str, RuleError]]:
    """Yield rules that split the parameters of replicas of local steps."""
    for logical_axis, mesh_axes in rules.stored.table.items():
        shares = layout.sync_every > 1 and logical_axis != "batch"
        if shares and "data" in mesh_axes:
            error = RuleError(
                "claimed_twice",
                f"layout {str(layout)!r}: stored parameters are split over 'data' "
                f"along {logical_axis!r}, but sync_every={layout.sync_every} "
                "needs whole replicas there; split them over 'fsdp', or set "
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
    active = tuple(axis for axis in mesh_axes if layout.mesh_shape[axis] > 1)
    if set(mesh_axes) & (set(ZERO_AXES) - {"expert"}) or set(active) - {"stage"}:
        return RuleError(
            "claimed_twice",
            f"logical axis 'layers' is mapped to {mesh_axes}, but every device runs "
            "every layer of its stage: map another dim of the parameters, such as "
            "'embed', and 'layers' to 'stage' or nothing",
            key="rules.split_layers",
        )
    if layout.stage > 1 and not active:
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


def refuse_by_host(
    gradient_reduction: str, layout: Layout, mesh: Mesh | AbstractMesh, platform: str
) -> None:
    """Refuse `by_host` where it is not supported, or changes nothing."""
    if gradient_reduction == "flat":
        return
    asked = f"gradient_reduction={gradient_reduction!r}"
    if gradient_reduction != "by_host":
        raise InputError(
            f"{asked}: must be 'flat' or 'by_host'",
            key="step.unknown_gradient_reduction",
        )
    if not isinstance(mesh, Mesh) or not platform_named(platform).is_host:
        raise InputError(
            f"{asked} is for CPUs that are there: GPUs and TPUs sum inside a host "
            "first by themselves; leave it out",
            key="step.by_host_not_on_cpu",
        )
    hosts = np.array(mesh_hosts(mesh)).reshape(mesh.devices.shape)
    # Under local steps nothing is summed over `data`.
    is_local = layout.sync_every > 1
    over = [
        axis
        for axis in BATCH_AXES
        if layout.mesh_shape[axis] > 1 and not (is_local and axis == "data")
    ]
    sums = [
        axes
        for number in range(1, len(over) + 1)
        for axes in itertools.combinations(over, number)
    ]
    if all(host_groups(hosts, axes) is None for axes in sums):
        raise InputError(
            f"layout {str(layout)!r}: {asked} changes nothing, because no sum of "
            "gradients is over several devices on each of several hosts (hosts: "
            f"{len(set(hosts.flat))}); leave it out",
            key="step.by_host_without_effect",
        )


def refuse_uneven_hosts(
    devices_per_host: int | None, mesh: Mesh | AbstractMesh
) -> None:
    """Refuse hosts that do not have equally many of the devices of a mesh."""
    if devices_per_host is None:
        return
    if devices_per_host < 1:
        raise InputError(
            f"devices_per_host={devices_per_host}: must be at least 1",
            key="value.below_one",
        )
    if mesh.size % devices_per_host:
        raise InputError(
            f"devices_per_host={devices_per_host} does not divide the {mesh.size} "
            "devices of the mesh; every host must hold the same number",
            key="mesh.uneven_hosts",
        )


class IdleMeshAxisWarning(UserWarning):
    """A mesh axis of several devices splits neither a parameter nor an activation."""


def idle_message(axis: str, size: int) -> str:
    """Say that a mesh axis splits nothing, and the ways out."""
    return (
        f"mesh axis {axis!r} of size {size} shards nothing: its devices repeat each "
        f"other's work; set {axis}=1 or map a logical axis to it"
    )


def warn_idle_tensor(model: Model, placement: Placement) -> None:
    """Warn where a layout has `tensor`, and the model names nothing that it splits.

    Every other mesh axis splits examples, tokens, layers or experts by itself.
    """
    size, rules = placement.layout.tensor, placement.rules
    specs = jax.tree.leaves(
        placement.specs(attrgetter("spec")),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    if size == 1 or any("tensor" in spec_axes(spec) for spec in specs):
        return

    def splits(arrays: Iterable[Any]) -> bool:
        names = {name for one in arrays for name in one.logical_axes if name}
        return any("tensor" in (rules.table.get(name) or ()) for name in names)

    if splits(model.known_inputs.values()):
        return
    try:
        if splits(traced_activations(model, 1, 8)):
            return
    except (InputError, RuntimeError):
        return  # Unknown: it cannot be traced, or names mesh axes of its own.
    warnings.warn(idle_message("tensor", size), IdleMeshAxisWarning, stacklevel=3)
