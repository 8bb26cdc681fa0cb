"""What the training step refuses of a layout and a model, for the lint to say too."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any

import jax
from jax.sharding import Mesh

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import flat
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.parallel.placement import DTYPES
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.rules.table import RuleError
from meshpar.train.layout_refusals import PLAIN, layout_errors
from meshpar.train.rule_refusals import rule_refusals
from meshpar.train.step_options import StepOptions


def refuse(options: StepOptions) -> None:
    """Refuses what `make_train_step` cannot make a step of.

    Raises:
        InputError: A value of the layout or an option is not supported, or the mesh is
            not the layout's.
        RuleError: A rule is not.
    """
    layout, mesh = options.layout, options.mesh
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
    refused = offload_refusal(layout, options.platform)
    if refused is not None and isinstance(mesh, Mesh):
        raise refused
    if options.gradient_dtype not in DTYPES:
        raise InputError(
            f"gradient_dtype={options.gradient_dtype!r}: must be one of "
            f"{', '.join(DTYPES)}",
            key="step.unknown_gradient_dtype",
        )
    norm = options.max_grad_norm
    if norm is not None and not (isinstance(norm, Real) and norm > 0):
        raise InputError(
            f"max_grad_norm={norm!r}: must be positive, or None for no limit",
            key="value.not_positive",
        )
    for _, error in rule_refusals(options.rules, layout):
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


def offload_refusal(layout: Layout, platform: str) -> InputError | None:
    """Return the error if a device cannot move residuals to the host, else None."""
    names = layout.residual_names
    if names is None or not names.offload or platform != "cpu":
        return None
    return InputError(
        f"layout {str(layout)!r}: a CPU's memory is the host's own, so remat=offload "
        f"would move nothing; write remat=save:{'/'.join(names.every)}",
        key="layout.offload_on_cpu",
    )


def inputs_refusal(model: Model, layout: Layout) -> InputError | None:
    """Return the error if an input with a gradient does not suit a layout, or None."""
    names = [name for name, one in model.known_inputs.items() if one.has_gradient]
    if not names or (layout.sync_every == 1 and layout.context == 1):
        return None
    return InputError(
        f"layout {str(layout)!r}: the gradient of input {names[0]!r} is found once a "
        f"step and for whole sequences, but sync_every={layout.sync_every} and "
        f"context={layout.context}; leave sync_every and context out",
        key="layout.unsupported_input_gradient",
    )


def experts_refusal(model: Model, layout: Layout) -> RuleError | None:
    """Return the error if a layout's `expert` does not suit a model, else None.

    Raises:
        InputError: A model with experts cannot be traced on a batch of one token.
    """
    if layout.expert == 1:
        return None
    asked = f"layout {str(layout)!r}: expert={layout.expert} splits experts, but"
    parameters = model.flat_parameters()
    if not any("experts" in one.logical_axes for one in parameters.values()):
        return RuleError(
            "dead",
            f"{asked} no parameter of the model has the logical axis 'experts'; set "
            "expert=1, and give 'data' or 'fsdp' its devices",
            key="layout.expert_without_experts",
        )
    silent = _sends_no_tokens(model)
    if silent is not None:
        return RuleError(
            "dead",
            f"{asked} block group {silent!r} sends no tokens to its experts, so that "
            "each would see its device's experts alone; call "
            "meshpar.parallel.expert.experts.routed_mlp, or set expert=1",
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
            "is given beside it; leave one of them out",
            key="schedule.given_twice",
        )
    if layout.stage == 1:
        raise InputError(
            f"layout {str(layout)!r} has stage=1, but a schedule is given beside it; "
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
    microbatches = microbatches or layout.microbatches
    if num_examples % (layout.batch_shards * microbatches) == 0:
        return None
    times = f" x microbatches={microbatches}"
    what = f"batch[{name!r}]" if name else "the batch"
    return InputError(
        f"{what} has {num_examples} examples, which do not divide over "
        f"{layout.batch_shards} devices of data={layout.data},fsdp={layout.fsdp}"
        f"{f',expert={layout.expert}' if layout.expert > 1 else ''}"
        f"{times if microbatches > 1 else ''}; pad with examples of weight 0, "
        "or change the global batch",
        key="batch.indivisible",
    )


def check_logits(model: Model) -> None:
    """Refuses a model that has no `logits`.

    Raises:
        InputError: It has none.
    """
    if model.logits is None:
        raise InputError(
            "the model has no logits function; give Model logits=",
            key="model.missing_logits",
        )
