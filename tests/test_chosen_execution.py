"""Where a layout leaves the execution open, the one whose ticks take less is chosen."""

import dataclasses

import optax
import pytest

from meshpar import Layout, batch_shapes, make_train_step
from meshpar.layout import FIXED_EXECUTIONS
from meshpar.models.presets import build
from meshpar.parallel.pipeline.chosen_execution import (
    chosen_execution,
    execution_seconds,
)
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2022
from meshpar.planner.workload.shapes import SHAPES
from meshpar.schedules import StageTimes, make_schedule
from tests.pipelined import mlp_of

LINE = "stage=4,microbatches=8,schedule=zero_bubble_h2"


def chosen(line, model=None, platform="gpu"):
    return chosen_execution(
        model or build("tiny"), Layout.parse(line), platform=platform
    )


def test_costs_are_those_of_the_ticks():
    times = StageTimes.uniform(4, forward_s=3, input_grad_s=4, weight_grad_s=2)
    found = execution_seconds(make_schedule("zero_bubble_h1", 4, 8), times, 0.5)
    # 11 ticks with F, 11 with I and 8 with W, and a head in each F's.
    assert found["uniform"] == 11 * 3 + 11 * 4 + 8 * 2 + 11 * 0.5
    # 27 ticks, of which 22 are of phases with forwards.
    assert 27 * 2 < found["divergent"] - 22 * 0.5 < 27 * 4


def test_equal_parts_diverge_and_recomputed_ones_do_not():
    execution, reason = chosen(LINE)
    assert execution == "divergent" and reason.startswith("execution=divergent: ")
    assert "in lock step" in reason and "if ranks diverge" in reason
    assert chosen(f"{LINE},remat=full")[0] == "uniform"
    # A head of as many FLOPs as a block runs in every forward's tick.
    assert chosen(LINE, mlp_of(4))[0] == "uniform"


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
def test_blocks_that_communicate_keep_ranks_together(axis):
    execution, reason = chosen(f"{LINE},{axis}=2")
    assert execution == "uniform" and repr(axis) in reason


@pytest.mark.parametrize(
    "line",
    ["data=8", "stage=4,microbatches=8", f"{LINE},execution=uniform"],
)
def test_nothing_is_chosen_where_nothing_is_open(line):
    layout = Layout.parse(line)
    assert chosen(line) == (layout.execution, "")


def test_virtual_devices_run_in_lock_step():
    execution, reason = chosen(LINE, platform="cpu")
    assert execution == "uniform" and "share cores" in reason


def test_a_step_has_the_choice_of_its_devices_in_its_layout_and_its_notes():
    step = make_train_step(build("tiny"), optax.sgd(1.0), f"{LINE},data=2")
    assert step.layout.execution == "uniform"
    assert step.options.execution_reason == chosen(LINE, platform="cpu")[1]
    absent = step.for_absent("gpu")
    assert absent.layout.execution == "divergent"
    assert absent.options.execution_reason == chosen(LINE)[1]
    again = absent.audit_subject(batch_shapes(16, 16))
    assert absent.options.execution_reason in again.notes
    kept = make_train_step(
        build("tiny"), optax.sgd(1.0), f"{LINE},data=2,execution=uniform"
    )
    assert kept.for_absent("gpu").layout.execution == "uniform"
    plain = make_train_step(mlp_of(8), optax.sgd(1.0), "data=2,stage=4,microbatches=8")
    assert str(plain.layout) == "data=2,stage=4,microbatches=8"


@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_estimate_takes_the_faster_one_and_says_so(remat):
    line = f"{LINE},precision=bf16,remat={remat}"

    def of(line, **options):
        return estimate(
            SHAPES["llama3-8b"],
            cluster_of("h100-80gb", devices=4),
            line,
            global_batch=8,
            seq=2048,
            **options,
        )

    fixed = {name: of(f"{line},execution={name}") for name in FIXED_EXECUTIONS}
    found = of(line)
    assert found.step_s == min(one.step_s for one in fixed.values())
    name = found.run.layout.execution
    assert found.step_s == fixed[name].step_s
    assert any(one.startswith(f"execution={name}: ") for one in found.lines)
    assert found.as_json()["why_execution"] == found.run.why_execution
    # Programs of others have executions of their own.
    theirs = of(line, execution=MEGATRON_2022)
    assert theirs.run.layout.execution == "auto" and not theirs.run.why_execution
    shared = of(line.replace("stage=4", "stage=2,tensor=2"))
    assert "'tensor'" in shared.run.why_execution
    assert dataclasses.replace(shared.run, why_execution="").notes != shared.run.notes
