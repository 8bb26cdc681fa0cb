"""LoRA under any layout takes the steps of a plain program that adds thin products."""

import functools
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.model.lora import LoRA
from meshpar.models.presets import PRESETS, build
from meshpar.testing.batches import random_batch
from tests.marks import slow
from tests.states import normal_values

CONFIG = PRESETS["test"]
MODEL = build("test", layers=4)
SHAPE = LoRA(rank=3, alpha=6.0)
STEPS, RATE = 3, 0.05
LAYOUTS = [
    "fsdp=2,tensor=2",
    *map(
        slow,
        (
            "data=2,tensor=2",
            "fsdp=2,stage=2,microbatches=2",
            "fsdp=4,zero=3,tensor=2,remat=full",
            "stage=2,tensor=2,context=2,microbatches=4,schedule=interleaved_1f1b,"
            "chunks=2",
            "tensor=2,sequence_parallel=true",
            "data=8",
        ),
    ),
]


@functools.cache
def base():
    return normal_values(jax.eval_shape(MODEL.init, 0))


@functools.cache
def batches():
    return [random_batch(MODEL, 8, 12, seed=at) for at in range(STEPS)]


def factors():
    """A and B, neither of them zero."""
    model = SHAPE.model(MODEL)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda one: (0.1 * rng.standard_normal(one.stacked_shape)).astype(np.float32),
        model.parameters,
        is_leaf=lambda node: hasattr(node, "stacked_shape"),
    )


# The textbook's form: x W + (x A) B, one layer after another, whole arrays.


def norm(x, scale):
    mean = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + CONFIG.norm_epsilon) * scale


