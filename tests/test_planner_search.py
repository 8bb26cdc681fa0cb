"""Search: bounds settle nothing that estimates would not; every no has its why."""

import dataclasses
import functools

import optax
import pytest

from meshpar import absent_mesh, lint, make_train_step
from meshpar.layout import Layout
from meshpar.layout.requirements import layout_errors
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.cost.pipeline_time import in_flight, lock_step
from meshpar.planner.cost.step_time import step_time
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import EXECUTIONS, MESHPAR
from meshpar.planner.plan import milliseconds
from meshpar.planner.search.bounds import Bounds, held_microbatches
from meshpar.planner.search.candidates import too_slow
from meshpar.planner.search.choices import mesh_choices, searched_meshes
from meshpar.planner.search.remedies import nearest_fit, sensitivities, unsearched
from meshpar.planner.search.result import assumptions
from meshpar.planner.search.search import Request, possible_meshes, search
from meshpar.planner.search.space import Constraints, Variant, layout_variant
from meshpar.planner.workload.problems import layout_problems
from meshpar.planner.workload.shapes import SHAPES, workload_of
from tests.marks import slow

EIGHT = cluster_of("h100-80gb", devices=8)
MOE = workload_of(
    "layers=6,hidden=1024,heads=16,vocab=32000,gated=true,experts=8,top_k=2,"
    "expert_ffn=2048,dense_layers=1"
)


def request(**changes):
    given = {
        "workload": SHAPES["llama3-8b"],
        "cluster": EIGHT,
        "global_batch": 16,
        "seq": 8192,
        **changes,
    }
    return Request(**given)


@functools.cache
def default_search():
    """What is found where nothing is kept or forbidden."""
    return search(request())


def all_runs(asked):
    """Every layout of the space, as a run."""
    bounds, like = Bounds(asked.run), asked.run
    size = {"global_batch": like.global_batch, "seq": like.seq}
    for mesh in searched_meshes(like, asked.constraints):
        plain = Layout(**mesh.mesh_shape)
        program = {"execution": like.execution}
        if layout_problems(like.workload, plain, **size, **program):
            continue
        choices = mesh_choices(like, mesh, asked.constraints)
        for part in choices.groups():
            for variant in part.variants():
                yield mesh, part, variant, bounds.run(mesh, variant)


@pytest.mark.parametrize(
    "asked, each",
    [
        (request(constraints=Constraints.parse(forbid=["data", "context"])), 67),
        (request(constraints=Constraints.parse(keep=["stage=4,tensor=1"])), 399),
        slow(request(constraints=Constraints.parse(forbid=["data"])), 29),
        slow(
            request(
                workload=MOE,
                cluster=cluster_of("h100-80gb", devices=16),
                seq=1024,
                constraints=Constraints.parse(keep=["data=1"]),
            ),
            29,
        ),
        (
            request(
                workload=MOE,
                seq=1024,
                constraints=Constraints.parse(keep=["stage=2,expert=4"]),
            ),
            23,
        ),
        (
            request(
                workload=MOE,
                seq=1024,
                execution=EXECUTIONS["maxtext"],
                constraints=Constraints.parse(forbid=["data", "context"]),
            ),
            67,
        ),
        (
            request(
                workload=MOE,
                seq=1024,
                execution=EXECUTIONS["megatron-bridge"],
                constraints=Constraints.parse(forbid=["data", "context"]),
            ),
            67,
        ),
    ],
    ids=["dense", "pipelined", "more dense", "experts", "paired", "overlapped", "host"],
)
def test_bounds_are_below_the_estimate_of_every_layout(asked, each):
    """Of each 29th or 67th: all of them take minutes."""
    bounds, count = Bounds(asked.run), 0
    for mesh, choices, variant, run in all_runs(asked):
        if count % each == 0:
            step_s = step_time(run).step_s * (1 + 1e-9)
            memory_bytes = fullest_memory(run).total_bytes * (1 + 1e-9)
            for some in opened(choices, variant):
                for bound_of in (bounds.by_remat, bounds.in_memory):
                    bound = bound_of(mesh, some).least
                    assert bound.step_s <= step_s, (run.layout, some)
                    assert bound.memory_bytes <= memory_bytes, (run.layout, some)
            assert bounds.memory_bytes(run) <= memory_bytes, run.layout
        count += 1
    assert count > 300


