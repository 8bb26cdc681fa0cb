"""Programs of one's own, kernels, rails and buckets: each number does what it says."""

import dataclasses
import math

import pytest

from meshpar.cli.main import main
from meshpar.hardware.attention_kernels import (
    BACKWARD,
    KERNELS,
    OWN_KERNEL,
    PLATFORM_KERNEL,
)
from meshpar.hardware.devices import DEVICES
from meshpar.layout import Layout
from meshpar.layout.layout import SCALING_EXECUTIONS
from meshpar.planner.cost.block_time import (
    _matmuls_s,
    attention_linears,
    block_time,
    mlp_linears,
)
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.cost.expert_time import routed_linears
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import (
    Row,
    attention_backward_s,
    attention_forward_s,
    exposed,
    matmul_s,
    row_s,
)
from meshpar.planner.cost.step_time import stage_times, step_time
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import block_rows
from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.clusters import cluster_of, load_device
from meshpar.planner.machine.collective_cost import (
    all_reduce_s,
    hidden_share,
    hidden_shares,
    overlap_condition,
)
from meshpar.planner.machine.execution import (
    EXECUTIONS,
    LLM_FOUNDRY,
    MAXTEXT,
    MEGATRON_2023,
    MEGATRON_2024,
    MEGATRON_CORE,
    MESHPAR,
    NANOTRON,
    execution_of,
    load_execution,
)
from meshpar.planner.search.search import Request, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import SHAPES


