"""Step times: limits that hold whatever the constants are."""

import collections
import dataclasses

import numpy as np
import pytest

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.pipeline_time import (
    all_ticks_s,
    closed_form_lock_step,
    closed_form_s,
    lock_step,
    schedule_ticks,
    span_s,
)
from meshpar.planner.cost.step_time import straggler_fraction
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2022, MESHPAR, NANOTRON
from meshpar.planner.workload.shapes import SHAPES
from meshpar.schedules import StageTimes, make_schedule, simulate, tick_table


def of(layout, *, preset="llama3-8b", global_batch=64, hardware="h100-80gb", **options):
    layout = Layout.parse(layout)
    hosts = options.pop("hosts", None)
    return estimate(
        SHAPES[preset],
        cluster_of(hardware, devices=layout.num_devices, hosts=hosts),
        layout,
        global_batch=global_batch,
        seq=4096,
        **options,
    )


@pytest.mark.parametrize(
    "schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)]
)
@pytest.mark.parametrize("microbatches", [4, 13, 64])
def test_the_closed_form_is_the_replay_of_equal_stages(schedule, chunks, microbatches):
    layout = Layout(
        stage=4, microbatches=microbatches, schedule=schedule, chunks=chunks
    )
    stages = 4 * chunks
    times = [1.0] * stages, [2.0] * stages
    replayed = simulate(
        make_schedule(schedule, 4, microbatches, chunks),
        StageTimes(
            forward_s=times[0], input_grad_s=times[1], weight_grad_s=[0.0] * stages
        ),
    )
    assert span_s(layout, *times) == pytest.approx(replayed.end_s)
    assert closed_form_s(layout, *times) == pytest.approx(replayed.end_s, rel=0.03)


def test_a_slow_last_stage_sets_the_pace():
    layout = Layout(stage=4, microbatches=100)
    forward_s, backward_s = [1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0]
    replayed = simulate(
        make_schedule("1f1b", 4, 100),
        StageTimes(
            forward_s=forward_s, input_grad_s=backward_s, weight_grad_s=[0.0] * 4
        ),
    )
    assert span_s(layout, forward_s, backward_s) == pytest.approx(replayed.end_s)
    assert replayed.end_s == pytest.approx(600 + 9)


@pytest.mark.parametrize(
    "schedule, chunks, microbatches",
    [
        ("1f1b", 1, 40),
        ("gpipe", 1, 40),
        ("interleaved_1f1b", 2, 41),
        ("looped_bfs", 2, 40),
        ("1f1b", 1, 3),
    ],
)
def test_lock_step_without_the_whole_table_is_that_of_the_table(
    schedule, chunks, microbatches
):
    table = tick_table(make_schedule(schedule, 4, microbatches, chunks))
    steps = lock_step(schedule, 4, microbatches, chunks)
    assert steps.forward_ticks == table.num_forward_ticks
    assert steps.backward_ticks == table.num_backward_ticks
    assert steps.in_flight == table.peak_in_flight
    layout = Layout(
        stage=4, microbatches=microbatches, schedule=schedule, chunks=chunks
    )
    stages = 4 * chunks
    expected = table.num_forward_ticks + 2 * table.num_backward_ticks
    assert all_ticks_s(layout, [1.0] * stages, [2.0] * stages) == expected


def test_the_parts_of_a_step_add_up():
    found = of("data=2,stage=2,tensor=4,microbatches=8,precision=bf16")
    time = found.time
    parts = time.compute_s + time.bubble_s + sum(time.exposed_s.values())
    parts += time.optimizer_s + time.straggler_s + time.host_s
    assert parts == pytest.approx(found.step_s)
    assert min(time.compute_s, time.bubble_s, time.optimizer_s) > 0
    assert set(time.exposed_s) <= {"data", "stage", "tensor"}


def test_no_layout_beats_the_peak():
    for layout in (
        "precision=bf16",
        "fsdp=8,precision=bf16",
        "tensor=8,precision=bf16",
    ):
        assert 0 < of(layout).mfu < 1


def test_more_microbatches_shrink_the_bubble():
    bubbles = [
        of(f"stage=4,microbatches={count},precision=bf16").time.bubble_s
        for count in (4, 8, 16)
    ]
    assert bubbles == sorted(bubbles, reverse=True)


@pytest.mark.parametrize(
    ("execution", "low"),
    # A compiled loop stacks what blocks keep, and less of it with recomputation.
    [(MESHPAR, 1.1), (MEGATRON_2022, 1.2)],
)
def test_recomputing_everything_costs_a_forward(execution, low):
    none, full = (
        of(f"fsdp=8,precision=bf16,remat={remat}", execution=execution).time.compute_s
        for remat in ("none", "full")
    )
    assert low < full / none < 1.4


def test_a_slower_network_exposes_more_and_hides_nothing_of_tensor():
    near = of("data=2,tensor=4,precision=bf16", hosts=1)
    far = of("data=2,tensor=4,precision=bf16", hosts=4)
    assert far.time.exposed_s["tensor"] > 3 * near.time.exposed_s["tensor"]
    assert near.run.link("tensor").name == "host"
    assert far.run.link("tensor").name == "network"


def test_overlap_hides_reductions_and_gathers():
    hidden = of("data=8,precision=bf16", execution=NANOTRON)
    shown = of(
        "data=8,precision=bf16",
        execution=dataclasses.replace(NANOTRON, reduction_overlap=False),
    )
    assert "data" not in hidden.time.exposed_s and shown.time.exposed_s["data"] > 0
    ahead = of("fsdp=8,precision=bf16")
    behind = of(
        "fsdp=8,precision=bf16",
        execution=dataclasses.replace(MESHPAR, measured_overlap=False),
    )
    assert behind.time.exposed_s["fsdp"] > ahead.time.exposed_s.get("fsdp", 0.0)