def test_states_in_most_parts_need_as_little_memory_as_any():
    forbidden = Constraints.parse(forbid=["tensor"])
    asked = request(workload=MOE, seq=1024, constraints=forbidden)
    bounds, count = Bounds(asked.run), 0
    for leaf in possible_meshes(asked, bounds)[0]:
        own = leaf.mesh, leaf.choices
        every, small = bounds.by_remat(*own), bounds.in_memory(*own)
        assert (small.step_s <= every.step_s).all(), own
        assert (small.memory_bytes <= every.memory_bytes).all(), own
        count += len({(one.data, one.fsdp) for one in leaf.choices.states}) > 2
    assert count > 5


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_bound_does_not_depend_on_what_was_bounded_before(order):
    """Parts of the batch, with sequence parallelism alone, hide what others show."""
    words = "data=4,fsdp=4,tensor=4,microbatches=2,fsdp_gather=microbatch,zero=3"
    cluster = cluster_of("h100-80gb", devices=64)
    like = request(cluster=cluster, seq=8192, global_batch=64).run
    bounds = Bounds(like)
    for splits in order:
        layout = Layout.parse(f"{words},remat=dots,precision=bf16")
        layout = dataclasses.replace(layout, sequence_parallel=splits)
        run = dataclasses.replace(like, layout=layout)
        bound = bounds.bound(layout, layout_variant(layout))
        assert bound.step_s <= step_time(run).step_s


def opened(choices, variant):
    """The choices, and their parts down to that variant alone."""
    yield choices
    while choices.num_variants > 1:
        choices = next(
            part for _, part, _ in choices.parts() if variant in tuple(part.variants())
        )
        yield choices


@pytest.mark.parametrize("forbidden", [("data", "context"), slow(("data",))])
def test_search_finds_what_estimating_everything_finds(forbidden):
    asked = request(constraints=Constraints.parse(forbid=forbidden, keep=["chunks=1"]))
    found = search(asked, num_plans=5)
    capacity = asked.cluster.device.usable_bytes
    every = [
        (step_time(run).step_s, fullest_memory(run).total_bytes, str(run.layout))
        for *_, run in all_runs(asked)
    ]
    fitting = sorted(point for point in every if point[1] <= capacity)
    assert [plan.step_s for plan in found.plans] == pytest.approx(
        [step_s for step_s, *_ in fitting[:5]]
    )
    reach_s = max(1.5 * fitting[0][0], fitting[4][0])
    front, least = [], float("inf")
    for step_s, memory_bytes, _ in fitting:
        if memory_bytes < least and step_s <= reach_s:
            front.append((step_s, memory_bytes))
            least = memory_bytes
    assert [(one.step_s, one.memory.total_bytes) for one in found.front] == front
    refused = possible_meshes(asked, Bounds(asked.run))[1]
    assert found.considered_count == len(every) + len(refused)
    shown = {str(one.run.layout) for one in (*found.plans, *found.front)}
    assert found.rejected_count == found.considered_count - len(shown)


def test_a_search_for_the_plans_alone_finds_the_same_plans():
    found, alone = default_search(), search(request(), plans_only=True)
    assert [str(plan.run.layout) for plan in alone.plans] == [
        str(plan.run.layout) for plan in found.plans
    ]
    assert alone.considered_count == found.considered_count
    assert alone.estimated_count <= found.estimated_count
    assert (alone.front, alone.rejected) == ((), ())


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("looped_bfs", 4)],
)
def test_no_schedule_holds_fewer_microbatches_than_the_bound(
    lock, ranks, schedule, chunks
):
    for count in (1, 2, 3, 5, 8, 16, 21):
        variant = Variant(*(getattr(Layout(), key) for key in Variant._fields))
        variant = variant._replace(microbatches=count, schedule=schedule, chunks=chunks)
        if ranks == 1:
            assert held_microbatches(1, variant, lock_step=lock) == 1
            continue
        found = (
            lock_step(schedule, ranks, count, chunks).in_flight
            if lock
            else in_flight(schedule, ranks, count, chunks)
        )
        least = held_microbatches(ranks, variant, lock_step=lock)
        assert least <= max(found) / chunks


def test_plans_are_layouts_that_the_step_takes_and_the_text_form_holds():
    found = default_search()
    for plan in (*found.plans, *found.front):
        line = str(plan.run.layout)
        assert Layout.parse(line) == plan.run.layout
        assert layout_errors(plan.run.layout) == {}
        assert plan.fits
        again = estimate(SHAPES["llama3-8b"], EIGHT, line, global_batch=16, seq=8192)
        assert again.step_s == plan.step_s
    times = [plan.step_s for plan in found.plans]
    assert times == sorted(times) and found.notes == ()


