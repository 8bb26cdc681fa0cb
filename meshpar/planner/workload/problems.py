"""Reasons why a workload cannot have a layout, on any hardware, as data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshpar.errors import InputError, nearest
from meshpar.hardware.device import Device
from meshpar.layout import BY_COST, Layout
from meshpar.layout.layout import BLOCK_INPUT
from meshpar.layout.requirements import (
    ATTENTION,
    BATCH,
    EXPERTS,
    LOCAL_STEPS,
    PRECISION,
    SIZES,
    Facts,
    Problem,
    problems,
)
from meshpar.planner.cost.activations import NAMED, OF_EXPERTS
from meshpar.planner.machine.execution import MESHPAR, Execution
from meshpar.planner.workload.workload import Workload
from meshpar.schedules import plan_refusal, size_refusals
from meshpar.schedules.stage_splits import split_by_cost, split_problem, stage_sizes

_MOST = 10**9
"""Sequences, and tokens of one: beyond any run."""


def layout_problems(
    workload: Workload,
    layout: Layout,
    *,
    global_batch: int,
    seq: int,
    stage_blocks: tuple[int, ...] | None = None,
    execution: Execution = MESHPAR,
) -> list[Problem]:
    """Return every reason why a workload cannot have a layout; empty if it can.

    Args:
        workload: The model.
        layout: Its layout.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence.
        stage_blocks: Blocks of every stage, if the layout cannot express them.
        execution: The program that runs it; ours splits evenly or not at all.
    """
    if sizes := [*_sizes(global_batch, seq)]:
        return sizes
    facts = Facts(
        layout=layout,
        examples=global_batch,
        seq=seq,
        model=workload.name,
        num_experts=workload.experts,
        sizes=_matmul_sizes(workload),
        kv_heads=None if workload.kv_lora_rank else workload.kv_heads,
        heads=workload.heads,
        heads_in=workload.name,
        head_shards=layout.tensor,
    )
    even = Facts(
        layout=layout,
        sizes=_rule_sizes(workload),
        stored={"hidden": workload.hidden},
    )
    return [
        *_precision(layout, execution),
        *_positions(workload, seq, execution),
        *_later_tokens(workload, execution),
        *_uneven_shards(layout, execution),
        *_residuals(workload, layout, execution),
        *problems(facts, (*BATCH, *LOCAL_STEPS, *SIZES, *ATTENTION, *EXPERTS)),
        *_stage(workload, layout, stage_blocks),
        *(() if execution.eager else problems(even, SIZES)),
    ]


def _matmul_sizes(workload: Workload) -> dict[str, int]:
    """Return the sizes that every program splits over `tensor`."""
    sizes = {"heads": workload.heads}
    if not workload.experts or workload.dense_layers:
        sizes["ffn"] = workload.ffn
    if workload.experts:
        sizes["expert_ffn"] = workload.expert_ffn
    return sizes


def _rule_sizes(workload: Workload) -> dict[str, int]:
    """Return the other sizes that `meshpar.rules.presets` splits over `tensor`."""
    sizes = {}
    if not workload.kv_lora_rank:  # latent attention has as many as heads
        sizes["kv_heads"] = workload.kv_heads
    if not workload.modulations:  # a patch's numbers are whole everywhere
        sizes["vocab"] = workload.vocab
    return sizes


def problems_on_any_mesh(
    workload: Workload,
    layout: Layout,
    execution: Execution,
    *,
    global_batch: int,
    seq: int,
) -> list[Problem]:
    """Return the reasons that no mesh shape would change."""
    return [
        *_sizes(global_batch, seq),
        *_precision(layout, execution),
        *_positions(workload, seq, execution),
        *_later_tokens(workload, execution),
        *_residuals(workload, layout, execution),
    ]


def _precision(layout: Layout, execution: Execution) -> Iterator[Problem]:
    to_mxfp8 = layout.precision == "mxfp8"
    if not (execution.mxfp8_cast_bytes if to_mxfp8 else execution.fp8):
        yield from problems(Facts(layout=layout), PRECISION)


def check_precision_on(device: Device, precision: str) -> None:
    """Refuse a precision that a device's arithmetic does not have.

    Raises:
        InputError: `peak_flops` of the device has no such entry.
    """
    if precision not in device.peak_flops:
        raise InputError(
            f"hardware {device.name!r} has no peak_flops of {precision}, only of "
            f"{', '.join(device.peak_flops)}; take another precision or device",
            key="hardware.no_such_precision",
        )


def _sizes(global_batch: int, seq: int) -> Iterator[Problem]:
    words = f"global batch {global_batch} of {seq} tokens: give at"
    if global_batch < 1 or seq < 1:
        yield Problem("global_batch", f"{words} least 1 each", "value.below_one")
    elif max(seq, global_batch) > _MOST:
        yield Problem(
            "global_batch", f"{words} most {_MOST} each", "plan.size_too_large"
        )


def _positions(workload: Workload, seq: int, execution: Execution) -> Iterator[Problem]:
    if workload.learned_positions and seq > workload.seq and not execution.eager:
        yield Problem(
            "seq",
            f"sequences of {seq} tokens, but {workload.name} has seq={workload.seq} "
            "learned positions; shorten the sequences, or give the model more",
            "plan.seq_too_long",
        )
    if workload.modulations and seq != workload.seq:
        yield Problem(
            "seq",
            f"sequences of {seq} tokens, but the images of {workload.name} have "
            f"{workload.seq} patches each; leave seq out",
            "plan.seq_not_patches",
        )


def _later_tokens(workload: Workload, execution: Execution) -> Iterator[Problem]:
    if workload.mtp_layers and not execution.trains_mtp:
        yield Problem(
            "mtp_layers",
            f"{workload.name} has mtp_layers={workload.mtp_layers}, which "
            f"{execution.name!r} does not train; leave them out, or estimate a program "
            "that does (--execution megatron-bridge)",
            "plan.mtp_not_trained",
        )


def _uneven_shards(layout: Layout, execution: Execution) -> Iterator[Problem]:
    if layout.data_splits and not execution.uneven_shares:
        yield Problem(
            "data_splits",
            f"data_splits={'/'.join(map(str, layout.data_splits))}, but "
            f"{execution.name!r} runs microbatches={layout.microbatches} on all parts "
            "of 'data'; leave it out, or estimate --execution meshpar",
            "plan.data_splits_of_ours",
        )


def _residuals(
    workload: Workload, layout: Layout, execution: Execution
) -> Iterator[Problem]:
    names = layout.residual_names
    if names is None or execution.eager or workload.traced:
        return
    known = residual_names(workload)
    for name in names.every:
        if name not in (BLOCK_INPUT, *known):
            yield Problem(
                "remat",
                f"remat={layout.remat}: no block names a residual {name!r}; "
                f"{nearest(name, known)}",
                "layout.unknown_residual",
            )


def residual_names(workload: Workload) -> tuple[str, ...]:
    """Return the residuals that a workload's blocks name.

    Gated blocks have `mlp_gate_up`, others `mlp_up`. Routed blocks have their experts'
    names, and an MLP's only for shared experts.
    """
    without = {"mlp_up" if workload.gated else "mlp_gate_up"}
    if workload.experts and not (workload.shared_experts or workload.dense_layers):
        without |= {"mlp_up", "mlp_gate_up", "mlp_hidden"}
    own = OF_EXPERTS if workload.experts else ()
    return tuple(name for name in (*NAMED, *own) if name not in without)


def _stage(
    workload: Workload, layout: Layout, stage_blocks: tuple[int, ...] | None
) -> Iterator[Problem]:
    stages = layout.stage * layout.chunks
    sizes = layout.stage, layout.microbatches, layout.chunks
    limit = layout.max_pending_w
    for key, error in size_refusals(layout.schedule, *sizes, limit).items():
        yield Problem(key, str(error), error.key)
    refused = plan_refusal(layout.schedule)
    if refused is not None:
        yield Problem("schedule", str(refused), refused.key)
    if stage_blocks is not None:
        if len(stage_blocks) != stages or sum(stage_blocks) != workload.layers:
            yield Problem(
                "splits",
                f"blocks {stage_blocks} are not {workload.layers} on {stages} stages",
                "layout.wrong_stage_blocks",
            )
        return
    given = () if layout.splits == BY_COST else layout.splits
    wrong = split_problem(workload.layers, layout.stage, layout.chunks, given)
    if wrong is not None:
        key = "stage" if stages > workload.layers else "splits"
        yield Problem(key, str(wrong), wrong.key)


def layout_stage_blocks(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Return the blocks of every stage of a layout.

    Raises:
        InputError: `splits` is of another number of stages or layers.
    """
    if layout.splits != BY_COST:
        stages = layout.stage, layout.chunks, layout.splits
        return with_mtp(workload, stage_sizes(workload.layers, *stages))
    number = layout.stage * layout.chunks
    return with_mtp(workload, _split_by_cost(workload.layer_costs, number))


def with_mtp(workload: Workload, stage_blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of every stage, those of `mtp_layers` on the last, too."""
    *others, last = stage_blocks
    return (*others, last + workload.mtp_layers)


_split_by_cost = lru_cache(maxsize=256)(split_by_cost)