def planned_run(layout, *, execution=MESHPAR, hardware="h100-80gb", global_batch=None):
    layout = Layout.parse(f"{layout},precision=bf16")
    return Run(
        workload=SHAPES["llama3-8b"],
        cluster=cluster_of(hardware, devices=layout.num_devices),
        layout=layout,
        execution=execution,
        global_batch=global_batch or layout.num_devices * layout.microbatches,
        seq=4096,
        stage_blocks=(32 // layout.stage,) * layout.stage,
    )


def toml(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_program_of_ones_own_starts_from_a_known_one(tmp_path):
    path = toml(
        tmp_path, 'like = "megatron-core"\ntensor_ring = false\nhost_s = 0.01\n'
    )
    expected = dataclasses.replace(
        MEGATRON_CORE, name="mine", tensor_ring=False, host_s=0.01
    )
    assert load_execution(path) == execution_of(str(path)) == expected


def test_a_program_may_give_every_field(tmp_path):
    def written(value):
        return str(value).lower() if isinstance(value, bool) else repr(value)

    lines = [f"{name} = {written(value)}" for name, value in vars(NANOTRON).items()]
    assert load_execution(toml(tmp_path, "\n".join(lines))) == NANOTRON


@pytest.mark.parametrize(
    "text, refusal",
    [
        (
            "like = 'megatron'",
            ("plan.unknown_execution", "'megatron'", "'megatron-core'"),
        ),
        (
            "like = 'nanotron'\ntensor_rings = true",
            ("plan.unknown_field", "'tensor_rings'", "'tensor_ring'"),
        ),
        (
            "like = 'nanotron'\nweight_bytes = 9",
            ("plan.field_out_of_range", "weight_bytes=9", 1, 8),
        ),
        (
            "like = 'nanotron'\nhost_s = -1.0",
            ("plan.field_out_of_range", "host_s=-1.0", 0),
        ),
        ("like = 'nanotron'\neager = 1", ("plan.wrong_field_type", "eager=1")),
        ("like = 'nanotron'\nrails = 1.5", ("plan.wrong_field_type", "rails=1.5")),
        (
            "like = 'nanotron'\nhost_s = nan",
            ("plan.field_out_of_range", "host_s=nan", 0),
        ),
        (
            "like = 'nanotron'\nattention_kernel = 'cuddn'",
            ("plan.unknown_attention_kernel", "'cuddn'", "'cudnn'"),
        ),
        ("name = 'mine'", ("plan.missing_field", "fused_attention", "execution")),
        ("like =", ("plan.unreadable_toml", "mine.toml")),
    ],
)
def test_a_program_that_cannot_be_is_refused(tmp_path, text, refusal, refuses):
    with refuses(*refusal, words=text != "like ="):  # Python's own, of its tomllib
        load_execution(toml(tmp_path, text))


def test_estimate_takes_a_program_of_ones_own(tmp_path, capsys):
    path = toml(tmp_path, 'like = "nanotron"\nhost_s = 2.0\n')
    words = ["estimate", "--preset", "llama3-8b", "--hardware", "h100", "--seq", "4096"]
    words += ["--layout", "fsdp=8,precision=bf16,remat=full"]
    assert main([*words, "--global-batch", "8", "--execution", str(path)]) == 0
    found = capsys.readouterr().out
    assert "run as mine" in found and "waiting for the host 2 s" in found


@pytest.mark.parametrize("head_dim, tflops", [(64, 284), (128, 319)])
def test_a_kernel_takes_as_long_as_its_paper_says(head_dim, tflops):
    """FlashAttention-2 on an H100, causal, 4,096 tokens (Shah et al. 2024, fig. 5)."""
    run = planned_run("data=1", execution=NANOTRON)
    shape = dataclasses.replace(run.workload, head_dim=head_dim)
    run = dataclasses.replace(run, workload=shape)
    flops = run.tokens * shape.attention_flops(4096) / 2
    forward_s = attention_forward_s(run)
    assert flops / forward_s == pytest.approx(tflops * 1e12, rel=0.02)
    assert attention_backward_s(run) == pytest.approx(2.5 * forward_s / BACKWARD)


def test_the_first_flash_attention_is_slow_backward():
    """30 to 50 % of an A100 forward, 25 to 35 % backward (Dao 2023, section 1)."""
    run = planned_run("data=1", execution=LLM_FOUNDRY, hardware="a100-80gb")
    flops = run.tokens * run.workload.attention_flops(4096) / 2
    for passes, least, most in (
        (flops / attention_forward_s(run), 0.30, 0.50),
        (2.5 * flops / attention_backward_s(run), 0.25, 0.35),
    ):
        assert least * 0.999 <= passes / 312e12 <= most * 1.001


def test_splash_makes_scores_again_in_one_kernel_of_five_matmuls_or_two_of_seven():
    run = planned_run("fsdp=8", hardware="tpu-v5p")
    assert run.attention.kernel == "splash"
    forward_s = attention_forward_s(run)
    assert attention_backward_s(run) == pytest.approx(2.5 * forward_s)
    # A whole sequence so long has too many partial sums; around a ring none is whole.
    long = dataclasses.replace(run, seq=1 << 20)
    assert attention_backward_s(long) == pytest.approx(3.5 * attention_forward_s(long))
    layout = Layout.parse("context=8,precision=bf16")
    ring = dataclasses.replace(long, layout=layout)
    assert attention_backward_s(ring) == pytest.approx(2.5 * attention_forward_s(ring))


def test_faster_kernels_are_faster_and_run_where_they_exist():
    seconds = [
        attention_forward_s(
            planned_run(
                "data=1",
                execution=dataclasses.replace(NANOTRON, attention_kernel=kernel),
            )
        )
        for kernel in ("flash-attention-2", "cudnn", "flash-attention-3")
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[2]
    on_tpu = planned_run("fsdp=8", execution=MAXTEXT, hardware="tpu-v5p")
    assert on_tpu.fused_attention
    assert not dataclasses.replace(on_tpu, execution=NANOTRON).fused_attention
    rings = [
        planned_run("context=8", execution=MAXTEXT, hardware=hardware)
        for hardware in ("h100-80gb", "tpu-v5p")
    ]
    assert [run.attention.kernel for run in rings] == ["cudnn", "splash"]
    kernels = {execution.attention_kernel for execution in EXECUTIONS.values()}
    assert kernels <= {*KERNELS, OWN_KERNEL, PLATFORM_KERNEL}


@pytest.mark.parametrize("hardware", ["mi300x", "mi325x", "mi355x"])
def test_on_amd_s_gpus_others_programs_have_a_kernel_and_ours_has_none(hardware):
    for name, execution in EXECUTIONS.items():
        run = planned_run("fsdp=8", hardware=hardware, execution=execution)
        if execution.attention_kernel == OWN_KERNEL:
            assert not run.fused_attention
            assert run.attention.obstacle in ("vendor", "")
        else:
            wanted = "composable-kernel" if execution.fused_attention else ""
            assert run.attention.kernel == wanted, name
    own = planned_run("fsdp=8", hardware=hardware).attention
    assert "NVIDIA" in own.words


def test_experts_that_compute_their_whole_capacity_take_as_much_longer():
    def experts_s(capacity: float) -> float:
        run = dataclasses.replace(
            planned_run("fsdp=8", hardware="tpu-v6e:2x4", execution=MAXTEXT),
            workload=SHAPES["mixtral-8x7b"],
            execution=dataclasses.replace(MAXTEXT, expert_capacity=capacity),
        )
        return sum(matmul_s(run, *sizes[:3]) for (sizes,) in routed_linears(run))

    assert experts_s(1.25) == pytest.approx(1.25 * experts_s(1.0), rel=0.05)


def test_tuned_matmuls_are_faster_where_a_device_says_so():
    def compute_s(hardware: str, tunes: bool) -> float:
        run = planned_run("fsdp=8", hardware=hardware, execution=MAXTEXT)
        execution = dataclasses.replace(MAXTEXT, tunes_matmuls=tunes)
        return matmul_s(dataclasses.replace(run, execution=execution), *[8192] * 3)

    device = DEVICES["h100-80gb"]
    ratio = device.efficiency.tuned_matmul / device.efficiency.matmul
    gain = compute_s("h100-80gb", False) / compute_s("h100-80gb", True)
    assert 1 < gain <= ratio  # the operands' traffic is not faster
    assert compute_s("tpu-v5p", True) == compute_s("tpu-v5p", False)


def test_a_device_of_ones_own_says_what_its_kernels_achieve(tmp_path, refuses):
    text = 'like = "h100"\n[attention_kernels]\nflash-attention-2 = [0.5, 20]\n'
    assert load_device(toml(tmp_path, text)).attention_kernels["flash-attention-2"] == (
        0.5,
        20,
        BACKWARD,
    )
    unknown, wrong_values = (
        "hardware.unknown_attention_kernel",
        "hardware.wrong_attention_kernel",
    )
    for wrong, *refusal in (
        ("flash-attention-4 = [0.5, 20]", unknown, "'flash-attention-4'"),
        ("splash = [1.5, 20]", wrong_values, "splash = [1.5, 20]"),
        ("splash = 0.5", wrong_values, "splash = 0.5"),
    ):
        with refuses(*refusal):
            load_device(toml(tmp_path, text.replace(text.splitlines()[2], wrong)))


def test_one_rail_is_as_fast_as_one_port():
    one = dataclasses.replace(MESHPAR, rails=1)
    every, single = (
        planned_run("fsdp=64", execution=execution).link("fsdp")
        for execution in (MESHPAR, one)
    )
    assert single.bytes_per_s == single.port_bytes_per_s == 50e9 * 0.9
    assert every.bytes_per_s == 450e9 * 0.8
    host = planned_run("fsdp=8", execution=one).link("fsdp")
    assert host.bytes_per_s == 450e9 * 0.8


def test_every_bucket_pays_for_the_way_around():
    whole = planned_run(
        "data=64", execution=dataclasses.replace(NANOTRON, bucket_bytes=0)
    )
    buckets = dataclasses.replace(whole, execution=NANOTRON)
    [row] = [row for row in step_rows(whole, (0,)) if row.kind == "all-reduce"]
    count = math.ceil(row.payload_bytes / NANOTRON.bucket_bytes)
    link = whole.link("data")
    each_s = all_reduce_s(row.payload_bytes / count, 64, link)
    assert row_s(buckets, row) == pytest.approx(count * each_s)
    assert row_s(buckets, row) > 1.2 * row_s(whole, row)


def test_trees_of_medium_size_achieve_less_than_rings():
    slow = Link(name="network", bytes_per_s=50e9, hop_s=0.0, inner=1)
    ring_s = 2 * 24e6 * 511 / 512 / 50e9
    assert all_reduce_s(24e6, 512, slow) == pytest.approx(ring_s)
    late = dataclasses.replace(slow, hop_s=14e-6)
    tree_s = 2 * 24e6 / (50e9 * 0.92 * 0.7) + 2 * 9 * 14e-6
    assert all_reduce_s(24e6, 512, late) == pytest.approx(tree_s)


def test_more_hosts_lower_the_bandwidth_that_is_achieved():
    """Of the same bytes on each device: steps of the ring take their time."""

    def achieved(devices):
        run = planned_run(f"fsdp={devices}")
        row = Row(("fsdp",), "all-gather", 436e6, "", "forward")
        return 436e6 / row_s(run, row)

    rates = [achieved(devices) for devices in (8, 64, 512, 2048)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] < 0.5 * rates[0]


def test_a_collective_takes_cores_from_what_runs_beside_it():
    run = planned_run("tensor=8", execution=MEGATRON_2023)
    row = Row(("tensor",), "all-reduce", 1e8, "", "backward", hidden_by="work")
    wire_s = row_s(run, row)
    cost = exposed(run, (row,), {"work": 1.0})
    assert cost.exposed_s == {"tensor": 0.0}
    assert cost.compute_s == pytest.approx(0.15 * wire_s)


def test_a_share_that_cannot_be_hidden_waits():
    run = planned_run("tensor=8", execution=MEGATRON_2023)
    row = Row(
        ("tensor",), "all-reduce", 1e8, "", "backward", hidden_by="work", share=0.6
    )
    cost = exposed(run, (row,), {"work": 1.0})
    assert cost.exposed_s["tensor"] == pytest.approx(0.4 * row_s(run, row))


def _hidden(axis, kind, layout=None, platform="gpu", *, in_parts=False):
    condition = overlap_condition(layout or Layout(), in_parts=in_parts)
    return hidden_share(condition, platform, (axis,), kind)


def test_the_program_of_this_library_hides_what_compiled_programs_hide():
    """A row for every axis; the times of a block follow from their shares."""
    table = hidden_shares()
    assert {row.platform for row in table} == {"gpu", "tpu"}
    for platform in ("gpu", "tpu"):
        axes = {row.mesh_axis for row in table if row.platform == platform}
        assert {"fsdp", "tensor", "stage"} <= axes
    assert all(0 <= row.share <= 1 and row.wire_bytes > 0 for row in table)
    assert all(row.command.startswith("meshpar audit ") for row in table)
    assert all(row.layout in row.command for row in table)
    assert _hidden("context", "all-to-all") == 0.0
    # Without a table gathers wait for their whole time.
    bare = dataclasses.replace(MESHPAR, measured_overlap=False)
    hidden = sum(
        stage.forward.exposed_s["fsdp"]
        for stage in stage_times(planned_run("fsdp=64,remat=full"))
    )
    whole = sum(
        stage.forward.exposed_s["fsdp"]
        for stage in stage_times(planned_run("fsdp=64,remat=full", execution=bare))
    )
    share = _hidden("fsdp", "all-gather")
    assert hidden == pytest.approx((1 - share) * whole)
    # So do those of a step that prefetches nothing.
    off = stage_times(planned_run("fsdp=64,remat=full,fsdp_prefetch=off"))
    assert sum(stage.forward.exposed_s["fsdp"] for stage in off) == whole


@pytest.mark.parametrize(
    "layout, kind",
    [("data=64,zero=1", "reduce-scatter"), ("fsdp=64", "reduce-scatter")],
)
def test_gradients_of_microbatches_hide_as_their_programs_do(layout, kind):
    """The rest of the reduction is exposed, and so is the gather before it."""
    run, off, tpu = (
        planned_run(f"{layout},microbatches=4{more},remat=full", hardware=hardware)
        for more, hardware in (
            ("", "h100-80gb"),
            (",fsdp_prefetch=off", "h100-80gb"),
            ("", "tpu v5p:4x4x4"),
        )
    )
    axis = layout.partition("=")[0]
    (row,) = [row for row in step_rows(run, (0,)) if row.kind == kind]
    share = _hidden(axis, kind, run.layout)
    exposed_s, whole_s = (step_time(each).exposed_s[axis] for each in (run, off))
    assert share > 0.8
    assert whole_s - exposed_s == pytest.approx(share * row_s(run, row))
    assert not any(one.share for one in step_rows(tpu, (0,)) if one.hidden_by)


@pytest.mark.parametrize("execution, hides", [(MESHPAR, True), (MEGATRON_2023, False)])
def test_experts_hide_as_programs_in_parts_do(execution, hides):
    def exchanges(seq):
        found = estimate(
            SHAPES["mixtral-8x7b"],
            cluster_of("h100-80gb", devices=8),
            "expert=8,remat=full,precision=bf16",
            global_batch=8,
            seq=seq,
            execution=execution,
        )
        rows = block_rows(found.run, moe=True)
        return {row.share for row in rows if row.kind == "all-to-all" and row.hidden_by}

    share = _hidden("expert", "all-to-all", Layout(expert=8))
    assert exchanges(4096) == ({share} if hides else set())
    # One part of few rows has nothing beside it.
    assert exchanges(1024) <= {0.0}


def test_a_hop_of_megatron_waits_for_the_device():
    late = stage_times(planned_run("stage=4,microbatches=8", execution=MEGATRON_2024))
    prompt = dataclasses.replace(MEGATRON_2024, hop_wait_s=0.0)
    early = stage_times(planned_run("stage=4,microbatches=8", execution=prompt))
    for with_it, without in zip(late, early, strict=True):
        more_s = with_it.forward.total_s - without.forward.total_s
        assert more_s == pytest.approx(0.35e-3)


@pytest.mark.parametrize("remat, backward", [("none", 0), ("full", 24)])
def test_python_launches_the_forward_and_what_is_computed_again(remat, backward):
    slow, prompt = (
        block_time(
            planned_run(
                f"data=1,remat={remat}",
                execution=dataclasses.replace(MEGATRON_2024, launch_s=launch_s),
            ),
            moe=False,
        )
        for launch_s in (1e-3, 0.0)
    )
    assert slow.forward.total_s - prompt.forward.total_s == pytest.approx(24e-3)
    more_s = slow.backward.total_s - prompt.backward.total_s
    assert more_s == pytest.approx(backward * 1e-3)


def test_half_the_network_is_slower_and_every_estimate_says_it():
    found = estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=64),
        "fsdp=64,remat=full,precision=bf16",
        global_batch=64,
        seq=4096,
    )
    slow_s = found.half_network_step_s
    assert slow_s == found.as_json()["half_network_step_s"] > found.step_s
    inside = estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=8),
        "fsdp=8,remat=full,precision=bf16",
        global_batch=8,
        seq=4096,
    )
    assert inside.half_network_step_s == inside.step_s