@pytest.mark.parametrize(
    "preset, kept, forbidden",
    [
        ("test", ["microbatches=2"], ["data"]),
        slow("test", ["microbatches=2"], []),
        slow("tiny", [], []),
        slow("tiny-gpt2", ["chunks=1"], []),
    ],
)
def test_no_layout_of_the_space_is_refused_by_the_step_or_the_lint(
    preset, kept, forbidden
):
    asked = request(
        workload=SHAPES[preset],
        seq=64,
        constraints=Constraints.parse(keep=kept, forbid=forbidden),
    )
    model, linted = build(preset), set()
    for _, _, _, run in all_runs(asked):
        layout = run.layout
        assert layout_errors(layout) == {}, layout
        shape = (*layout.mesh_shape.values(), layout.split_axes)
        if shape not in linted:
            linted.add(shape)
            make_train_step(model, optax.adam(1e-3), layout, mesh=absent_mesh(layout))
            found = lint(model, layout, global_batch=16, seq=64)
            assert found.findings == (), (layout, found.findings)
    assert len(linted) > 10


def test_every_rejected_layout_has_a_reason_with_both_numbers():
    found = default_search()
    reasons = {str(other.layout): other.reason for other in found.rejected}
    too_large = [reason for reason in reasons.values() if "> 78.1 GB" in reason]
    too_slow = [reason for reason in reasons.values() if "a step takes" in reason]
    assert too_large and too_slow
    assert all(" s > " in reason or " ms > " in reason for reason in too_slow)
    reason = reasons["fsdp=4,tensor=2,precision=bf16"]
    assert reason.startswith("activations ")
    assert reason.endswith(" > 78.1 GB: 1 microbatch of 4 in flight with remat=none")
    assert len(reasons) == len(found.rejected) > 10


def test_tensor_over_several_hosts_says_what_that_exposes():
    kept = Constraints.parse(keep=["tensor=16,remat=full"])
    model = {"workload": SHAPES["llama2-7b"], "seq": 4096}  # 32 heads for each of KV
    asked = request(
        cluster=cluster_of("h100-80gb", devices=16), constraints=kept, **model
    )
    slow = search(asked).plans[0]
    others = Constraints.parse(keep=["stage=1,context=1"])
    fast = search(request(cluster=asked.cluster, constraints=others, **model)).plans
    assert slow.step_s > fast[-1].step_s
    reason = too_slow(slow, fast[-1])
    assert reason.startswith("tensor=16 crosses hosts: ") and " exposed against" in (
        reason
    )


def test_what_is_kept_and_forbidden_holds_for_every_plan():
    kept = ["tensor=2,remat=full", "microbatches=4"]
    constraints = Constraints.parse(keep=kept, forbid=["fsdp"], max_memory_bytes=60e9)
    found = search(request(constraints=constraints))
    assert found.plans
    for plan in found.plans:
        layout = plan.run.layout
        assert (layout.tensor, layout.remat, layout.microbatches) == (2, "full", 4)
        assert layout.fsdp == 1 and plan.memory.total_bytes <= 60e9


@pytest.mark.parametrize(
    "given, refusal",
    [
        ({"keep": ["tensors=2"]}, ("layout.unknown_key", "'tensors'", "'tensor'")),
        ({"keep": ["tensor=2", "tensor=4"]}, ("plan.kept_twice", "tensor", 2, 4)),
        (
            {"keep": ["tensor=2"], "forbid": ["tensor"]},
            ("plan.axis_kept_and_forbidden", "tensor=2"),
        ),
        ({"forbid": ["tenser"]}, ("mesh.unknown_axis", "'tenser'", "'tensor'")),
        ({"max_memory_bytes": 0.0}, ("value.not_positive", "0.0")),
    ],
)
def test_constraints_that_make_no_sense_are_refused(given, refusal, refuses):
    with refuses(*refusal):
        Constraints.parse(**given)


def test_microbatches_that_divide_no_batch_leave_no_plan():
    found = search(request(constraints=Constraints.parse(keep=["microbatches=3"])))
    assert found.plans == () and found.estimated_count == 0
    assert found.rejected_count == found.considered_count > 0


