"""Mixed hardware: its name, stages by speed, and plans between those of each kind."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from meshpar.cli.main import main
from meshpar.hardware.platforms import compiler_options_for
from meshpar.machine.mesh import absent_mesh, device_kinds
from meshpar.parallel.pipeline.rank_layers import mesh_hindrance
from meshpar.planner.cost.by_speed import by_speed
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import fullest_memory, rank_memories
from meshpar.planner.cost.step_time import step_time
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import execution_of
from meshpar.planner.machine.mixed import joined
from meshpar.planner.search.mixed import run_bounds
from meshpar.planner.search.search import Request, possible_meshes, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import SHAPES, workload_of
from meshpar.schedules.stage_splits import split_evenly

FAST, SLOW = (cluster_of(name, devices=32) for name in ("h100", "a100"))
MIXED = cluster_of("h100:32+a100:32")
PLAIN_FAST = cluster_of("h100", devices=64)
ALL_FAST = joined(FAST, FAST)
WORKLOAD = SHAPES["llama3-8b"]
SMALL = workload_of(
    "layers=8,hidden=2048,heads=16,kv_heads=16,ffn=8192,vocab=32000,seq=2048"
)
MORE = "remat=full,precision=bf16"


MEGATRON = execution_of("megatron-core")


def slowed(cluster, factor):
    """The cluster of devices that are slower in all their work."""
    device = cluster.device
    peaks = {dtype: peak / factor for dtype, peak in device.peak_flops.items()}
    slow = replace(
        device,
        peak_flops=peaks,
        memory_bytes_per_s=device.memory_bytes_per_s / factor,
        name="slow-gpu",
    )
    return replace(cluster, device=slow)


HALF = slowed(FAST, 2)


def estimated(cluster, layout, workload=WORKLOAD, batch=256, seq=None):
    layout = f"{layout},{MORE}"
    return estimate(workload, cluster, layout, global_batch=batch, seq=seq)


def test_a_mix_has_the_devices_of_its_parts_and_the_least_of_each_number():
    assert MIXED.num_devices == 64 and MIXED.parts == (FAST, SLOW)
    assert MIXED.text == "32 x h100-80gb on 4 hosts + 32 x a100-80gb on 4 hosts"
    fast, slow, both = FAST.device, SLOW.device, MIXED.device
    assert both.usable_bytes == min(fast.usable_bytes, slow.usable_bytes)
    for rate, part in (
        ("network_bytes_per_s", "network"),
        ("link_bytes_per_s", "link"),
    ):
        achieved = [
            getattr(one, rate) * getattr(one.efficiency, part)
            for one in (fast, slow, both)
        ]
        assert achieved[2] == pytest.approx(min(achieved[:2]))
    peak = 32 * (fast.peak_flops["bf16"] + slow.peak_flops["bf16"])
    assert MIXED.peak_flops("bf16") == peak


@pytest.mark.parametrize(
    "hardware, options, key, values",
    [
        ("h100:8+x100:8", {}, "hardware.unknown_device", ["x100"]),
        ("h100+a100:8", {}, "hardware.uncounted_part", ["h100"]),
        ("h100:8+a100:0", {}, "hardware.uncounted_part", ["a100:0"]),
        ("h100:8+", {}, "hardware.uncounted_part", ["h100:8+"]),
        ("h100:8+h100-80gb:8", {}, "hardware.repeated_part", ["h100-80gb"]),
        ("h100:8+a100:8", {"devices": 16}, "hardware.counted_twice", []),
        ("h100:8+v5p:2x2x2", {}, "hardware.mixed_platforms", ["gpu", "tpu"]),
        ("v5e:2x2+v6e:2x2", {}, "hardware.mixed_slices", ["tpu-v5e", "tpu-v6e"]),
        ("h100:8+a100:8+h200:8+b200:8", {}, "hardware.too_many_kinds", [4, 3]),
    ],
)
def test_a_mix_that_is_none_is_refused(hardware, options, key, values, refuses):
    lists_devices = key == "hardware.unknown_device"
    with refuses(key, *values, words=not lists_devices):
        cluster_of(hardware, **options)


@pytest.mark.parametrize("layout", ["fsdp=64", "data=8,fsdp=8", "fsdp=16,tensor=4"])
def test_two_equal_parts_are_one_cluster_of_that_kind(layout):
    one, two = (
        estimated(cluster, layout)
        for cluster in (cluster_of("h100", devices=64), ALL_FAST)
    )
    assert two.time == one.time
    assert two.memory == one.memory and two.mfu == pytest.approx(one.mfu)
    assert two.half_network_step_s == pytest.approx(one.half_network_step_s)


def test_stages_on_two_equal_parts_differ_in_the_link_between_alone():
    layout = "fsdp=32,stage=2,microbatches=8"
    one, two = (
        estimated(cluster, layout)
        for cluster in (cluster_of("h100", devices=64), ALL_FAST)
    )
    assert two.memory == one.memory
    assert two.run.link("stage").name == "network"
    assert two.run.link("fsdp").name == one.run.link("fsdp").name == "network"
    # Hops cross the network, and every device of a host is in one group of `fsdp`.
    assert two.run.link("fsdp").inner == 2 * one.run.link("fsdp").inner
    assert two.time.optimizer_s == one.time.optimizer_s


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=64",
        "data=4,fsdp=4,tensor=4",
        "fsdp=32,stage=2,microbatches=8",
        "fsdp=8,stage=8,microbatches=8",
        "fsdp=16,stage=4,microbatches=8,chunks=2,schedule=interleaved_1f1b",
        "fsdp=16,stage=4,microbatches=8,schedule=zero_bubble_h1,execution=divergent",
        "fsdp=8,stage=4,tensor=2,microbatches=8",
    ],
)
def test_a_step_is_between_those_of_the_fast_and_the_slow_kind_alone(layout):
    fast, mixed, slow = (
        estimated(cluster, layout)
        for cluster in (ALL_FAST, joined(FAST, HALF), joined(HALF, HALF))
    )
    assert fast.step_s < mixed.step_s <= slow.step_s * (1 + 1e-9)
    faster = replace(mixed.run, layout=replace(mixed.run.layout, splits=()))
    assert step_time(by_speed(faster)).step_s <= mixed.step_s


def every_split(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "hardware", ["h100:4+a100:4", "a100:2+h100:6", "b200:4+a100:4"]
)
@pytest.mark.parametrize("fewer", [0, 1])
@pytest.mark.parametrize(
    "schedule", ["stage=4,microbatches=8", "stage=4,schedule=gpipe,microbatches=4"]
)
def test_blocks_by_speed_are_the_best_of_all_that_fit(hardware, fewer, schedule):
    run = estimated(cluster_of(hardware), f"fsdp=2,{schedule}", SMALL, 32).run
    every = [
        replace(run, stage_blocks=blocks, layout=replace(run.layout, splits=blocks))
        for blocks in every_split(SMALL.layers, 4)
    ]
    most = max(by_speed(run).stage_blocks) - fewer
    capacity = max(
        fullest_memory(one).total_bytes
        for one in every
        if max(one.stage_blocks) == most
    )
    seconds = [
        step_time(one).step_s
        for one in every
        if fullest_memory(one).total_bytes <= capacity
    ]
    found = by_speed(run, capacity)
    assert len(every) == 35 and 0 < len(seconds) < 35
    assert fullest_memory(found).total_bytes <= capacity
    assert step_time(found).step_s == pytest.approx(min(seconds))


def test_blocks_by_speed_of_three_kinds_are_the_best_of_all():
    run = estimated(
        cluster_of("b200:2+h100:2+a100:2"), "fsdp=2,stage=3,microbatches=8", SMALL, 32
    ).run
    found = by_speed(run).stage_blocks
    seconds = {
        blocks: step_time(replace(run, stage_blocks=blocks)).step_s
        for blocks in every_split(SMALL.layers, 3)
    }
    assert seconds[found] == min(seconds.values()) < seconds[split_evenly(8, 3)]
    assert found == tuple(sorted(found, reverse=True))


def test_stages_stay_even_where_a_block_communicates_or_devices_are_alike():
    for cluster, layout in (
        (MIXED, "fsdp=8,stage=2,tensor=4,microbatches=8"),
        (ALL_FAST, "fsdp=32,stage=2,microbatches=8"),
    ):
        run = estimated(cluster, layout).run
        assert by_speed(run) == run
    # There every rank computes as many blocks as the longest stage has.
    uneven = "fsdp=8,stage=2,tensor=4,microbatches=8,splits=20/12"
    even = estimated(MIXED, "fsdp=8,stage=2,tensor=4,microbatches=8")
    assert estimated(MIXED, uneven).step_s > even.step_s


def test_every_rank_has_places_for_the_blocks_of_the_longest_stage():
    found = estimated(MIXED, "fsdp=32,stage=2,microbatches=8,splits=9/23")
    swapped = estimated(MIXED, "fsdp=32,stage=2,microbatches=8,splits=23/9")
    assert found.memory.total_bytes == swapped.memory.total_bytes
    own = max(memory.total_bytes for memory in rank_memories(found.run))
    assert found.memory.total_bytes >= own


CONSTRAINTS = Constraints.parse(
    keep=["remat=full,schedule=1f1b,zero=1,sequence_parallel=false"], forbid=["context"]
)


@pytest.mark.parametrize("hardware", ["h100:4+a100:4", "h100:6+a100:2"])
def test_a_search_finds_the_fastest_of_all_layouts_and_no_bound_exceeds_one(hardware):
    request = Request(
        workload=SMALL,
        cluster=cluster_of(hardware),
        global_batch=16,
        constraints=CONSTRAINTS,
    )
    capacity = request.capacity_bytes
    bounds = run_bounds(request.run, capacity)
    seconds = []
    for leaf in possible_meshes(request, bounds)[0]:
        for variant in leaf.choices.variants():
            run = bounds.run(leaf.mesh, variant)
            needed = fullest_memory(run).total_bytes
            step_s = step_time(run).step_s
            for bound in (leaf.bound, bounds.bound(leaf.mesh, variant)):
                assert bound.step_s <= step_s and bound.memory_bytes <= needed
            if needed <= capacity:
                seconds.append(step_s)
    found = search(request, num_plans=1)
    assert len(seconds) > 20
    assert found.plans[0].step_s == pytest.approx(min(seconds))


def test_a_plan_is_between_those_of_each_kind_alone():
    request = Request(
        workload=SMALL, cluster=MIXED, global_batch=512, constraints=CONSTRAINTS
    )
    fast, mixed, slow = (
        search(replace(request, cluster=cluster), num_plans=1).plans[0]
        for cluster in (ALL_FAST, joined(FAST, HALF), joined(HALF, HALF))
    )
    assert fast.step_s < mixed.step_s < slow.step_s
    assert mixed.run.layout.splits or mixed.run.layout.data_splits


def test_a_plan_says_which_stages_lie_on_which_devices_and_why():
    layout = "fsdp=32,stage=2,microbatches=8"
    by_speed_s = estimated(MIXED, f"{layout},splits=23/9").step_s
    even = estimated(MIXED, layout)
    first, second, why = even.placement.lines
    assert first.startswith(
        "stage 0 of 16 blocks on 32 x h100-80gb on 4 hosts: a micro"
    )
    assert second.startswith(
        "stage 1 of 16 blocks on 32 x a100-80gb on 4 hosts: a micr"
    )
    assert why.startswith(
        f"splits=23/9, by the speed of the devices, would take {by_speed_s:.3g} s"
    )
    parts = even.as_json()["parts"]
    assert [part["blocks"] for part in parts] == [[16], [16]]
    assert [part["places"] for part in parts] == [[0], [1]]
    assert parts[0]["tick_s"] < parts[1]["tick_s"]
    shared = estimated(MIXED, "fsdp=64").placement
    assert "equal shares of fsdp wait for a100-80gb" in shared.why
    assert [part.places for part in shared.parts] == [range(32), range(32, 64)]
    apart = estimated(MIXED, "fsdp=8,stage=2,tensor=4,microbatches=8").placement
    assert "'tensor' is in the blocks" in apart.why
    assert "parts" not in estimated(FAST, "fsdp=32").as_json()


@pytest.mark.parametrize(
    ("hardware", "data", "fsdp"),
    [("h100:4+a100:4", 2, 4), ("h100:2+a100:6", 4, 2), ("b200:4+h100:2+a100:2", 4, 2)],
)
def test_microbatches_by_speed_are_the_best_of_all(hardware, data, fsdp):
    layout = f"data={data},fsdp={fsdp},microbatches=4"
    run = estimated(cluster_of(hardware), layout, SMALL, 32).run
    ways = (
        counts
        for counts in itertools.product(range(1, 4 * data), repeat=data)
        if sum(counts) == 4 * data
    )
    seconds = {
        counts: step_time(
            replace(run, layout=replace(run.layout, data_splits=counts))
        ).step_s
        for counts in ways
    }
    found = by_speed(run)
    assert step_time(found).step_s == min(seconds.values()) < step_time(run).step_s
    assert seconds[found.layout.data_counts] == min(seconds.values())


def test_even_parts_of_data_take_the_same_time_in_either_form():
    layout = "data=2,fsdp=32,microbatches=4,fsdp_prefetch=off"
    one, two = (estimated(MIXED, layout + more) for more in ("", ",data_splits=4/4"))
    assert two.step_s == pytest.approx(one.step_s)
    assert two.memory == one.memory and two.collectives == one.collectives


def test_a_plan_says_how_many_microbatches_each_kind_runs_and_why():
    layout = "data=2,fsdp=32,microbatches=4"
    uneven = estimated(MIXED, f"{layout},data_splits=6/2")
    even = estimated(MIXED, layout)
    assert even.placement.why.startswith(
        "data_splits=6/2, by the speed of the devices, would take "
        f"{uneven.step_s:.3g} s instead of {even.step_s:.3g} s"
    )
    assert "by the speed of their devices" in uneven.placement.why
    assert [part["microbatches"] for part in uneven.as_json()["parts"]] == [6, 2]
    assert "6/2 microbatches" in uneven.run.share
    for more, why in (
        ("fsdp=4,tensor=8,microbatches=4", "tensor=8"),
        ("fsdp=32", "microbatches=1"),
        ("fsdp=32,microbatches=4,zero_axes=data/fsdp", "zero=3"),
    ):
        assert (
            f"{why} keeps them even" in estimated(MIXED, f"data=2,{more}").placement.why
        )


def test_a_mesh_that_lies_over_no_part_whole_is_refused(refuses):
    cluster = cluster_of("h100:32+a100:16")
    found = estimated(cluster, "fsdp=16,stage=3,microbatches=16")
    assert [part.places for part in found.placement.parts] == [range(2), range(2, 3)]
    with refuses("hardware.no_crossing_axis", 32, 16, 48):
        estimated(cluster, "data=2,fsdp=2,tensor=4,context=3", batch=12, seq=8190)


def test_what_is_planned_for_one_kind_refuses_a_mix(refuses, refuses_command):
    with refuses("hardware.mixed", "megatron-core"):
        estimate(WORKLOAD, MIXED, "fsdp=64", global_batch=64, execution=MEGATRON)
    with refuses("hardware.mixed", "megatron-core"):
        Request(workload=SMALL, cluster=MIXED, global_batch=64, execution=MEGATRON)
    hardware = ["--hardware", "h100:8+a100:8"]
    estimates = ["estimate", *hardware, "--layout", "fsdp=16", "--preset"]
    refuses_command([*estimates, "llama3-8b", "--slots", "4"], "hardware.mixed")
    refuses_command([*estimates, "tiny-unet3d"], "hardware.mixed")
    plans = ["plan", "--preset", "llama3-8b", *hardware, "--global-batch", "16"]
    refuses_command([*plans, "--curve", "strong"], "hardware.mixed")
    refuses_command([*plans, "--measure", "1"], "hardware.mixed")
    with refuses("hardware.mixed", "--mesh-order"):
        estimate(WORKLOAD, MIXED, "fsdp=64", global_batch=64, order="fsdp")
    with refuses("hardware.mixed", "maxtext"):
        maxtext = execution_of("maxtext")
        estimate(WORKLOAD, MIXED, "fsdp=64", global_batch=64, execution=maxtext)


def test_the_command_prints_where_stages_lie(capsys):
    words = "--preset llama3-8b --seq 2048 --hardware h100:8+a100:8 --layout"
    layout = f"fsdp=8,stage=2,microbatches=4,splits=23/9,{MORE}"
    assert main(["estimate", *words.split(), layout, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["device"] for part in parts] == ["h100-80gb", "a100-80gb"]
    assert [part["blocks"] for part in parts] == [[23], [9]]


def test_the_command_to_train_puts_the_crossing_axis_outermost(capsys):
    words = "--preset tiny --seq 64 --global-batch 16 --hardware h100:2+a100:2 --keep"
    kept = "data=2,stage=2,microbatches=4,schedule=1f1b,remat=full"
    assert main(["plan", *words.split(), kept]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("run it, which no one has on several kinds of GPU")
    assert last.endswith(" --mesh-order stage,data")


def test_ranks_leave_places_out_on_several_kinds_of_accelerators_alone():
    one, two = (
        SimpleNamespace(
            devices=np.array([SimpleNamespace(device_kind=k) for k in kinds])
        )
        for kinds in ("HH", "HA")
    )
    shape = {"data": 2, "stage": 4}
    assert mesh_hindrance(shape, "gpu", device_kinds(one)) is not None
    assert mesh_hindrance(shape, "gpu", device_kinds(two)) is None
    assert mesh_hindrance({**shape, "tensor": 2}, "gpu", device_kinds(two)) is not None
    assert device_kinds(absent_mesh("stage=4")) == 1
    # Their programs are scheduled without the latencies of either kind.
    plain = compiler_options_for("gpu")
    both = compiler_options_for("gpu", several_kinds=True)
    (name,) = both.keys() - plain.keys()
    assert name.endswith("sol_latency_estimator") and both[name] is False


def test_the_picture_has_the_kinds_and_their_stages_in_the_order_of_the_hosts():
    pytest.importorskip("plotly")
    from meshpar.cli.report.laid_out import laid_out
    from meshpar.cli.report.show_page import device_grid, shards_plot, show_page
    from meshpar.models.presets import build

    layout = f"data=2,stage=2,microbatches=2,splits=3/1,{MORE}"
    plan = estimate(
        SHAPES["tiny"], cluster_of("h100:2+a100:2"), layout, global_batch=4, seq=64
    )
    grid = device_grid(plan.run)
    labels = [button.label for button in grid.layout.updatemenus[0].buttons]
    assert labels == [
        f"coloured by {one}" for one in ("kind of device", "stage", "data")
    ]
    assert grid.data[0].z.ravel().tolist() == [0, 0, 1, 1]
    found = laid_out(build("tiny"), plan)
    shards = shards_plot(found).data[0]
    row = next(at for at, path in enumerate(shards.y) if path.startswith("blocks"))
    # Stages, not shares of the batch, are on the kinds: 0 and 1 have the same layers.
    assert list(shards.z[row]) == [0, 0, 1, 1]
    text = show_page(found)
    assert "stage 1 of 1 blocks on 2 x a100-80gb on 1 host" in text
    assert "stage outermost and tensor innermost" in text
    first, *_, last = (events[0] for events in found.timeline.events)
    assert first[2] - first[1] != last[2] - last[1]


def test_the_timeline_is_of_the_part_of_data_that_takes_longest():
    from meshpar.cli.report.laid_out import laid_out
    from meshpar.models.presets import build

    layout = f"data=4,microbatches=4,data_splits=7/1,{MORE}"
    plan = estimate(
        SHAPES["tiny"], cluster_of("h100:2+a100:2"), layout, global_batch=16, seq=64
    )
    timeline = laid_out(build("tiny"), plan).timeline
    assert timeline.schedule.num_microbatches == 7
    fast, _ = plan.as_json()["parts"]
    assert timeline.end_s == pytest.approx(7 * fast["tick_s"])