def test_the_allocators_reserve_is_part_of_what_has_to_fit():
    run = planned_run("fsdp=8,zero=1,remat=full", execution=MEGATRON_CORE)
    found = estimate(
        run.workload,
        run.cluster,
        run.layout,
        global_batch=8,
        seq=4096,
        execution=MEGATRON_CORE,
    )
    memory = found.memory
    rest = memory.total_bytes - memory.reserve_bytes
    assert memory.reserve_bytes == pytest.approx(0.055 * rest)
    assert memory.as_json()["reserve_bytes"] == round(memory.reserve_bytes)


def test_a_device_leaves_some_of_its_memory_to_others(refuses):
    for device in DEVICES.values():
        share = 0.92 if device.platform == "gpu" else 1.0
        assert device.usable_bytes == pytest.approx(share * device.memory_bytes)
    with refuses("hardware.reserve_out_of_range", "reserve=1", 0, 1):
        dataclasses.replace(DEVICES["h100-80gb"], reserve=1)


@pytest.mark.parametrize(
    "hardware, devices, most",
    [
        ("tpu-v5e:16x32", 512, 256),
        ("tpu-v6e:32x16", 512, 256),
        ("tpu-v5p:16x24x24", 9216, 6144),
    ],
)
def test_a_slice_is_no_larger_than_its_pod(hardware, devices, most, refuses):
    name = hardware.partition(":")[0]
    with refuses("hardware.torus_too_large", devices, name, most):
        cluster_of(hardware)