def test_sizes_that_do_not_divide_the_devices_are_refused(refuses):
    with refuses("plan.no_such_layout", 8, "tensor=3"):
        search(request(constraints=Constraints.parse(keep=["tensor=3"])))


def test_expert_is_used_for_models_with_experts_alone():
    # All plans of so small a model have the same few axes: `tensor`, if it is free.
    constraints = Constraints.parse(keep=["stage=1,context=1,zero=3,tensor=1"])
    found = search(request(workload=MOE, seq=1024, constraints=constraints))
    assert any(plan.run.layout.expert > 1 for plan in found.plans)
    assert all(plan.run.layout.expert == 1 for plan in default_search().plans)


def test_every_mesh_axis_is_one_that_the_step_takes():
    for axis in Layout().mesh_shape:
        assert axis not in layout_errors(Layout(**{axis: 2}))


def test_where_nothing_fits_the_nearest_change_does():
    asked = request(
        workload=SHAPES["llama3-70b"],
        cluster=cluster_of("h100-80gb", devices=16),
        constraints=Constraints.parse(
            keep=["remat=none", "optimizer_memory=device"], forbid=["fsdp", "context"]
        ),
    )
    assert search(asked).plans == ()
    why, changes = nearest_fit(asked)
    assert "nothing fits in 78.1 GB; the smallest layout is " in why
    texts = {change.text: change.layout for change in changes}
    remat = next(text for text in texts if text.startswith("fits with remat="))
    assert remat.endswith(" instead of none")
    assert "fits with 2x devices (32)" in texts
    layout = texts[remat]
    fits = estimate(asked.workload, asked.cluster, layout, global_batch=16, seq=8192)
    assert fits.fits
    twice = cluster_of("h100-80gb", devices=32)
    layout = texts["fits with 2x devices (32)"]
    assert estimate(asked.workload, twice, layout, global_batch=16, seq=8192).fits


def test_a_faster_network_helps_what_waits_for_it():
    many = cluster_of("h100-80gb", devices=64)
    waits = estimate(
        SHAPES["llama3-8b"],
        many,
        "fsdp=8,tensor=8,precision=bf16",
        global_batch=8,
        seq=1024,
    )
    found = {change.change: change for change in sensitivities(waits)}
    assert found["network"].faster > 0.2
    assert found["network"].text.startswith("twice the network: ")
    alone = default_search().plans[0]
    alone = {change.change: change for change in sensitivities(alone)}
    assert alone["network"].faster == 0.0


@pytest.mark.parametrize("kept", [("tensor=2,microbatches=2,remat=full",), slow(())])
@pytest.mark.parametrize("name", sorted(EXECUTIONS))
def test_programs_of_others_are_planned_too(name, kept):
    constraints = Constraints.parse(keep=kept)
    asked = request(execution=EXECUTIONS[name], constraints=constraints)
    found = search(asked, num_plans=2)
    assert len(found.plans) == 2 or name == MESHPAR.name


def test_named_residuals_are_kept_or_moved_where_that_is_faster():
    only_fsdp = ["data=1,stage=1,tensor=1,microbatches=1"]
    asked = request(
        workload=SHAPES["llama3-70b"],
        cluster=cluster_of("h100-80gb", devices=512),
        global_batch=1024,
        constraints=Constraints.parse(keep=only_fsdp),
    )
    best = search(asked).plans[0]
    assert best.run.layout.residual_names.offload
    words = [
        estimate(
            asked.workload,
            asked.cluster,
            f"fsdp=512,remat={remat},precision=bf16",
            global_batch=1024,
            seq=8192,
        )
        for remat in ("none", "selective", "dots", "full")
    ]
    assert best.step_s < min(one.step_s for one in words if one.fits)


def test_parameters_of_16_bits_are_tried_where_they_lie_whole():
    def dtypes(**sizes):
        mesh = Layout(precision="bf16", **sizes)
        states = mesh_choices(request().run, mesh, Constraints()).states
        return {(one.zero, one.fsdp_gather, one.param_dtype) for one in states}

    assert (3, "step", "bf16") in dtypes(tensor=8)
    for axis in ("data", "fsdp"):
        states = dtypes(**{axis: 8})  # ZeRO-3 does not split over `data`
        split = {dtype for zero, _, dtype in states if (axis, zero) != ("data", 3)}
        assert split == {"fp32"}


