"""A new schedule is one value: all that asks for schedules by name takes it."""

import json

import numpy as np
import pytest
from schedule_cases import split_1f1b, v_orders

from meshpar import Layout
from meshpar.cli.main import main
from meshpar.lint.lint import lint
from meshpar.planner.cost.estimate import estimate, estimate_run
from meshpar.planner.cost.pipeline_time import in_flight, lock_step, span_s
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2022, MESHPAR
from meshpar.planner.search.bounds import Bounds
from meshpar.planner.search.search import Request, possible_meshes, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import SHAPES
from meshpar.schedules import (
    SCHEDULES,
    ScheduleMethod,
    StageTimes,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)
from meshpar.testing.draws import draw_layout
from tests.pipelined import assert_equal_to_plain, mlp_of

V_SHAPED = ScheduleMethod(
    name="v_shaped",
    orders=v_orders,
    num_chunks=2,
    stages_of=lambda rank, p, v: (rank, 2 * p - 1 - rank),
    microbatches_refusal=lambda p, m: (
        f"needs as many as its {p} ranks; take {p} or more" if m < p else None
    ),
    reference="none",
)
SPLIT = ScheduleMethod(
    name="split",
    orders=lambda p, m, v: split_1f1b(p, m).orders,
    splits_backward=True,
    reference="none",
)
LINE = "stage=2,chunks=2,microbatches=3,schedule=v_shaped"


@pytest.fixture(autouse=True)
def two_more(monkeypatch):
    for method in (V_SHAPED, SPLIT):
        monkeypatch.setitem(SCHEDULES, method.name, method)


def request(**kept):
    return Request(
        workload=SHAPES["llama3-8b"],
        cluster=cluster_of("h100-80gb", devices=8),
        global_batch=16,
        constraints=Constraints(kept={"schedule": "v_shaped", **kept}),
    )


def test_it_is_made_by_its_name_with_its_own_number_of_chunks():
    schedule = make_schedule("v_shaped", 3, 4)
    assert schedule == V_SHAPED(3, 4) == make_schedule("v_shaped", 3, 4, chunks=2)
    assert schedule.num_chunks == 2 and schedule.name == "v_shaped"
    assert schedule.orders == tuple(map(tuple, v_orders(3, 4)))


@pytest.mark.parametrize(
    "sizes, refusal, others",
    [
        (
            (2, 2, 1),
            ("schedule.unsupported_chunks", "chunks=1", "v_shaped", "chunks=2"),
            (),
        ),
        (
            (2, 2, 3),
            ("schedule.unsupported_chunks", "chunks=3", "v_shaped", "chunks=2"),
            ("interleaved_1f1b", "looped_bfs"),
        ),
        (
            (4, 2, 2),
            ("schedule.unsupported_microbatches", "microbatches=2", "v_shaped", 4),
            (),
        ),
        ((4, 0, 2), ("schedule.not_whole_number", "microbatches=0", 1), ()),
    ],
)
def test_sizes_that_it_does_not_exist_for_are_refused(sizes, refusal, others, refuses):
    with refuses(*refusal, *others):
        make_schedule("v_shaped", *sizes)
    if 0 not in sizes:
        with refuses(*refusal):
            V_SHAPED(*sizes)


def test_the_planner_refuses_the_same_sizes(refuses):
    layout = Layout.parse("stage=4,chunks=2,microbatches=2,schedule=v_shaped")
    cluster = cluster_of("h100-80gb", devices=4)
    with refuses("schedule.unsupported_microbatches", "microbatches=2", "v_shaped", 4):
        estimate(SHAPES["llama3-8b"], cluster, layout, global_batch=8)


