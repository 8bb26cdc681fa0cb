"""Time and money of a whole training, with and without failures."""

import math
import random

import pytest

from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.training_cost import (
    Training,
    best_interval_s,
    training_cost,
    with_failures_s,
)
from meshpar.planner.workload.shapes import SHAPES

TOKENS = 64 * 8192 * 1000


def plan_of(hardware="h100-80gb", devices=64, layout="fsdp=64,remat=full"):
    return estimate(
        SHAPES["llama3-8b"],
        cluster_of(hardware, devices=devices),
        f"{layout},precision=bf16",
        global_batch=64,
        seq=8192,
    )


def test_without_failures_a_training_is_its_steps():
    plan = plan_of()
    cost = training_cost(plan, Training(tokens=TOKENS + 1, price=2.0))
    assert cost.steps == 1001
    assert cost.train_s == pytest.approx(1001 * plan.step_s)
    assert cost.device_hours == pytest.approx(cost.train_s * 64 / 3600)
    assert cost.price == pytest.approx(2 * cost.device_hours)
    assert cost.goodput == 1 and cost.failures == 0
    assert cost.as_json()["checkpoint_interval_s"] is None


def simulated_s(work_s, interval_s, checkpoint_s, restart_s, mtbf_s, seed):
    """One training, failure by failure; they strike checkpoints and restarts too."""
    draw, now_s, done_s = random.Random(seed), 0.0, 0.0
    fails_s = draw.expovariate(1 / mtbf_s)
    while done_s < work_s:
        needs_s = min(interval_s, work_s - done_s) + checkpoint_s
        if now_s + needs_s <= fails_s:
            now_s, done_s = now_s + needs_s, done_s + needs_s - checkpoint_s
            continue
        while True:
            now_s = fails_s
            fails_s = now_s + draw.expovariate(1 / mtbf_s)
            if now_s + restart_s <= fails_s:
                break
        now_s += restart_s
    return now_s


@pytest.mark.parametrize("mtbf_s", [4_000, 20_000])
def test_the_expected_time_is_that_of_trainings_drawn_at_random(mtbf_s):
    terms = {"interval_s": 1000, "checkpoint_s": 100, "restart_s": 300}
    runs = [simulated_s(200_000, *terms.values(), mtbf_s, seed) for seed in range(200)]
    mean_s = sum(runs) / len(runs)
    expected_s = with_failures_s(200_000, mtbf_s=mtbf_s, **terms)
    assert expected_s == pytest.approx(mean_s, rel=0.02)


@pytest.mark.parametrize("checkpoint_s", [1, 30, 600, 5000])
def test_no_other_interval_between_checkpoints_is_much_better(checkpoint_s):
    mtbf_s = 20_000
    terms = {"checkpoint_s": checkpoint_s, "restart_s": 600, "mtbf_s": mtbf_s}
    best_s = best_interval_s(checkpoint_s, mtbf_s)
    ours_s = with_failures_s(1e6, interval_s=best_s, **terms)
    others = [
        with_failures_s(1e6, interval_s=best_s * 1.1**n, **terms)
        for n in range(-40, 41)
    ]
    assert ours_s <= min(others) * 1.001
    young_s = math.sqrt(2 * checkpoint_s * mtbf_s)
    assert best_s == pytest.approx(young_s - checkpoint_s, rel=0.25)


def test_failures_cost_time_money_and_goodput():
    plan = plan_of()
    sound = training_cost(plan, Training(tokens=TOKENS, price=1.0))
    often, seldom = (
        training_cost(plan, Training(tokens=TOKENS, price=1.0, mtbf_s=mtbf_s))
        for mtbf_s in (3600.0, 36_000.0)
    )
    assert often.train_s > seldom.train_s > sound.train_s
    assert often.goodput < seldom.goodput < 1
    assert often.price > seldom.price > sound.price
    assert often.failures == pytest.approx(often.train_s / 3600)
    assert often.checkpoint_interval_s < seldom.checkpoint_interval_s
    assert "failures, a checkpoint of" in often.text


@pytest.mark.parametrize(
    "given, value",
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": math.nan}, "tokens=nan"),
        ({"tokens": 1e9, "price": -1}, "price=-1"),
        ({"tokens": 1e9, "mtbf_s": math.inf}, "mtbf_s=inf"),
    ],
)
def test_terms_that_make_no_sense_are_refused(given, value, refuses):
    with refuses("value.not_positive", value, 0):
        Training(**given)


def test_a_training_that_never_ends_says_so(refuses):
    with refuses("plan.training_never_ends", "0.5 s", "--mtbf"):
        training_cost(plan_of(), Training(tokens=TOKENS, mtbf_s=0.5))
