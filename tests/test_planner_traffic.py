"""Time and bytes of one collective are of the same passes: exposed = bytes / speed."""

import dataclasses

import pytest

from meshpar.layout import Layout
from meshpar.planner.cost.activations import kept_bytes, offloaded_bytes
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.pipeline_time import lock_step
from meshpar.planner.cost.recomputation import recomputation
from meshpar.planner.cost.run import rank_parameters, routed_parameters, update_bytes
from meshpar.planner.cost.seconds import (
    LAST_BACKWARD,
    LAYER,
    exposed,
    members,
    row_s,
)
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import block_rows, end_rows, hop_rows, weight_rows
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import cluster_of, device_of
from meshpar.planner.machine.collective_cost import wire_bytes
from meshpar.planner.machine.execution import MEGATRON_2023, MESHPAR
from meshpar.planner.search.bounds import Bounds
from meshpar.planner.search.space import layout_variant
from meshpar.planner.workload.shapes import SHAPES

BARE = dataclasses.replace(MESHPAR, measured_overlap=False)


def of(layout, *, preset="llama3-8b", execution=BARE, seq=4096, global_batch=32):
    """The estimate where nothing but bytes takes time on a link."""
    layout, device = Layout.parse(layout), device_of("h100-80gb")
    prompt = dataclasses.replace(device.efficiency, hop_s=0.0, spread=0.0, launch_s=0.0)
    return estimate(
        SHAPES[preset],
        Cluster(
            device=dataclasses.replace(device, efficiency=prompt),
            devices_per_host=layout.num_devices,
        ),
        layout,
        global_batch=global_batch,
        seq=seq,
        execution=execution,
    )


def wire_s(found, mesh_axis, *kinds):
    """Seconds of all bytes over a mesh axis alone."""
    sent = sum(
        collective.wire_bytes
        for collective in found.collectives
        if collective.mesh_axes == (mesh_axis,)
        and (not kinds or collective.kind in kinds)
        and "loss" not in collective.reason
    )
    return sent / found.run.link(mesh_axis).bytes_per_s


@pytest.mark.parametrize("more", ["", ",sequence_parallel=true"])
@pytest.mark.parametrize(
    "remat",
    [
        "none",
        "selective",
        "dots",
        "full",
        "save:attention_qkv",
        "save:attention_out",
        "save:mlp_gate_up",
    ],
)
def test_tensor_is_exposed_for_as_long_as_its_bytes_take(remat, more):
    found = of(f"tensor=8,microbatches=4,precision=bf16,remat={remat}{more}")
    # Sequence parallelism gathers a gradient of the embedding's rows besides.
    rel = 0.01 if more else 1e-9
    expected_s = pytest.approx(wire_s(found, "tensor"), rel=rel)
    assert found.time.exposed_s["tensor"] == expected_s


@pytest.mark.parametrize(
    "mesh_axis, layout",
    [
        ("tensor", "tensor=8,sequence_parallel=true,remat=full,precision=bf16"),
        ("fsdp", "fsdp=8,remat=full,precision=bf16"),
    ],
)
def test_over_a_whole_slice_scatters_take_the_time_and_bytes_of_sums(mesh_axis, layout):
    device = device_of("tpu-v5p")
    prompt = dataclasses.replace(device.efficiency, hop_s=0.0, spread=0.0, launch_s=0.0)
    found = estimate(
        SHAPES["llama3-8b"],
        Cluster(device=dataclasses.replace(device, efficiency=prompt), torus=(2, 2, 2)),
        Layout.parse(layout),
        global_batch=32,
        seq=4096,
        execution=BARE,
    )
    kinds = {one.kind for one in found.collectives if one.wire_bytes > 1e9}
    assert kinds == {"all-gather", "all-reduce"}
    expected_s = pytest.approx(wire_s(found, mesh_axis), rel=0.01)
    assert found.time.exposed_s[mesh_axis] == expected_s


@pytest.mark.parametrize("remat", ["none", "full", "save:attention_out", "selective"])
@pytest.mark.parametrize("attention", ["ring", "allgather", "ulysses"])
def test_context_is_exposed_for_as_long_as_its_bytes_take(attention, remat):
    text = f"context=8,attention={attention},precision=bf16,remat={remat},zero=0"
    found = of(text, global_batch=1)
    kinds = "collective-permute", "all-gather", "reduce-scatter", "all-to-all"
    moved_s = wire_s(found, "context", *kinds)
    reduced_s = wire_s(found, "context", "all-reduce")
    exposed_s = found.time.exposed_s["context"]
    if attention == "ring":
        assert reduced_s <= exposed_s * (1 + 1e-9) <= (reduced_s + moved_s)
    else:
        assert exposed_s == pytest.approx(moved_s + reduced_s)


