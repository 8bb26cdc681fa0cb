"""What is refused of a batch's numbers and names, before a step sees them."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from meshpar import Input, make_train_step
from meshpar.checks.batches import check_batch
from meshpar.models.inputs import language_inputs
from meshpar.models.presets import build
from meshpar.testing.equivalence import check_layouts
from tests.marks import slow
from tests.test_cotangents import batch as small_batch
from tests.test_cotangents import model as small_model

VOCAB, MAX_SEQ, SHAPE = 7, 5, (4, 3)
INPUTS = language_inputs(VOCAB, MAX_SEQ)
PLACE = (2, 1)


def batch(**changes):
    arrays = {name: np.ones(SHAPE, np.int32) for name in INPUTS}
    return {**arrays, "weights": np.ones(SHAPE, np.float32), **changes}


def with_value(name, value, dtype):
    array = np.ones(SHAPE, dtype)
    array[PLACE] = value
    return array


@pytest.mark.parametrize("as_array", [np.asarray, jax.numpy.asarray])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("tokens", "targets") for value in (-1, VOCAB)),
        *(("positions", value) for value in (-1, MAX_SEQ)),
    ],
)
def test_a_number_that_selects_nothing_is_told_with_its_place(
    name, value, as_array, refuses
):
    wrong = batch(**{name: as_array(with_value(name, value, np.int32))})
    with refuses("batch.index_out_of_range", f"batch[{name!r}]", value, PLACE):
        check_batch(INPUTS, wrong)


def test_a_target_whose_weight_is_0_may_be_anything():
    for value in (-100, VOCAB):
        left_out = with_value("weights", 0, np.float32)
        targets = with_value("targets", value, np.int32)
        assert check_batch(INPUTS, batch(targets=targets, weights=left_out)) == 4


@pytest.mark.parametrize("value", [2**32 + 1, -(2**31) - 1])
@pytest.mark.parametrize("name", [name for name in INPUTS if name != "weights"])
def test_integers_that_devices_would_wrap_are_refused(name, value, refuses):
    wrong = batch(**{name: with_value(name, value, np.int64)})
    with refuses("batch.too_many_bits", f"batch[{name!r}]", value, PLACE, 32):
        check_batch(INPUTS, wrong)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint8, np.int16])
def test_integers_of_other_types_that_devices_keep_are_taken(dtype):
    arrays = {name: np.ones(SHAPE, dtype) for name in INPUTS}
    assert check_batch(INPUTS, {**arrays, "weights": np.ones(SHAPE)}) == 4


@pytest.mark.parametrize("as_array", [np.asarray, jax.numpy.asarray])
@pytest.mark.parametrize("value", [-0.5, -np.inf])
def test_weights_that_are_no_weights_are_refused(value, as_array, refuses):
    wrong = batch(weights=as_array(with_value("weights", value, np.float32)))
    with refuses("batch.wrong_weight", "batch['weights']", value, PLACE):
        check_batch(INPUTS, wrong)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [("segment_id", "segment_ids"), ("attention_mask", "tokens")],
)
def test_an_array_that_nobody_declares_is_told_with_the_nearest_name(
    unknown, nearest, refuses
):
    given = batch(**{unknown: np.ones(SHAPE, np.int32)})
    with refuses("batch.unknown_array", f"batch[{unknown!r}]", nearest):
        check_batch(INPUTS, given)
    declared = {**INPUTS, unknown: Input(("batch", None), "int", optional=True)}
    assert check_batch(declared, given) == 4


def test_every_door_refuses_an_array_that_nobody_declares(refuses):
    model = build("test")
    step = make_train_step(model, optax.sgd(0.1), "data=8")
    given = {
        **{name: np.ones((8, 8), np.int32) for name in ("tokens", "targets", "pad")},
        "weights": np.ones((8, 8), np.float32),
    }
    doors = [
        lambda: step(step.state_shapes, given),
        lambda: step.compile(given),
        lambda: step.evaluate(step.state_shapes, given),
        lambda: step.place(given),
        lambda: check_layouts(model, num=1, batch=given),
    ]
    for door in doors:
        with refuses("batch.unknown_array", "batch['pad']"):
            door()
    carried = replace(
        model, inputs={**model.inputs, "pad": Input(("batch", "seq"), "int")}
    )
    make_train_step(carried, optax.sgd(0.1), "data=8").place(given)


@pytest.mark.parametrize("line", ["data=2", slow("stage=2,microbatches=2")])
def test_a_step_in_which_no_example_counts_changes_nothing(line):
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    step = make_train_step(small_model(), optimizer, line, devices=jax.devices()[:2])
    state = step.init(0)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, {**small_batch(), "weights": np.zeros(16, np.float32)})
    assert metrics["skipped"] == 1 and metrics["weight_sum"] == 0
    after = jax.device_get((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
