"""A schedule of one's own under a layout, and the checker's words when it is wrong."""

import numpy as np
import pytest

from meshpar.recipes.bubble import predicted_bubble
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.pretrain import make_step
from meshpar.schedules import make_schedule, to_csv
from tests.marks import slow
from tests.pipelined import (
    assert_close,
    batch_of,
    mlp_of,
    model_of,
    plain,
    plain_logits,
    state_of,
    step_of,
)

# Stages 0 and 3 on the first rank, 1 and 2 on the second; all forwards first.
V_SHAPED = [
    [f"{stage}{op}{i}" for stage, op in order for i in range(3)]
    for order in (("0F", "3F", "3B", "0B"), ("1F", "2F", "2B", "1B"))
]
REVERSED = [["1F0", "1F1", "1B0", "1B1"], ["0F0", "0F1", "0B0", "0B1"]]
"""The first stage on the last rank."""


@pytest.mark.parametrize(
    ("line", "orders"),
    [
        slow("data=2,stage=2,microbatches=3,chunks=2", V_SHAPED),
        ("stage=2,microbatches=2", REVERSED),
    ],
)
def test_any_placement_and_order_gives_the_gradients_of_the_model_alone(line, orders):
    model = mlp_of(5)
    step = step_of(model, line, schedule=orders)
    assert step.schedule.name == "custom"
    state = state_of(step, model)
    value, gradients = step.loss_and_gradients(state, batch_of())
    wanted_value, wanted = plain(model)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    assert_close(step.in_layer_order(gradients), wanted)
    evaluation = step.evaluate(state, batch_of())
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    assert float(loss_sum / weight_sum) == pytest.approx(float(wanted_value), rel=1e-5)
    logits = step.logits(state, batch_of()["tokens"])
    assert_close([np.asarray(logits)], [plain_logits(model)])


def test_a_file_of_orders_is_read(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(to_csv(make_schedule("gpipe", 2, 3)))
    step = step_of(model_of(4), "stage=2,microbatches=3", schedule=path)
    assert step.schedule.orders == make_schedule("gpipe", 2, 3).orders
    assert step.schedule.name == str(path)


def test_the_recipe_takes_a_file_of_orders(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(to_csv(make_schedule("gpipe", 2, 4)))
    layout = "stage=2,microbatches=4"
    args = parse_arguments(["--layout", layout, "--schedule", str(path)])
    step = make_step(args)
    assert step.schedule.name == str(path)
    assert step.layers_of_stages == (step.model.groups[0].num_layers // 2,) * 2
    assert predicted_bubble(step.schedule, step.layers_of_stages) == pytest.approx(0.2)


LINE = "stage=2,microbatches=2"


@pytest.mark.parametrize(
    ("line", "orders", "refusal"),
    [
        (
            LINE,
            [["0F0", "0B0"], ["1F0", "1B0"]],
            ("schedule.wrong_size", "microbatches=1", "microbatches=2"),
        ),
        (
            "stage=4,microbatches=2",
            REVERSED,
            ("schedule.wrong_size", "stages=2", "stages=4"),
        ),
        (
            "stage=2,microbatches=3",
            V_SHAPED,
            ("schedule.wrong_size", "chunks=2", "chunks=1"),
        ),
        (LINE, [REVERSED[0], REVERSED[1][:-1]], ("schedule.missing_work", "0B1")),
        (LINE, [[*REVERSED[0], "1B0"], REVERSED[1]], ("schedule.doubled_work", "1B0")),
        (
            LINE,
            [REVERSED[0][::-1], REVERSED[1]],
            ("schedule.deadlock", "rank 0", "1B1", "1F1"),
        ),
        (
            LINE,
            [["1X0"], ["0F0"]],
            ("schedule.unreadable_action", "rank 0", "'1X0'"),
        ),
        ("data=2", REVERSED, ("schedule.without_stages", "'data=2'", "stage=1")),
        (
            f"{LINE},schedule=gpipe",
            REVERSED,
            ("schedule.given_twice", "schedule=gpipe"),
        ),
    ],
)
def test_a_wrong_schedule_is_refused_with_what_is_wrong(line, orders, refusal, refuses):
    with refuses(*refusal):
        step_of(model_of(4), line, schedule=orders)


@pytest.mark.parametrize("execution", ["uniform", "divergent"])
def test_a_backward_may_be_split_on_one_rank_and_whole_on_another(execution):
    orders = [["0F0", "0I0", "0W0"], ["1F0", "1B0"]]
    line, model = f"stage=2,execution={execution}", mlp_of(4)
    step = step_of(model, line, schedule=orders)
    value, gradients = step.loss_and_gradients(state_of(step, model), batch_of())
    wanted_value, wanted = plain(model)
    assert abs(float(value) - wanted_value) <= 1e-5 * abs(wanted_value)
    assert_close(step.in_layer_order(gradients), wanted)