def test_what_attention_repeats_sends_keys_and_values_again():
    none, full = (
        wire_s(
            of(f"context=8,precision=bf16,remat={remat}", global_batch=1),
            "context",
            "collective-permute",
        )
        for remat in ("none", "full")
    )
    # 7 hops each way of bf16, 8 of fp32 gradients; and 7 again.
    assert full == pytest.approx((7 + 7 + 2 * 8 + 7) / (7 + 7 + 2 * 8) * none)


@pytest.mark.parametrize("remat", ["none", "full", "save:experts_gate_up"])
def test_experts_are_exposed_for_as_long_as_their_bytes_take(remat):
    layout = f"expert=8,precision=bf16,remat={remat}"
    found = of(layout, preset="mixtral-8x7b", global_batch=8)
    assert found.time.exposed_s["expert"] == pytest.approx(wire_s(found, "expert"))


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_tick_of_every_chunk_pays_for_the_shared_ends(chunks):
    more = f",schedule=interleaved_1f1b,chunks={chunks}" if chunks > 1 else ""
    found = of(f"stage=4,microbatches=16,precision=bf16{more}")
    layout, link = found.run.layout, found.run.link("stage")
    steps = lock_step(layout.schedule, 4, 16, chunks)
    # No head while the pipeline fills.
    assert steps.forward_ticks == steps.backward_ticks
    assert steps.head_ticks == steps.forward_ticks - (4 * chunks - 1)
    ends_s = wire_s(found, "stage", "all-gather", "reduce-scatter")
    hops_s = wire_s(found, "stage", "collective-permute")
    a_tick_s = 2 * ends_s / (steps.forward_ticks + steps.head_ticks)
    a_tick_s += hops_s / steps.forward_ticks
    reduced_s = wire_s(found, "stage", "all-reduce")
    assert link.name == "host"
    exposed_s = found.time.exposed_s["stage"]
    assert exposed_s == pytest.approx(16 * chunks * a_tick_s + reduced_s)


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_chunk_of_a_schedule_sends_its_hops(chunks):
    more = f",schedule=interleaved_1f1b,chunks={chunks}" if chunks > 1 else ""
    layout = f"stage=4,microbatches=16,precision=bf16{more}"
    found = of(layout, execution=dataclasses.replace(BARE, lock_step=False))
    (row,) = (one for one in found.collectives if one.kind == "collective-permute")
    # Of 2 sequences of 4096 tokens of 4096 values of 2 bytes, up and down.
    assert row.wire_bytes == 2 * 16 * chunks * (2 * 4096 * 4096 * 2)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=8",
        "fsdp=8,microbatches=4",
        "fsdp=8,microbatches=4,fsdp_gather=microbatch",
    ],
)
def test_zero_3_is_exposed_for_as_long_as_its_bytes_take_ends_included(layout):
    found = of(f"{layout},precision=bf16")
    assert found.time.exposed_s["fsdp"] == pytest.approx(wire_s(found, "fsdp"))


def test_a_backward_repeats_what_it_does_not_find():
    def backward(remat):
        run = of(f"tensor=8,precision=bf16,remat={remat}").run
        seconds = block_time(run, moe=False).backward.total_s
        return recomputation(run, moe=False), seconds

    least, most = backward("selective"), backward("full")
    for name in ("attention_qkv", "attention_out", "mlp_gate_up"):
        assert backward(f"save:{name}")[1] < most[1]
    every = "save:attention_qkv/attention_out/mlp_gate_up"
    # The same is repeated, and less put aside.
    assert backward(every)[0] == least[0]
    assert backward(every)[1] <= least[1] < most[1]
    assert backward("save:mlp_hidden")[0] == most[0]


def test_recomputed_kernels_are_launched_too():
    device = device_of("h100-80gb")
    slow = dataclasses.replace(device.efficiency, launch_s=1.0)
    added = {}
    for remat in ("none", "full"):
        found = of(f"precision=bf16,remat={remat}", global_batch=1)
        cluster = Cluster(
            device=dataclasses.replace(device, efficiency=slow), devices_per_host=1
        )
        run = dataclasses.replace(found.run, cluster=cluster)
        added[remat] = block_time(run, moe=False).backward.compute_s
    assert added["full"] - added["none"] == pytest.approx(23, abs=0.5)