@pytest.mark.parametrize(
    "hardware, layout, links",
    [
        ("tpu-v5p:4x4x8", "fsdp=128", (2, 2, 2)),
        # Of half a cube no face is joined.
        ("tpu-v5p:2x4x4", "fsdp=32", (1, 1, 1)),
        ("tpu-v5e:16x16", "fsdp=256", (2, 2)),
        ("tpu-v5e:8x16", "fsdp=128", (1, 2)),
        ("tpu-v5e:8x8", "fsdp=64", (1, 1)),
    ],
)
def test_ends_are_joined_only_where_the_slice_has_those_links(hardware, layout, links):
    link = cluster_of(hardware).link(Layout.parse(layout), "fsdp")
    assert tuple(span.links for span in link.spans) == links


def test_no_peak_is_offered_that_no_program_uses():
    peaks = {dtype for device in DEVICES.values() for dtype in device.peak_flops}
    assert peaks == {"bf16", "fp32", "fp8", "mxfp8"}
    assert any(each.fp8 for each in EXECUTIONS.values())


@pytest.mark.parametrize("hardware", ["h100-80gb", "tpu v5p:4x4x4"])
def test_all_traffic_together_hides_behind_no_more_than_the_matmuls(hardware):
    """A slow network, so that what moves weights takes all that `tensor` leaves."""
    run = planned_run("fsdp=8,tensor=8,sequence_parallel=true", hardware=hardware)
    device = dataclasses.replace(
        run.cluster.device, network_bytes_per_s=1e8, link_bytes_per_s=1e9
    )
    slow = dataclasses.replace(run.cluster, device=device)
    run = dataclasses.replace(run, cluster=slow)
    matmuls_s = sum(
        _matmuls_s(run, half.columns + half.rows)
        for half in (attention_linears(run), mlp_linears(run, moe=False))
    )
    (stage,) = stage_times(run)
    for cost, times in ((stage.forward, 1), (stage.backward, 2)):
        hidden_s = cost.hidden_s / run.workload.layers
        assert 0 < hidden_s <= times * matmuls_s * (1 + 1e-9)