def test_a_shared_head_spares_the_last_stage():
    """With a large vocabulary the usual placement loses much of the MFU."""
    shape = dataclasses.replace(SHAPES["llama3-8b"], vocab=512_000)
    layout = "stage=8,microbatches=64,precision=bf16,remat=none"
    shared, last = (
        estimate(
            shape,
            cluster_of("h100-80gb"),
            layout,
            global_batch=64,
            seq=2048,
            execution=execution,
        )
        for execution in (
            MESHPAR,
            dataclasses.replace(MESHPAR, shared_ends=False),
        )
    )
    assert shared.step_s < 0.75 * last.step_s


def test_context_and_expert_traffic_is_counted_on_their_axes():
    beside = dataclasses.replace(MESHPAR, measured_overlap=False)
    ring, gather = (
        of(
            f"context=8,attention={way},precision=bf16",
            global_batch=8,
            execution=beside,
        )
        for way in ("ring", "allgather")
    )
    assert ring.time.exposed_s.get("context", 0) <= gather.time.exposed_s["context"]
    line = "expert=8,zero=0,precision=bf16"
    experts = of(line, preset="mixtral-8x7b", global_batch=8)
    assert experts.time.exposed_s["expert"] > 0
    sent = collections.Counter()
    for collective in experts.collectives:
        sent[collective.kind] += collective.wire_bytes
    workload = SHAPES["mixtral-8x7b"]
    routed = workload.layers * workload.expert_parameters(moe=True)
    dense = workload.num_parameters - routed
    assert sent["all-reduce"] == 4 * dense * 2 * 7 / 8
    # Two of a token's eight choices and a quarter more, there and back, forward and
    # backward; with each its expert and weight, and back the weight's gradient.
    rows = 1.25 * 4096 * 2 * 7 / 8
    assert sent["all-to-all"] == 32 * rows * (4 * 4096 * 2 + 8 + 4)


@pytest.mark.parametrize("devices", [64, 512])
def test_the_slowest_device_is_the_largest_of_normal_values(devices):
    found = of(f"fsdp={devices},precision=bf16", global_batch=devices)
    spread = found.run.cluster.device.efficiency.spread
    values = np.random.default_rng(0).normal(size=(2000, devices)).max(axis=1)
    # The formula is that of infinitely many, which fewer come near from below.
    assert 0.8 < values.mean() * spread / straggler_fraction(found.run.cluster) < 1


def test_more_devices_wait_longer_for_the_slowest():
    few, many = of("fsdp=8,precision=bf16"), of("fsdp=64,precision=bf16")
    share = [found.time.straggler_s / found.step_s for found in (few, many)]
    assert share[0] < share[1] < 0.05


@pytest.mark.parametrize(
    "hardware, precision, fused",
    [
        ("h100-80gb", "bf16", True),
        ("h100-80gb", "fp32", False),
        ("tpu-v5p", "bf16", True),
        ("tpu-v5p", "fp32", False),
    ],
)
def test_attention_is_one_kernel_for_half_precision_only(hardware, precision, fused):
    layout, options = f"fsdp=16,precision={precision}", {"hardware": hardware}
    found = of(layout, global_batch=16, **options)
    without = dataclasses.replace(MESHPAR, fused_attention=False)
    stored = of(layout, global_batch=16, execution=without, **options)
    assert found.run.fused_attention == fused
    assert (found.step_s < stored.step_s) == fused
    # 16-bit or 32-bit softmax of every layer.
    scores = 32 * 32 * 4096**2 * found.run.dtype_bytes
    kept = found.memory.activation_bytes
    assert (kept < scores) == fused


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_are_summed_over_context_too(zero):
    """Its devices have other tokens of the same sequences."""
    found = of(f"fsdp=2,context=4,zero={zero},precision=bf16", global_batch=8)
    sums = {
        collective.mesh_axes: collective.wire_bytes
        for collective in found.collectives
        if collective.kind == "all-reduce"
    }
    parameters = SHAPES["llama3-8b"].num_parameters
    if zero == 0:
        assert sums == {("fsdp", "context"): 2 * 4 * parameters * 7 / 8}
    else:
        assert sums == {("context",): 2 * 4 * parameters / 2 * 3 / 4}
    axis = "fsdp" if zero == 0 else "context"
    free = dataclasses.replace(MESHPAR, reduction_bytes=0)
    none = of(
        f"fsdp=2,context=4,zero={zero},precision=bf16", global_batch=8, execution=free
    )
    wire_s = sum(sums.values()) / found.run.link("fsdp", "context").bytes_per_s
    saved_s = found.time.exposed_s[axis] - none.time.exposed_s.get(axis, 0.0)
    assert saved_s == pytest.approx(wire_s, rel=0.01)


@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)],
)
def test_lock_step_of_many_ranks_is_that_of_the_table(schedule, chunks, ranks):
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        sizes = (schedule, ranks, microbatches, chunks)
        table = schedule_ticks(make_schedule(*sizes), divergent=False)
        assert closed_form_lock_step(*sizes) == table, microbatches
    odd = 2 * ranks + 1
    assert closed_form_lock_step("interleaved_1f1b", ranks, odd, 2) is None
    table = schedule_ticks(make_schedule("1f1b", ranks, odd), divergent=False)
    assert closed_form_lock_step("1f1b", ranks, odd, 1) == table