def test_offloaded_residuals_wait_for_the_host_where_no_work_hides_them():
    def host_s(speed):
        layout = "precision=bf16,remat=offload:attention_qkv"
        run = of(layout, global_batch=4).run
        device = dataclasses.replace(run.cluster.device, host_bytes_per_s=speed)
        cluster = dataclasses.replace(run.cluster, device=device)
        run = dataclasses.replace(run, cluster=cluster)
        cost = block_time(run, moe=False)
        exposed = cost.forward.exposed_s, cost.backward.exposed_s
        return run, sum(one.get("host", 0.0) for one in exposed)

    run, slow_s = host_s(1e9)
    assert offloaded_bytes(run, moe=False) == run.tokens * (32 + 2 * 8) * 128 * 2
    there_and_back_s = (
        2 * offloaded_bytes(run, moe=False) / (run.cluster.device.efficiency.host * 1e9)
    )
    assert 0.8 * there_and_back_s < slow_s < there_and_back_s
    assert host_s(1e15)[1] == 0.0


def test_a_block_s_input_on_the_host_is_no_activation():
    run = of("precision=bf16,remat=offload:block_input", global_batch=4).run
    assert kept_bytes(run, moe=False) == 0
    full = of("precision=bf16,remat=full", global_batch=4).run
    assert offloaded_bytes(run, moe=False) == kept_bytes(full, moe=False) > 0


def test_optimizer_state_on_the_host_is_moved_twice_and_is_there_for_the_update_only():
    here, away = (
        of(f"fsdp=8,precision=bf16,optimizer_memory={memory}")
        for memory in ("device", "host")
    )
    state = here.memory.optimizer_bytes
    assert (away.memory.optimizer_bytes, away.memory.fetched_bytes) == (0, state)
    rest = away.memory.parameter_bytes + away.memory.gradient_bytes
    active = away.memory.activation_bytes + away.memory.other_bytes
    assert away.memory.total_bytes == rest + max(active, state)
    device = away.run.cluster.device
    achieved = device.efficiency.host * device.host_bytes_per_s
    moved_s = 2 * state / achieved
    assert away.time.optimizer_s - here.time.optimizer_s == pytest.approx(moved_s)


@pytest.mark.parametrize(
    "param_dtype, num_bytes",
    # Sum twice, Adam's moments or those and the master both ways, and the parameter.
    [("fp32", 8 + 16 + 8), ("bf16", 8 + 24 + 2), ("bf16_stochastic", 8 + 16 + 4)],
)
def test_the_update_moves_what_is_stored(param_dtype, num_bytes):
    run = of(f"precision=bf16,param_dtype={param_dtype}").run
    assert update_bytes(run) == num_bytes
    device = run.cluster.device
    speed = device.memory_bytes_per_s * device.efficiency.memory
    found = of(f"precision=bf16,param_dtype={param_dtype}").time.optimizer_s
    assert found == pytest.approx(rank_parameters(run, 0) * num_bytes / speed)


def rows_of(run):
    """The whole table."""
    ranks = range(run.layout.stage)
    return (
        *(row for moe in (False, True) for row in block_rows(run, moe=moe)),
        *weight_rows(run, moe=True),
        *(*end_rows(run), *hop_rows(run), *step_rows(run, ranks)),
    )


@pytest.mark.parametrize("execution", [BARE, MEGATRON_2023])
@pytest.mark.parametrize(
    "layout",
    [
        "data=2,fsdp=2,stage=2,tensor=2,microbatches=4,fsdp_gather=microbatch",
        "data=2,stage=2,tensor=2,microbatches=4,sequence_parallel=true,zero=1",
        "expert=4,context=2,remat=full",
        "fsdp=4,context=2,attention=allgather",
    ],
)
def test_a_row_takes_as_long_as_its_own_bytes(layout, execution):
    run = of(f"{layout},precision=bf16", preset="mixtral-8x7b", execution=execution).run
    rows = rows_of(run)
    assert {axis for row in rows for axis in row.mesh_axes} == {
        axis for axis, size in run.layout.mesh_shape.items() if size > 1
    }
    for row in rows:
        sent = row.times * wire_bytes(row.kind, row.payload_bytes, members(run, row))
        counted = 0.0 if row.only == "bytes" else sent
        speed = run.link(*row.mesh_axes).bytes_per_s
        assert row_s(run, row) == pytest.approx(counted / speed), row