def test_where_layers_do_not_divide_the_shorter_stages_may_come_first():
    def splits(**changes):
        mesh = Layout(precision="bf16", stage=5)
        asked = request(cluster=cluster_of("h100-80gb", devices=5), **changes)
        found = mesh_choices(asked.run, mesh, Constraints())
        return {one.splits for one in found.schedules if one.chunks == 1}

    even, shorter_first = (), (6, 6, 6, 7, 7)
    assert splits() == {even, shorter_first}
    ends = splits(execution=EXECUTIONS["megatron-2022"]) - {even, shorter_first}
    assert ends == {(6, 7, 7, 6, 6)}
    assert splits(workload=MOE) == {even, (1, 1, 1, 1, 2)}


def test_splits_can_be_kept():
    kept = Constraints.parse(keep=["stage=2,splits=14/18,schedule=1f1b,remat=full"])
    for plan in search(request(constraints=kept), num_plans=3).plans:
        assert plan.run.stage_blocks == (14, 18)


def test_an_assumed_number_decides_where_another_value_makes_another_plan_faster():
    kept, moved = (
        estimate(
            SHAPES["llama3-8b"],
            EIGHT,
            f"fsdp=8,remat={remat},precision=bf16",
            global_batch=16,
            seq=640,
        )
        for remat in ("full", "offload:attention_qkv/attention_out")
    )
    assert moved.step_s < kept.step_s
    host, *others = assumptions([moved, kept])
    assert host.decides and host.layout == str(kept.run.layout)

    def slower(device):
        achieved = dataclasses.replace(device.efficiency, host=host.at)
        return dataclasses.replace(device, efficiency=achieved)

    gain = 1 - kept.step_on_s(slower) / moved.step_on_s(slower)
    assert host.faster == pytest.approx(gain) and gain > 0.01
    assert f"{host.faster:.1%}" in host.text and "not measured" in host.text
    assert len(others) == 2 and not any(one.decides for one in others)
    # Where nothing moves to the host, its link is no assumption of the plan.
    assert len(assumptions([kept])) == 2


def request_with_one_chunk(**constraints):
    """Plans of eight stages, one a rank, of few microbatches."""
    kept = {"stage": 8, "chunks": 1, "precision": "bf16", "remat": "dots"}
    return search(
        request(
            seq=4096, global_batch=8, constraints=Constraints(kept=kept, **constraints)
        )
    )


def test_split_backwards_are_planned_where_they_win():
    found = request_with_one_chunk()
    first = found.plans[0]
    assert first.run.splits_backward
    whole = [plan for plan in found.plans if not plan.run.splits_backward]
    assert first.step_s < whole[0].step_s
    assert first.time.bubble_s < whole[0].time.bubble_s
    assert first.run.layout.execution in ("uniform", "divergent")


def test_as_many_weight_gradients_wait_as_fit():
    free = request_with_one_chunk().plans[0]
    memory = free.memory
    each = memory.stash_bytes / memory.pending_w
    limit = memory.total_bytes - 1.5 * each
    plans = request_with_one_chunk(max_memory_bytes=limit).plans
    limited = [plan for plan in plans if plan.run.layout.max_pending_w]
    assert limited
    for plan in limited:
        layout, total = plan.run.layout, plan.memory.total_bytes
        own = plan.memory.stash_bytes / layout.max_pending_w
        # One more would not fit.
        assert total <= limit < total + own
    like = dataclasses.replace(free.run.layout, max_pending_w=0)
    assert any(
        dataclasses.replace(plan.run.layout, max_pending_w=0) == like
        for plan in limited
    )


def test_no_weight_gradients_of_a_kept_limit_wait_beyond_it():
    kept = {"schedule": "zero_bubble_h1", "stage": 8, "max_pending_w": 2}
    found = search(request(constraints=Constraints(kept=kept)))
    assert found.plans
    assert {plan.run.layout.max_pending_w for plan in found.plans} == {2}


def test_what_an_option_that_no_search_tries_would_gain_is_told():
    asked = request(constraints=Constraints.parse(keep=["fsdp=8,fsdp_prefetch=off"]))
    (plan, *_) = search(asked, num_plans=1).plans
    [line] = [one for one in unsearched(plan) if "fsdp_prefetch=on" in one]
    other = dataclasses.replace(plan.run.layout, fsdp_prefetch="on")
    ahead = estimate(asked.workload, asked.cluster, other, global_batch=16, seq=8192)
    seconds = milliseconds(ahead.step_s), milliseconds(plan.step_s)
    assert "a step of {} instead of {}, ".format(*seconds) in line
