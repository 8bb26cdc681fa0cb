"""Plans of split backwards: ticks, time, and the stash between their two halves."""

import dataclasses
import functools

import pytest
from schedule_cases import SPLIT_NAMES

from meshpar.cli.report.bars import memory_parts
from meshpar.layout import Layout
from meshpar.models.presets import build
from meshpar.planner.cost.activations import stash_bytes
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.pipeline_time import (
    all_ticks_s,
    divergent_s,
    layout_ticks,
    schedule_ticks,
    span_s,
)
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.from_model import traced_workload
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2022, MEGATRON_2023
from meshpar.planner.published.megatron import published
from meshpar.planner.workload.shapes import SHAPES, workload_of
from meshpar.schedules import (
    SCHEDULES,
    StageTimes,
    lock_step_span_s,
    make_schedule,
    simulate,
    tick_table,
)
from meshpar.schedules.ticks import ticks_timeline
from tests.marks import slow

FEW = [name for name in SPLIT_NAMES if name != "auto"]


def split_layout(name, **keys):
    chunks = SCHEDULES[name].default_chunks
    return Layout(**{"stage": 4, "schedule": name, "chunks": chunks, **keys})


def schedule_of(layout):
    return make_schedule(
        layout.schedule,
        layout.stage,
        layout.microbatches,
        layout.chunks,
        max_pending_w=layout.max_pending_w,
    )


def of(line, *, preset="llama3-8b", batch=32, **options):
    layout = Layout.parse(line)
    return estimate(
        SHAPES[preset],
        cluster_of("h100-80gb", devices=layout.num_devices),
        layout,
        global_batch=batch,
        seq=2048,
        **options,
    )


@pytest.mark.parametrize("ranks", [3, 4, slow(5), slow(8)])
@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("execution", ["uniform", "divergent"])
@pytest.mark.parametrize(
    "name", [*FEW, slow("auto")], ids=lambda name: str(getattr(name, "values", name))
)
def test_ticks_of_many_microbatches_are_those_of_the_whole_table(
    name, execution, limit, ranks
):
    keys = {"stage": ranks, "microbatches": 4 * ranks + 5, "execution": execution}
    layout = split_layout(name, max_pending_w=limit, **keys)
    whole = schedule_ticks(schedule_of(layout), divergent=layout.divergent)
    assert layout_ticks(layout) == whole


@pytest.mark.parametrize("name", ["zero_bubble_h1", "zero_bubble_v", "dualpipe_v"])
def test_a_step_takes_the_time_of_its_ticks(name):
    layout = split_layout(name, microbatches=24)
    stages = layout.stage * layout.chunks
    times = StageTimes.uniform(stages, forward_s=3, input_grad_s=4, weight_grad_s=2)
    seconds = times.forward_s, times.input_grad_s, times.weight_grad_s
    schedule = schedule_of(layout)
    together = lock_step_span_s(schedule, tick_table(schedule), times)
    assert all_ticks_s(layout, *seconds) == together
    diverging = dataclasses.replace(layout, execution="divergent")
    apart = ticks_timeline(schedule, times, divergent=True).end_s
    assert divergent_s(diverging, *seconds) == apart
    assert span_s(layout, *seconds) == simulate(schedule, times).end_s


@functools.cache
def traced_preset(preset, seq):
    """The workload of one layer of a preset, or of a small preset as it is."""
    small = preset.startswith("tiny")
    options = {} if small else {"layers": 1, "vocab": 256}
    return traced_workload(build(preset, **options), seq=seq)


# tiny has grouped queries and gates, the others neither, norms of queries and keys.
@pytest.mark.parametrize("preset", ["tiny", "tiny-gpt2", slow("qwen3-0.6b")])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_counted_stash_is_the_smallest_that_the_traced_backward_has(preset, remat):
    seq = 256
    traced = traced_preset(preset, seq).traced.cut(remat)
    line = (
        f"stage=4,microbatches=4,schedule=zero_bubble_h1,precision=bf16,remat={remat}"
    )
    run = estimate(
        SHAPES[preset],
        cluster_of("h100-80gb", devices=4),
        line,
        global_batch=4,
        seq=seq,
    ).run
    # Sums of the norms' statistics, one value of a token each, are not counted.
    counted = stash_bytes(run, moe=False) / run.tokens
    assert counted == pytest.approx(traced.stash_bytes, rel=0.01)
    assert traced.uncut_share == pytest.approx(0, abs=1e-9)