def test_rows_beside_the_same_work_share_it():
    layout = "fsdp=8,microbatches=4,fsdp_gather=microbatch,precision=bf16"
    run = of(layout).run
    rows = [row for row in weight_rows(run, moe=False) if row.passes == "backward"]
    gather_s, scatter_s = (row_s(run, row) for row in rows)
    both_s = gather_s + scatter_s
    for work_s, left_s in (
        (0.0, both_s),
        (gather_s, scatter_s),
        (gather_s + scatter_s / 2, scatter_s / 2),
        (2 * both_s, 0.0),
    ):
        waits = exposed(run, rows, {LAYER: work_s, LAST_BACKWARD: 9.0}).exposed_s
        assert waits == {"fsdp": pytest.approx(left_s)}


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("attention", ["ring", "allgather", "ulysses"])
def test_a_bound_sums_gradients_over_context_too(attention, zero):
    """Over `data` alone they would leave every host, and the bound be too high.

    A bound lets a step's matmuls hide all that ZeRO-1 sends over `data`.
    """
    found = estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=16),
        f"data=2,context=8,attention={attention},zero={zero},precision=bf16",
        global_batch=16,
        seq=2048,
    )
    layout = found.run.layout
    bound = Bounds(found.run).bound(layout, layout_variant(layout))
    least = 0.5 if zero == 1 else 0.9
    assert least * found.step_s < bound.step_s <= found.step_s


@pytest.mark.parametrize(
    "layout, prefetches",
    [
        ("fsdp=8,precision=bf16", True),
        ("fsdp=8,precision=bf16,fsdp_prefetch=off", False),
        ("fsdp=4,stage=2,microbatches=4,fsdp_gather=microbatch,precision=bf16", False),
    ],
)
def test_nothing_is_hidden_of_blocks_that_do_not_prefetch(layout, prefetches):
    run = of(layout, execution=MESHPAR).run
    shares = [row.share for row in weight_rows(run, moe=False)]
    assert shares and all((share > 0) == prefetches for share in shares)


@pytest.mark.parametrize(
    "torus, layout, whole",
    [("tpu-v5p:4x4x4", "fsdp=64", False), ("tpu-v5e:4x4", "fsdp=16", True)],
)
def test_our_step_scatters_over_a_torus_of_three_dims(torus, layout, whole):
    def link(execution):
        cluster = cluster_of(torus)
        sizes = dict(global_batch=cluster.num_devices, seq=4096, execution=execution)
        return estimate(SHAPES["llama3-8b"], cluster, layout, **sizes).run.link("fsdp")

    assert link(BARE).scatters_whole
    assert link(MESHPAR).scatters_whole == whole


@pytest.mark.parametrize("every", [2, 8, 64])
@pytest.mark.parametrize(
    "layout", ["data=4", "data=4,fsdp=2,tensor=2", "data=2,zero=1,fsdp=2"]
)
def test_local_steps_send_over_data_the_parameters_once_an_interval(layout, every):
    found = of(f"{layout},sync_every={every},precision=bf16")
    (row,) = [one for one in found.collectives if "data" in one.mesh_axes]
    assert row.mesh_axes == ("data",) and row.kind == "all-reduce"
    data = found.run.layout.data
    parameters = rank_parameters(found.run, 0) / found.run.state_shards
    each = 2 * 4 * parameters * (data - 1) / data
    assert row.wire_bytes == pytest.approx(each / every)
    plain = of(f"{layout},precision=bf16")
    more = found.memory.optimizer_bytes - plain.memory.optimizer_bytes
    assert more == pytest.approx(8 * parameters)


def test_local_steps_send_experts_as_zero_shares_them_out():
    """They lie over `expert` already, so that `fsdp` alone shares them out."""
    layout = "data=2,fsdp=2,expert=4,zero_axes=fsdp/expert,sync_every=8"
    found = of(f"{layout},precision=bf16", preset="mixtral-8x7b")
    (row,) = [one for one in found.collectives if one.reason == "outer gradients"]
    routed = routed_parameters(found.run, 0)
    dense = rank_parameters(found.run, 0) - routed
    each = 2 * 4 * (dense / 8 + routed / 2) / 2
    assert row.wire_bytes == pytest.approx(each / 8)