def test_a_block_in_no_parts_gets_the_shares_of_such_programs():
    layout = "fsdp=8,tensor=8,sequence_parallel=true,remat=full"
    several, one = (
        planned_run(layout, hardware="tpu v5p:4x4x4", global_batch=batch)
        for batch in (32, 8)
    )
    assert (several.num_parts, one.num_parts) == (4, 1)
    shares = [
        {row.share for row in block_rows(run, moe=False) if row.kind == "all-gather"}
        for run in (several, one)
    ]
    assert shares == [
        {_hidden("tensor", "all-gather", several.layout, "tpu", in_parts=in_parts)}
        for in_parts in (True, False)
    ]
    assert min(shares[0]) > max(shares[1])


def test_a_plan_says_whose_efficiency_it_takes():
    for hardware, told in (("b300", True), ("h100-80gb", False)):
        request = Request(
            workload=SHAPES["llama3-8b"],
            cluster=cluster_of(hardware, devices=8),
            global_batch=8,
            constraints=Constraints.parse(keep=["fsdp=8", "remat=full"]),
        )
        notes = " ".join(search(request).notes)
        assert ("taken to achieve what gb300-288gb achieves" in notes) == told


def test_the_executions_that_fp8_is_offered_for_are_those_that_have_it():
    """A layout's error names them."""
    trained = {
        "fp8": {name for name, each in EXECUTIONS.items() if each.fp8},
        "mxfp8": {name for name, each in EXECUTIONS.items() if each.mxfp8_cast_bytes},
    }
    assert trained == {key: {*names} for key, names in SCALING_EXECUTIONS.items()}