def rotated(x):
    half = x.shape[-1] // 2
    rates = CONFIG.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(x.shape[1])[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def adapted(x, weight, thin, num_inputs=1):
    def product(x, w, dims):
        return jnp.tensordot(x, w, dims)

    thinned = product(product(x, thin["a"], num_inputs), thin["b"], 1)
    return product(x, weight, num_inputs) + SHAPE.alpha / SHAPE.rank * thinned


def plain_loss(thin, weights, batch):
    table, group = weights["token_embed"], CONFIG.heads // CONFIG.kv_heads
    x = table[batch["tokens"]]
    length = x.shape[1]
    seen = np.tril(np.ones((length, length), bool))
    for layer in range(4):
        own = jax.tree.map(lambda w, at=layer: w[at], weights["blocks"])
        low = jax.tree.map(lambda w, at=layer: w[at], thin["blocks"])
        y = norm(x, own["attention_norm"]["scale"])
        qkv = adapted(y, own["attention"]["qkv"], low["attention"]["qkv"])
        q, k, v = qkv[:, :, :, :group], qkv[:, :, :, group], qkv[:, :, :, group + 1]
        q = rotated(q.reshape(*q.shape[:2], -1, q.shape[-1]))
        k, v = (jnp.repeat(one, group, 2) for one in (rotated(k), v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        chances = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", chances, v)
        x = x + adapted(mixed, own["attention"]["out"], low["attention"]["out"], 2)
        y = norm(x, own["mlp_norm"]["scale"])
        both = adapted(y, own["mlp"]["gate_up"], low["mlp"]["gate_up"])
        hidden = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
        x = x + adapted(hidden, own["mlp"]["down"], low["mlp"]["down"])
    logits = norm(x, weights["final_norm"]["scale"]) @ table.T
    known = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(known, batch["targets"][..., None], -1)[..., 0]
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


@functools.cache
def plain_steps():
    """Loss and gradients of each step, and the factors after them all."""
    values, found = factors(), []
    slope = jax.jit(jax.value_and_grad(plain_loss))
    for batch in batches():
        loss, gradients = slope(values, base(), batch)
        found.append((float(loss), gradients))
        values = jax.tree.map(lambda w, g: w - RATE * g, values, gradients)
    return found, values


def close(found, wanted):
    def check(one, other):
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)

    jax.tree.map(check, found, wanted)


@functools.cache
def step_of(line):
    layout = Layout.of(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(SHAPE.model(MODEL), optax.sgd(RATE), layout, devices=devices)


def first_state(step):
    return step.init(params=factors(), model_state=SHAPE.state(MODEL, base()))


@pytest.mark.parametrize("line", LAYOUTS)
def test_steps_are_those_of_the_plain_program(line):
    step = step_of(line)
    state = first_state(step)
    frozen = jax.tree.map(np.asarray, state.model_state)
    wanted, last = plain_steps()
    values = factors()
    for batch, (loss, gradients) in zip(batches(), wanted, strict=True):
        state, metrics = step(state, batch)
        assert abs(float(metrics["loss"]) - loss) < 1e-5
        before, values = values, step.in_layer_order(state.params)
        values = jax.tree.map(np.asarray, values)
        slopes = jax.tree.map(lambda one, other: (one - other) / RATE, before, values)
        close(slopes, gradients)
    close(values, last)
    jax.tree.map(np.testing.assert_array_equal, state.model_state, frozen)


@pytest.mark.parametrize("line", [slow(LAYOUTS[0]), *LAYOUTS[1:]])
def test_so_are_the_gradients_of_the_program_that_gives_them(line):
    step = step_of(line)
    state = first_state(step)
    for batch, (loss, gradients) in zip(batches(), plain_steps()[0], strict=True):
        found, slopes = step.loss_and_gradients(state, batch)
        assert abs(float(found) - loss) < 1e-5
        close(step.in_layer_order(slopes), gradients)
        state, _ = step(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["data=2,tensor=2", "fsdp=2,remat=full"])
def test_half_precision_is_near_the_plain_program(line):
    """Of gated blocks, frozen and used in bf16: 8 bits of each product."""
    layout = Layout.of(f"{line},precision=bf16")
    shape = replace(SHAPE, frozen_dtype="bf16")
    step = make_train_step(
        shape.model(MODEL),
        optax.sgd(RATE),
        layout,
        devices=jax.devices()[: layout.num_devices],
    )
    state = step.init(params=factors(), model_state=shape.state(MODEL, base()))
    frozen = jax.tree.leaves(state.model_state)
    assert {one.dtype for one in frozen} == {jnp.dtype(jnp.bfloat16)}
    assert {one.dtype for one in jax.tree.leaves(state.params)} == {jnp.dtype("f4")}
    ((loss, gradients), *_), _ = plain_steps()
    found, slopes = step.loss_and_gradients(state, batches()[0])
    assert float(found) == pytest.approx(loss, rel=0.01)

    def check(one, other):
        assert one.dtype == jnp.float32
        off = np.linalg.norm(np.asarray(one) - other) / np.linalg.norm(other)
        assert off < 0.05, off

    jax.tree.map(check, step.in_layer_order(slopes), gradients)
    _, metrics = step(state, batches()[0])
    assert float(metrics["loss"]) == pytest.approx(float(found), rel=1e-3)


def test_nothing_is_kept_of_what_is_frozen():
    step = make_train_step(
        SHAPE.model(MODEL), optax.adamw(1e-2), "data=1", devices=jax.devices()[:1]
    )
    state = step.state_shapes
    few = sum(x.size for x in jax.tree.leaves(state.params))
    assert few < MODEL.num_parameters / 3
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert moments <= 2 * few + 8


@functools.cache
def plain_step():
    one = jax.devices()[:1]
    return make_train_step(MODEL, optax.sgd(1.0), "data=1", devices=one)


def assert_same_logits(state, params):
    """Holds a state with factors to the model with those weights."""
    tokens, plain = batches()[0]["tokens"], plain_step()
    np.testing.assert_allclose(
        step_of("data=1").logits(state, tokens),
        plain.logits(plain.init(params=params), tokens),
        atol=2e-6,
    )


def test_a_model_says_at_first_what_it_said_without_factors():
    given = SHAPE.state(MODEL, base())
    state = step_of("data=1").init(0, model_state=given)
    is_zero = [not np.any(x) for x in jax.tree.leaves(state.params)]
    assert sum(is_zero) == len(is_zero) / 2, "B is zero at first, and A is not"
    assert_same_logits(state, base())


def test_merged_weights_say_the_same():
    given = SHAPE.state(MODEL, jax.tree.map(np.asarray, base()))
    merged, own = SHAPE.merged(MODEL, factors(), given)
    assert own == {}
    assert_same_logits(first_state(step_of("data=1")), merged)


def test_a_part_of_a_merged_weight_is_that_of_the_whole():
    given = SHAPE.state(MODEL, jax.tree.map(np.asarray, base()))
    merged, _ = SHAPE.merged(MODEL, factors(), given)
    out = merged["blocks"]["attention"]["out"]
    part = (slice(1, 3), slice(2, 4), slice(0, 5), slice(7, 20))
    np.testing.assert_allclose(out[part], out[...][part], atol=1e-6)
    assert out[2:3].shape == (1, *out.shape[1:])


def test_experts_have_factors_of_their_own():
    model = build("tiny-moe", layers=2, embed=16, heads=2, kv_heads=2, experts=4)
    found = LoRA(rank=2, targets=("mlp",)).model(model).flat_parameters()
    path = next(path for path in found if path.endswith("down.a"))
    assert found[path].logical_axes[0] == "experts"
    assert found[path].shape[0] == 4
    assert not any("router" in path for path in found)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            {"targets": ("atention",)},
            ("model.unknown_lora_target", "'atention'", "'attention'"),
        ),
        ({"targets": ("mlp_norm",)}, ("model.unknown_lora_target", "'mlp_norm'")),
        ({"rank": 0}, ("value.not_whole_number", "rank=0", 1)),
        ({"alpha": 0.0}, ("value.not_positive", "alpha=0.0")),
        ({"targets": ()}, ("model.no_lora_targets", "targets=()")),
        (
            {"frozen_dtype": "fp8"},
            ("model.unknown_frozen_dtype", "'fp8'", "'fp32'", "'bf16'"),
        ),
    ],
)
def test_what_cannot_be_is_named(options, refusal, refuses):
    with refuses(*refusal):
        LoRA(**options).model(MODEL)


def test_it_is_plain_data():
    assert LoRA(**asdict(SHAPE)) == SHAPE