def test_the_command_draws_it(capsys):
    argv = ["schedule", "--schedule", "v_shaped", "--stages", "2"]
    assert main([*argv, "--microbatches", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schedule"], report["chunks"]) == ("v_shaped", 2)


@pytest.mark.slow
def test_a_layout_trains_with_it():
    assert_equal_to_plain(mlp_of(5), f"data=2,{LINE}")


def test_the_planner_replays_what_it_has_no_closed_form_of():
    ranks, count = 8, 300  # more actions than one replays of a known schedule
    layout = Layout(stage=ranks, microbatches=count, chunks=2, schedule="v_shaped")
    schedule = V_SHAPED(ranks, count)
    times = StageTimes.uniform(2 * ranks, weight_grad_s=0)
    ones = [1.0] * 2 * ranks
    assert span_s(layout, ones, ones) == simulate(schedule, times).end_s
    table = tick_table(schedule)
    steps = lock_step("v_shaped", ranks, count, 2)
    assert steps.forward_ticks == table.num_forward_ticks
    assert steps.backward_ticks == table.num_backward_ticks
    assert steps.in_flight == table.peak_in_flight
    assert in_flight("v_shaped", ranks, count, 2) == peak_in_flight(schedule)


def test_fewer_microbatches_than_ranks_wait_for_the_first_ones_way():
    ranks, count = 48, 40  # more actions than are replayed
    layout = Layout(
        stage=ranks, microbatches=count, chunks=2, schedule="interleaved_1f1b"
    )
    schedule = make_schedule("interleaved_1f1b", ranks, count, 2)
    times = StageTimes.uniform(2 * ranks, weight_grad_s=0)
    ones = [1.0] * 2 * ranks
    assert span_s(layout, ones, ones) == simulate(schedule, times).end_s


def test_the_planner_puts_layers_and_ends_where_it_does():
    layout = Layout(
        stage=2, microbatches=4, chunks=2, schedule="v_shaped", splits=(9, 8, 8, 7)
    )
    cluster = cluster_of("h100-80gb", devices=2)
    found = estimate(
        SHAPES["llama3-8b"], cluster, layout, global_batch=8, execution=MEGATRON_2022
    )
    assert [*map(len, found.run.rank_blocks(0))] == [9, 7]
    assert [*found.run.rank_stages(1)] == [1, 2]


@pytest.mark.parametrize("execution", [MESHPAR, MEGATRON_2022])
def test_bounds_are_below_its_estimates(execution):
    asked = request(stage=4, data=2, sequence_parallel=False)
    bounds = Bounds(asked.run)
    leaves, _ = possible_meshes(asked, bounds)
    assert leaves
    for leaf in leaves:
        variants = [*leaf.choices.variants()]
        assert len(variants) == leaf.num_layouts
        assert {variant.microbatches for variant in variants} == {4, 8}  # of 1, 2, 4, 8
        for variant in variants:
            found = estimate_run(bounds.run(leaf.mesh, variant))
            for bound in (bounds.bound(leaf.mesh, variant), leaf.bound):
                assert bound.step_s <= found.step_s
                assert bound.memory_bytes <= found.memory.total_bytes


def test_a_search_considers_it_beside_the_others():
    free = Constraints(kept={"stage": 4, "remat": "full", "zero": 3})
    found = search(
        Request(
            workload=SHAPES["llama3-8b"],
            cluster=cluster_of("h100-80gb", devices=8),
            global_batch=16,
            constraints=free,
        ),
        num_plans=500,
    )
    schedules = {plan.run.layout.schedule for plan in found.plans}
    assert {"v_shaped", "1f1b", "split"} <= schedules
    assert not schedules & {"gpipe", "looped_bfs", "auto"}


def test_a_draw_of_it_has_its_number_of_chunks():
    built = {
        "stage": (2,), "schedule": ("v_shaped", "1f1b"), "chunks": (1, 2),
        "splits": ((),), "remat": ("none",),
    }  # fmt: skip
    rest = {name: (getattr(Layout(), name),) for name in Layout.__dataclass_fields__}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        layout = draw_layout(rng, rest | built, 2, ["stage"], num_layers=3)
        assert layout.chunks == 2 or layout.schedule == "1f1b"
        assert layout.chunks == 1 or layout.schedule == "v_shaped"


def test_a_step_runs_backwards_that_are_split_and_a_plan_has_their_stash():
    line = "stage=2,microbatches=2,schedule=split"
    assert_equal_to_plain(mlp_of(4), line)
    assert not lint(mlp_of(4), Layout.parse(line)).findings
    cluster = cluster_of("h100-80gb", devices=2)
    found = estimate(SHAPES["llama3-8b"], cluster, Layout.parse(line), global_batch=8)
    assert found.memory.stash_bytes > 0