def _routed(model: str, batch: int = 256, **changes) -> Run:
    """Run of Megatron Bridge on 64 GB200, experts over all of them."""
    planned = estimate(
        SHAPES[model],
        cluster_of("gb200", devices=64),
        "expert=64,zero=1,precision=bf16",
        global_batch=batch,
        seq=4096,
        execution=dataclasses.replace(EXECUTIONS["megatron-bridge"], **changes),
    )
    return planned.run


def test_biases_of_experts_cost_their_traffic_and_slower_weight_gradients():
    """Count 28 and 36 bytes for each of the 4 x 2,880 values of 16,384 tokens."""
    biased, plain = (
        block_time(_routed("gpt-oss-120b", **changes), moe=True)
        for changes in ({}, {"adds_biases_apart": False, "biased_grad_flops": 0})
    )
    device = _routed("gpt-oss-120b").cluster.device
    rate = device.memory_bytes_per_s * device.efficiency.memory
    for name, each in (("forward", 28), ("input_grad", 36)):
        costs = [getattr(time, name).compute_s for time in (biased, plain)]
        expected = 16_384 * 4 * 2880 * each / rate
        assert costs[0] - costs[1] == pytest.approx(expected)
    flops = 16_384 * 4 * 6 * 2880 * 2880
    assert biased.weight_grad.compute_s > flops / 320e12
    run = _routed("qwen3-30b-a3b")
    without = _routed("qwen3-30b-a3b", adds_biases_apart=False, biased_grad_flops=0)
    assert block_time(run, moe=True) == block_time(without, moe=True)