LARGE = (
    "layers=32,hidden=8192,heads=64,kv_heads=64,ffn=32768,vocab=32768,tied=true,"
    "gated=true"
)
WIDE = "data=4,stage=4,tensor=4,microbatches=32"
SMALL = (
    "layers=16,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=8192,gated=true,"
    "tied=false"
)


@pytest.mark.parametrize(
    "model, line, batch, seq, schedule, more_gb",
    [
        # `recipes.bench.large_pipeline`
        (LARGE, f"{WIDE},param_dtype=bf16", 128, 2048, "zero_bubble_h1", 12.19),
        (LARGE, f"{WIDE},param_dtype=bf16", 128, 2048, "zero_bubble_v,chunks=2", 6.00),
        # `meshpar audit --preset llama3-8b --model layers=16,vocab=8192`
        (SMALL, "stage=4,tensor=2,microbatches=8", 16, 1024, "zero_bubble_h1", 4.23),
    ],
)
def test_what_is_gathered_over_tensor_waits_whole(
    model, line, batch, seq, schedule, more_gb
):
    """Memory above `1f1b`, compiled for absent H100s by jax 0.10.2 (2026-11-27)."""
    keys = f"{line},sequence_parallel=true,remat=full,precision=bf16"
    layout = Layout.parse(keys)
    whole, split = (
        estimate(
            workload_of(model),
            cluster_of("h100-80gb", devices=layout.num_devices),
            f"{layout},schedule={name}",
            global_batch=batch,
            seq=seq,
        ).memory.total_bytes
        for name in ("1f1b", schedule)
    )
    assert (split - whole) / 1e9 == pytest.approx(more_gb, rel=0.08)


def test_a_stash_is_kept_for_every_weight_gradient_that_waits():
    line = "stage=4,data=2,microbatches=16,precision=bf16,remat=full"
    whole = of(line).memory
    split = f"{line},schedule=zero_bubble_h1"
    one, two, free = (
        of(f"{split}{limit}").memory
        for limit in (",max_pending_w=1", ",max_pending_w=2", "")
    )
    assert whole.stash_bytes == 0 and whole.as_json()["stash_bytes"] == 0
    assert one.stash_bytes > 10 * whole.activation_bytes / whole.in_flight
    assert (two.stash_bytes, free.stash_bytes) == pytest.approx(
        (2 * one.stash_bytes, 4 * one.stash_bytes)
    )
    grown = free.total_bytes - one.total_bytes
    assert grown == pytest.approx(3 * one.stash_bytes)
    assert sum(memory_parts(free).values()) == pytest.approx(free.total_bytes)
    assert any("weight gradients wait" in line for line in of(split).lines)
    # Of microbatches it does not depend.
    more = of(split.replace("microbatches=16", "microbatches=32"), batch=64).memory
    assert more.total_bytes == free.total_bytes


def test_a_tensor_axis_shares_what_waits():
    one, two = (
        of(f"stage=4,tensor={n},microbatches=8,schedule=zero_bubble_h1,{rest}").run
        for n, rest in ((1, "remat=full"), (2, "remat=full,sequence_parallel=true"))
    )
    # But for four arrays of the residual stream, which are gathered over it.
    stream = two.tokens * two.workload.hidden * two.dtype_bytes
    whole = 4 * stream - stream / 2
    assert stash_bytes(two, moe=False) == stash_bytes(one, moe=False) / 2 + whole


