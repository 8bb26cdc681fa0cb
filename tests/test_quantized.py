"""Weights in 8 bits generate what their numbers would in full."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import meshpar
from meshpar import Layout, make_train_step
from meshpar.generation.quantized import check_weights, quantize, quantized
from meshpar.models.presets import build
from tests.marks import slow
from tests.states import normal_values, with_parameters

MODEL = build("test", layers=2)
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]
NEW = 4


@pytest.fixture(scope="module")
def values():
    pytest.importorskip("qwix")
    return normal_values(jax.eval_shape(MODEL.init, 0))


def rounded(tree):
    """The numbers that 8 bits stand for."""
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"values", "scale"}:
        return tree["values"] * tree["scale"]
    return {key: rounded(value) for key, value in tree.items()}


def generated(params, layout="data=1", **options):
    return meshpar.generate(
        MODEL,
        params,
        PROMPTS,
        layout=layout,
        max_tokens=NEW,
        devices=jax.devices()[: Layout.of(layout).num_devices],
        **options,
    )


@pytest.fixture(scope="module")
def wanted(values):
    """Likeliest tokens and their log-probabilities, the whole text for each token."""
    one = jax.devices()[:1]
    step = make_train_step(MODEL, optax.sgd(1.0), "data=1", devices=one)
    state = with_parameters(step, rounded(quantize(MODEL, values, "int8")))
    return [continued(step, state, prompt) for prompt in PROMPTS]


def continued(step, state, prompt):
    text = np.zeros((1, 8), np.int32)
    text[0, : len(prompt)] = prompt
    logprobs = []
    for at in range(len(prompt), len(prompt) + NEW):
        known = jax.nn.log_softmax(step.logits(state, text)[0, at - 1])
        text[0, at] = known.argmax()
        logprobs.append(float(known.max()))
    tokens = text[0, len(prompt) : len(prompt) + NEW].tolist()
    return SimpleNamespace(tokens=tokens, logprobs=logprobs)


@pytest.mark.parametrize(
    "layout",
    ["tensor=2", slow("fsdp=2,tensor=2"), slow("stage=2,tensor=2")],
)
def test_int8_generates_what_its_numbers_would(values, wanted, layout):
    for one, other in zip(
        generated(values, layout, weights="int8"), wanted, strict=True
    ):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_training_state_generates_in_int8(values, wanted):
    layout = "stage=2,microbatches=2"
    step = make_train_step(MODEL, optax.sgd(1.0), layout, devices=jax.devices()[:2])
    state = step.init(params=values)
    found = generated(state, from_layout=layout, weights="int8")
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


@pytest.mark.parametrize(
    ("where", "name", "inputs"),
    [
        ("attention", "qkv", (1,)),
        ("attention", "out", (1, 2)),
        ("mlp", "gate_up", (1,)),
        ("mlp", "down", (1,)),
    ],
)
def test_values_are_within_half_a_step_of_each_output(values, where, name, inputs):
    weight = values["blocks"][where][name]
    found = rounded(quantize(MODEL, values, "int8"))["blocks"][where][name]
    steps = np.abs(weight).max(inputs, keepdims=True) / 127.5
    assert (np.abs(found - weight) <= steps * 0.5001).all()


def test_matrices_take_a_byte_a_value(values):
    over = quantized(MODEL, "int8", np.float32).flat_parameters()
    found = quantize(MODEL, values, "int8")["blocks"]["mlp"]["down"]
    assert found["values"].dtype == np.int8 and found["scale"].dtype == np.float32
    path = "blocks.mlp.down"
    assert found["values"].shape == over[f"{path}.values"].stacked_shape
    assert found["scale"].shape == over[f"{path}.scale"].stacked_shape == (2, 1, 32)
    assert f"{path}.values" in over and "blocks.mlp_norm.scale" in over


def test_fp8_keeps_its_bits(values):
    found = quantize(MODEL, values, "fp8")["blocks"]["mlp"]["down"]
    numbers = jax.lax.bitcast_convert_type(found["values"], jax.numpy.float8_e4m3fn)
    numbers = np.asarray(numbers.astype(np.float32)) * found["scale"]
    given = values["blocks"]["mlp"]["down"]
    # Three bits of mantissa: half a step is a sixteenth.
    assert np.abs(numbers - given).max() <= np.abs(given).max() / 16


def test_fp8_is_refused_on_amd_devices_whose_capability_is_no_number(refuses):
    amd = SimpleNamespace(
        device_kind="AMD Instinct MI300X", compute_capability="gfx942"
    )
    with refuses("generation.no_fp8", "'fp8'", "AMD Instinct MI300X", words=False):
        check_weights("fp8", [amd])


def test_what_a_device_has_not_is_refused(refuses):
    with refuses("generation.no_fp8", "'fp8'", jax.devices()[0].device_kind):
        check_weights("fp8", jax.devices())
    with refuses("generation.unknown_weights", "'int3'", "int8", "fp8"):
        check_weights("int3", jax.devices())