def test_a_block_takes_at_least_what_its_host_needs_to_launch_it():
    for host_s, waits in ((1e-7, False), (1e-3, True)):
        time = block_time(_routed("qwen3-30b-a3b", kernel_host_s=host_s), moe=True)
        free = block_time(_routed("qwen3-30b-a3b", kernel_host_s=0.0), moe=True)
        whole_s = time.forward.total_s + time.backward.total_s
        free_s = free.forward.total_s + free.backward.total_s
        if not waits:
            assert whole_s == free_s
        else:  # a millisecond for each kernel, and little for matmuls of two experts
            kernels = whole_s - 6 * 2 * _routed("qwen3-30b-a3b").execution.launch_s
            assert kernels == pytest.approx(round(kernels * 1e3) / 1e3)
            assert whole_s > 0.1 > free_s


def test_the_last_tile_of_each_expert_is_half_empty():
    run = _routed("gpt-oss-120b")
    for execution, more in ((run.execution, 64), (MAXTEXT, 0)):
        [(rows, *_)], _ = routed_linears(dataclasses.replace(run, execution=execution))
        assert rows == 4 * 4096 * 64 * 4 / 128 + more


def test_tokens_travel_beside_other_microbatches_where_the_program_has_that():
    plain, beside = (
        block_time(_routed("qwen3-235b-a22b", exchange_overlap=one), moe=True)
        for one in (False, True)
    )
    waits = [time.forward.exposed_s["expert"] for time in (plain, beside)]
    assert waits[1] < waits[0]
    hidden_s = waits[0] - waits[1]
    assert beside.forward.hidden_s == pytest.approx(hidden_s)


def test_sums_of_experts_gradients_are_waited_for():
    words = "data=8,expert=8,zero=1,precision=bf16"
    rows = {}
    for name in ("megatron-core", "megatron-bridge"):
        run = estimate(
            SHAPES["qwen3-30b-a3b"],
            cluster_of("b200", devices=64),
            words,
            global_batch=64,
            seq=4096,
            execution=EXECUTIONS[name],
        ).run
        rows[name] = {
            (row.mesh_axes, row.kind): bool(row.hidden_by)
            for row in step_rows(run, (0,))
        }
    both = ("data", "expert")
    for kind in ("reduce-scatter", "all-gather"):
        assert rows["megatron-core"][("data",), kind]
        assert not rows["megatron-bridge"][("data",), kind]
        assert rows["megatron-bridge"][both, kind]