def test_experts_leave_their_weight_gradients_to_the_input_gradient():
    line = "stage=4,expert=2,microbatches=4,schedule=zero_bubble_h1,precision=bf16"
    run = of(line, preset="mixtral-8x7b").run
    parameters = run.workload.expert_parameters(moe=True) / run.layout.expert
    assert stash_bytes(run, moe=True) > 4 * parameters
    time = block_time(run, moe=True)
    assert 0.5 < time.uncut_s / time.weight_grad.compute_s < 1
    _, late = time.split_backward
    own_s = time.weight_grad.compute_s - time.uncut_s + time.stash_s
    assert late.compute_s == pytest.approx(own_s)


def test_weight_gradients_fill_the_bubble_of_ranks_that_run_freely():
    line = "stage=8,microbatches=16,precision=bf16"
    options = {"execution": MEGATRON_2022, "preset": "gpt3-175b", "batch": 16}
    whole = of(line, **options)
    split = of(f"{line},schedule=zero_bubble_h1", **options)
    wide = of(f"{line},schedule=zero_bubble_h2", **options)
    bubbles = [one.time.bubble_s for one in (whole, split, wide)]
    assert bubbles[2] < bubbles[1] < 0.6 * bubbles[0]
    # It keeps all that W needs until then, and has no stash.
    assert split.memory.stash_bytes == 0
    assert split.memory.in_flight == whole.memory.in_flight
    assert wide.memory.in_flight > whole.memory.in_flight


def test_both_executions_have_a_time_and_hops_in_a_v_go_both_ways():
    line = "stage=4,microbatches=16,precision=bf16,schedule="
    times = {
        (name, execution): of(
            f"{line}{name},chunks={SCHEDULES[name].default_chunks},"
            f"execution={execution}"
        )
        for name in ("zero_bubble_h2", "zero_bubble_v")
        for execution in ("uniform", "divergent")
    }
    for found in times.values():
        assert 0 < found.time.bubble_s < found.step_s
    hops = {
        key: sum(
            one.wire_bytes
            for one in found.collectives
            if one.kind == "collective-permute"
        )
        for key, found in times.items()
    }
    ticks = layout_ticks(split_layout("zero_bubble_v", microbatches=16))
    straight = layout_ticks(split_layout("zero_bubble_h2", microbatches=16))
    expected = 2 * (ticks.forward_ticks + ticks.down_hops)
    expected /= straight.forward_ticks + straight.down_hops
    ratio = hops["zero_bubble_v", "uniform"] / hops["zero_bubble_h2", "uniform"]
    assert ratio == pytest.approx(expected)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_planned_bubbles_are_near_the_published_ones(index):
    """Compare the 14.6B model by its longest span of a stage, as Qi et al. 2024."""
    data = published()["zero_bubble_2401_10241"]
    cells = [row for row in data["profile_and_bubble"] if row["model"] == "14.6B"]
    model, cell = data["models"]["14.6B"], cells[index]
    sizes = {key: model[key] for key in ("layers", "hidden", "heads")}
    workload = dataclasses.replace(
        SHAPES["gpt3-175b"], ffn=0, head_dim=0, kv_heads=0, **sizes
    )
    for name, column in (("1f1b", "1F1B"), ("zero_bubble_h1", "ZB-H1")):
        layout = split_layout(
            name, stage=model["p"], microbatches=cell["m"], precision="bf16"
        )
        run = estimate(
            workload,
            cluster_of("a100-80gb", devices=model["p"]),
            layout,
            global_batch=cell["m"] * model["mbs"],
            seq=data["seq"],
            execution=MEGATRON_2023,
            stage_blocks=(2, *[3] * (model["p"] - 2), 2),
        ).run
        stages = stage_times(run)
        seconds = (
            [stage.forward.total_s for stage in stages],
            [stage.input_grad.total_s for stage in stages],
            [stage.weight_grad.total_s for stage in stages],
        )
        longest_s = cell["m"] * max(map(sum, zip(*seconds, strict=True)))
        bubble = 1 - longest_s / span_s(layout, *seconds)
        least, most = (0.8, 1.1) if name == "1f1b" else (0.9, 1.1)
        assert least < bubble / cell["bubble"][column] < most
