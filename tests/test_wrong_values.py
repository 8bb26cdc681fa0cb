"""Values of the wrong kind, given from Python, are refused in one line."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar.generation.sampling import Sampling
from meshpar.models.presets import build


@pytest.fixture(scope="module")
def trained():
    model, optimizer = build("tiny", layers=1), optax.sgd(0.1)
    devices = jax.devices()[:1]
    step = meshpar.make_train_step(model, optimizer, "data=1", devices=devices)
    return step, step.init(0)


def batch(**changed):
    shape = (2, 8)
    arrays = {
        "tokens": np.ones(shape, np.int32),
        "targets": np.ones(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }
    return {**arrays, **changed}


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_a_batch_of_nothing_is_refused(trained, refuses, shape):
    step, state = trained
    empty = {name: np.ones(shape, one.dtype) for name, one in batch().items()}
    with refuses("batch.empty_array", str(shape)):
        step(state, empty)


@pytest.mark.parametrize(("name", "dtype"), [("tokens", ">i4"), ("weights", ">f4")])
def test_an_array_of_another_byte_order_is_refused(trained, refuses, name, dtype):
    step, state = trained
    with refuses("batch.other_byte_order", f"'{name}'", dtype):
        step(state, batch(**{name: np.ones((2, 8), dtype)}))


@pytest.mark.parametrize("name", ["tokens", "weights"])
def test_a_masked_array_is_refused(trained, refuses, name):
    step, state = trained
    masked = np.ma.masked_array(batch()[name], mask=np.eye(2, 8))
    with refuses("batch.masked_array", f"'{name}'"):
        step(state, batch(**{name: masked}))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", ["0.5", None, [1], True, 1j, np.ones(1)])
def test_options_of_sampling_are_numbers(refuses, name, value):
    with refuses("value.not_number", name, words=False):
        Sampling(**{name: value})


def test_a_model_declares_parameters_and_is_not_given_their_values(refuses):
    model = build("tiny", layers=1)
    values = {**model.parameters, "token_embed": np.zeros((4, 4))}
    with refuses("model.not_a_parameter", "'token_embed'", "ndarray"):
        dataclasses.replace(model, parameters=values)


def test_from_nnx_takes_functions_that_build_and_no_module(refuses):
    with refuses("model.no_builders", "Linear"):
        meshpar.from_nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with refuses("model.no_builders", "Linear, int", words=False):
        meshpar.from_nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 3)