def _bridge_in(precision: str) -> Estimate:
    words = f"fsdp=2,tensor=4,zero=1,sequence_parallel=true,precision={precision}"
    return estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=8),
        words,
        global_batch=8,
        seq=8192,
        execution=EXECUTIONS["megatron-bridge"],
    )


def test_fp8_halves_the_matmuls_of_blocks_and_no_more():
    """Operands of half the bytes at twice the rate, and casts to make them."""
    half, eighth = (
        block_time(_bridge_in(each).run, moe=False) for each in ("bf16", "fp8")
    )
    for name in ("forward", "input_grad"):
        times = [getattr(each, name).compute_s for each in (half, eighth)]
        assert times[1] < times[0]
    # W is matmuls alone: half as long but for the traffic of sums in 16 bits.
    ratio = eighth.weight_grad.compute_s / half.weight_grad.compute_s
    assert 0.5 < ratio < 0.55
    run = _bridge_in("fp8").run
    assert run.peak_flops == run.cluster.device.peak_flops["bf16"]  # attention's


def test_mxfp8_is_fp8_with_dearer_casts():
    """On Blackwell alone, whose matmuls take scales of 32 values at the same rate."""
    cluster, program = cluster_of("b200", devices=8), EXECUTIONS["megatron-bridge"]

    def planned(precision, **changes):
        return estimate(
            SHAPES["llama3-8b"],
            cluster,
            f"fsdp=8,zero=1,precision={precision}",
            global_batch=8,
            seq=8192,
            execution=dataclasses.replace(program, **changes),
        )

    fp8, mxfp8 = planned("fp8"), planned("mxfp8")
    assert fp8.step_s < mxfp8.step_s < planned("bf16").step_s
    assert fp8.memory == mxfp8.memory and fp8.collectives == mxfp8.collectives
    alike = planned("mxfp8", mxfp8_cast_bytes=program.cast_bytes)
    assert alike.step_s == fp8.step_s


def test_fp8_sends_updated_weights_in_8_bits_and_gradients_as_before():
    sent = [
        {
            one.kind: one.wire_bytes
            for one in _bridge_in(precision).collectives
            if one.mesh_axes == ("fsdp",)
        }
        for precision in ("bf16", "fp8")
    ]
    assert sent[1]["all-gather"] == sent[0]["all-gather"] / 2
    assert sent[1]["reduce-scatter"] == sent[0]["reduce-scatter"]


@pytest.mark.parametrize(
    "hardware, execution, key, words",
    [
        ("h100", "meshpar", "layout.precision_of_others", ("megatron-bridge", "bf16")),
        ("h100", "megatron-core", "layout.precision_of_others", ("torch-fsdp2",)),
        ("a100", "megatron-bridge", "hardware.no_such_precision", ("a100-80gb", "fp8")),
        ("h100", "megatron-bridge", "hardware.no_such_precision", ("of mxfp8, only",)),
        ("b200", "primus", "layout.precision_of_others", ("trains in mxfp8",)),
    ],
)
def test_fp8_is_refused_where_a_program_or_a_device_has_none(
    hardware, execution, key, words, refuses
):
    precision = "mxfp8" if "mxfp8" in words[0] else "fp8"
    kept = Constraints.parse(keep=[f"precision={precision}"])
    cluster, program = cluster_of(hardware, devices=8), EXECUTIONS[execution]
    workload = SHAPES["llama3-8b"]
    with refuses(key, *words):
        estimate(
            workload,
            cluster,
            f"fsdp=8,precision={precision}",
            global_batch=8,
            execution=program,
        )
    with refuses(key, *words):
        Request(
            workload=workload,
            cluster=cluster,
            global_batch=8,
            execution=program,
            constraints=kept,
        )
