"""Errors of `make_train_step` for a layout alone, without jax for the planner."""

from __future__ import annotations

import math

from meshpar.errors import InputError
from meshpar.layout import STAGE_REMATS, Layout

PLAIN = Layout()
"""What a layout is that says nothing."""

_OPTION_OF = {
    "schedule": "stage",
    "chunks": "stage",
    "splits": "stage",
    "attention": "context",
}
"""Keys of a layout that mean something on one mesh axis only."""


def layout_errors(layout: Layout) -> dict[str, InputError]:
    """Return the errors of `make_train_step` for a layout, by key of the layout."""
    refusals = {}
    for name, mesh_axis in _OPTION_OF.items():
        value = getattr(layout, name)
        if value != getattr(PLAIN, name) and getattr(layout, mesh_axis) == 1:
            refusals[name] = InputError(
                f"layout {str(layout)!r}: {name} changes nothing while "
                f"{mesh_axis}=1; leave it out, or give {mesh_axis!r} a size",
                key="layout.option_without_axis",
            )
    if layout.remat in STAGE_REMATS and layout.stage == 1:
        refusals["remat"] = InputError(
            f"layout {str(layout)!r}: remat={layout.remat} keeps the input of each "
            "pipeline stage, but stage=1; take remat=full, or give 'stage' a size",
            key="layout.stage_remat_without_stages",
        )
    names = layout.residual_names
    if names is not None and names.offload and layout.runs_in_ticks:
        refusals["remat"] = InputError(
            f"layout {str(layout)!r}: remat=offload is not supported where "
            "microbatches wait in slots on the device; write remat=save:..., or set "
            "stage=1 and microbatches=1",
            key="layout.offload_in_ticks",
        )
    return {
        **refusals,
        **zero_refusals(layout),
        **_precision_refusals(layout),
        **_local_steps_refusals(layout),
    }


def zero_refusals(layout: Layout) -> dict[str, InputError]:
    """Return the errors of keys of ZeRO that have no effect, by key."""
    refusals = {}
    text, sizes = repr(str(layout)), layout.mesh_shape
    idle = [axis for axis in layout.zero_axes if sizes[axis] == 1]
    shards = layout.data * layout.fsdp
    if layout.zero in (1, 2) and shards == 1 and not layout.zero_axes:
        refusals["zero"] = InputError(
            f"layout {text}: zero={layout.zero} shares nothing out while data=1 and "
            "fsdp=1; leave it out, or give one of them a size",
            key="layout.zero_without_effect",
        )
    elif layout.zero_axes and (idle or layout.zero == 0):
        refusals["zero_axes"] = InputError(
            f"layout {text}: zero_axes={'/'.join(layout.zero_axes)} changes nothing "
            f"while {'zero=0' if layout.zero == 0 else f'{idle[0]}=1'}; leave it out",
            key="layout.zero_axes_without_effect",
        )
    shards = math.prod(sizes[axis] for axis in {"data", "fsdp", *layout.zero_axes})
    gathers = layout.zero == 3 and layout.runs_in_ticks and shards > 1
    if layout.fsdp_gather != PLAIN.fsdp_gather and not gathers:
        refusals["fsdp_gather"] = InputError(
            f"layout {text}: fsdp_gather={layout.fsdp_gather} changes nothing without "
            "zero=3, a size for 'fsdp', and stages or microbatches; leave it out",
            key="layout.fsdp_gather_without_effect",
        )
    in_loop = layout.zero >= 2 and shards > 1 and not layout.runs_in_ticks
    if layout.fsdp_prefetch != PLAIN.fsdp_prefetch and not in_loop:
        refusals["fsdp_prefetch"] = InputError(
            f"layout {text}: fsdp_prefetch={layout.fsdp_prefetch} changes nothing with "
            "stages or microbatches, nor without zero=2 or 3 and a size for 'fsdp' or "
            "'data'; leave it out",
            key="layout.fsdp_prefetch_without_effect",
        )
    return refusals


def _precision_refusals(layout: Layout) -> dict[str, InputError]:
    if layout.param_dtype == "fp32" or layout.precision != "fp32":
        return {}
    return {
        "param_dtype": InputError(
            f"layout {str(layout)!r}: param_dtype={layout.param_dtype} "
            "rounds parameters that precision=fp32 computes with; set precision=bf16, "
            "or leave it out",
            key="layout.param_dtype_rounds",
        )
    }


def _local_steps_refusals(layout: Layout) -> dict[str, InputError]:
    """Return the error, by key, if there cannot be local steps over `data`."""
    if layout.sync_every == 1:
        return {}
    asked = f"layout {str(layout)!r}: sync_every={layout.sync_every}"
    refused = None
    if layout.data == 1:
        refused = InputError(
            f"{asked} averages replicas over 'data', but data=1 has one alone; leave "
            "it out, or give 'data' a size",
            key="layout.sync_of_one_replica",
        )
    elif layout.zero > 0 and "data" in layout.split_axes:
        refused = InputError(
            f"{asked} gives each part of 'data' a replica with optimizer state of its "
            f"own, but zero={layout.zero} shares states out over 'data'; share them "
            "over 'fsdp' (zero_axes=fsdp), or set sync_every=1",
            key="layout.sync_with_shared_states",
        )
    elif layout.optimizer_memory == "host":
        refused = InputError(
            f"{asked} is not supported with optimizer_memory=host; leave one of them "
            "out",
            key="layout.sync_with_host_memory",
        )
    return {} if refused is None else {"sync_every": refused}
