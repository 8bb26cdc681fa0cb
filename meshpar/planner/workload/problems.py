"""Reasons why a workload cannot have a layout, on any hardware, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from meshpar.errors import nearest
from meshpar.layout import BY_COST, Layout
from meshpar.layout.residual_names import BLOCK_INPUT
from meshpar.planner.cost.activations import NAMED, OF_EXPERTS
from meshpar.planner.machine.execution import MESHPAR, Execution
from meshpar.planner.workload.workload import Workload
from meshpar.schedules import size_refusals, step_refusal
from meshpar.schedules.stage_splits import split_by_cost, split_problem, stage_sizes

_PLAIN = Layout()

_MOST = 10**9
"""Sequences, and tokens of one: beyond any run."""


class Problem(NamedTuple):
    """A reason why a workload cannot have a layout.

    Args:
        key: Key of the layout whose value does not suit.
        message: Both numbers and a way out.
        fault: Stable name of the reason: the key of an `InputError`.
    """

    key: str
    message: str
    fault: str


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
    return [
        *_positions(workload, seq, execution),
        *_residuals(workload, layout, execution),
        *_batch(layout, global_batch),
        *_local_steps(layout),
        *_tensor(workload, layout, seq),
        *_context(workload, layout, seq),
        *_expert(workload, layout),
        *_stage(workload, layout, stage_blocks),
        *(() if execution.eager else _uneven(workload, layout)),
    ]


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
        *_positions(workload, seq, execution),
        *_residuals(workload, layout, execution),
    ]


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


def _batch(layout: Layout, global_batch: int) -> Iterator[Problem]:
    parts = layout.batch_shards * layout.microbatches
    if global_batch % parts:
        yield Problem(
            "microbatches",
            f"{global_batch} sequences do not divide over data={layout.data} x fsdp="
            f"{layout.fsdp} x expert={layout.expert} x microbatches="
            f"{layout.microbatches} = {parts}; change the global batch or one of them",
            "batch.indivisible",
        )


def _local_steps(layout: Layout) -> Iterator[Problem]:
    if layout.sync_every > 1 and layout.data == 1:
        yield Problem(
            "sync_every",
            f"sync_every={layout.sync_every} averages replicas over 'data', but "
            "data=1; give 'data' a size",
            "layout.sync_of_one_replica",
        )


def _tensor(workload: Workload, layout: Layout, seq: int) -> Iterator[Problem]:
    tensor, kv_heads = layout.tensor, workload.kv_heads
    sizes = {"heads": workload.heads, "ffn": workload.ffn}
    if workload.experts:
        sizes["expert_ffn"] = workload.expert_ffn
        if not workload.dense_layers:
            sizes.pop("ffn")
    yield from _undivided(sizes, tensor)
    if not workload.kv_lora_rank and kv_heads % tensor and tensor % kv_heads:
        yield Problem(
            "tensor",
            f"kv_heads={kv_heads} and tensor={tensor} do not divide one "
            "another; choose a divisor or a multiple",
            "layout.indivisible",
        )
    if layout.sequence_parallel and seq % (tensor * layout.context):
        yield Problem(
            "sequence_parallel",
            f"{seq} tokens do not divide over tensor={tensor} x context="
            f"{layout.context}; change the sequence, or leave sequence_parallel out",
            "layout.indivisible",
        )


def _undivided(sizes: Mapping[str, int], tensor: int) -> Iterator[Problem]:
    for name, size in sizes.items():
        if size % tensor:
            yield Problem(
                "tensor",
                f"{name}={size} does not divide over tensor={tensor}; choose a divisor",
                "layout.indivisible",
            )


def _uneven(workload: Workload, layout: Layout) -> Iterator[Problem]:
    """Sizes that our rules split (`meshpar.rules.presets`), but not evenly."""
    sizes = {"kv_heads": workload.kv_heads, "vocab": workload.vocab}
    if workload.kv_lora_rank:
        sizes.pop("kv_heads")  # latent attention has as many as heads
    if workload.modulations:
        sizes.pop("vocab")  # a patch's numbers, which are whole everywhere
    yield from _undivided(sizes, layout.tensor)
    shards = math.prod(layout.mesh_shape[axis] for axis in layout.split_axes)
    if workload.hidden % shards:
        yield Problem(
            "zero",
            f"hidden={workload.hidden} does not divide over the {shards} devices of "
            f"{' x '.join(layout.split_axes)}; choose a divisor",
            "layout.indivisible",
        )


def _context(workload: Workload, layout: Layout, seq: int) -> Iterator[Problem]:
    context = layout.context
    if seq % context:
        yield Problem(
            "context",
            f"{seq} tokens do not divide over context={context}",
            "layout.indivisible",
        )
    parts = layout.attention_method.heads
    heads = workload.heads // layout.tensor
    if heads % parts:
        over = f"context={context}" if parts == context else f"{parts} devices"
        yield Problem(
            "attention",
            f"attention={layout.attention} splits the {heads} heads of a device, which "
            f"do not divide over {over}; take attention=ring",
            "attention.indivisible_heads",
        )


def _expert(workload: Workload, layout: Layout) -> Iterator[Problem]:
    expert = layout.expert
    if expert > 1 and not workload.experts:
        yield Problem(
            "expert",
            f"expert={expert}, but {workload.name} has no experts; set expert=1",
            "layout.expert_without_experts",
        )
    elif workload.experts % expert:
        yield Problem(
            "expert",
            f"experts={workload.experts} do not divide over expert={expert}; choose a "
            "divisor",
            "layout.indivisible",
        )


def _stage(
    workload: Workload, layout: Layout, stage_blocks: tuple[int, ...] | None
) -> Iterator[Problem]:
    stages = layout.stage * layout.chunks
    sizes = layout.stage, layout.microbatches, layout.chunks
    for key, error in size_refusals(layout.schedule, *sizes).items():
        yield Problem(key, str(error), error.key)
    refused = step_refusal(layout.schedule)
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
        return stage_sizes(workload.layers, layout.stage, layout.chunks, layout.splits)
    costs = tuple(
        workload.active_block_parameters(moe=workload.is_moe(layer))
        for layer in range(workload.layers)
    )
    return _split_by_cost(costs, layout.stage * layout.chunks)


_split_by_cost = lru_cache(maxsize=256)(split_by_cost)
