"""Parameters in bf16: what is kept in fp32, and how values are rounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, lint, make_train_step
from meshpar.model.parameter import is_parameter
from meshpar.testing.equivalence import quick_compile_options
from meshpar.train.optimizer_state import full_dtype, stochastic_round
from tests.kept_gradients import keeping_gradients
from tests.marks import slow
from tests.pipelined import mlp_of

BATCH, SEQ = 8, 16
PARAM_DTYPES = ("fp32", "bf16", "bf16_stochastic")
IN_BF16 = ",precision=bf16,param_dtype="
INTERLEAVED = "stage=2,microbatches=2,schedule=interleaved_1f1b,chunks=2"
UNEVEN = "fsdp=2,stage=3,microbatches=2"
ROUNDED = (
    "fsdp=2,tensor=2,zero=2",
    slow(UNEVEN),
    slow("fsdp=2,zero=3"),
    slow(INTERLEAVED),
)
SKIPPING = (
    "fsdp=2,zero=2" + IN_BF16 + "bf16_stochastic",
    slow(UNEVEN + IN_BF16 + "bf16"),
    slow("fsdp=4,zero=1"),
    slow("fsdp=2" + IN_BF16 + "bf16,optimizer_memory=host"),
    slow(INTERLEAVED + IN_BF16 + "bf16_stochastic"),
)


def model_of(dtype=jnp.float32, layers=2):
    """A model whose initial values are of that dtype."""
    model = mlp_of(layers)
    parameters = jax.tree.map(
        lambda parameter: dataclasses.replace(parameter, dtype=dtype),
        model.parameters,
        is_leaf=is_parameter,
    )
    return dataclasses.replace(model, parameters=parameters)


def batch_of(seed, **replaced):
    tokens = np.random.default_rng(seed).integers(0, 64, (BATCH, SEQ + 1))
    weights = np.ones((BATCH, SEQ), np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
        **replaced,
    }


def step_of(line, optimizer, model=None, **options):
    layout = Layout.parse(line)
    return make_train_step(
        model or model_of(),
        optimizer,
        layout,
        devices=jax.devices()[: layout.num_devices],
        compiler_options=quick_compile_options("cpu"),
        **options,
    )


def dtypes_of(opt_state):
    return {x.dtype for x in jax.tree.leaves(opt_state) if x.dtype != jnp.int32}


def step_of_bf16_values(param_dtype):
    line = f"data=2,precision=bf16,param_dtype={param_dtype}"
    return step_of(line, optax.adam(1e-3), model_of(jnp.bfloat16))


@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
def test_the_optimizers_state_of_bf16_values_is_fp32(param_dtype):
    step = step_of_bf16_values(param_dtype)
    assert dtypes_of(step.state_shapes.opt_state) == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
def test_a_model_of_bf16_values_is_updated_in_fp32(param_dtype):
    step = step_of_bf16_values(param_dtype)
    state, _ = step(step.init(0), batch_of(0))
    assert_as_described(step, state)
    assert dtypes_of(state.opt_state) == {np.dtype(np.float32)}


def assert_as_described(step, state):
    described = [(x.shape, x.dtype) for x in jax.tree.leaves(step.state_shapes)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == described


def test_a_small_update_moves_the_master_of_bf16_values():
    """A step of 1e-5 is far below what bf16 of values near 1 can tell apart."""
    line = "data=1" + IN_BF16 + "bf16"
    optimizer = optax.chain(keeping_gradients(), optax.sgd(1e-5))
    step = step_of(line, optimizer, model_of(jnp.bfloat16))
    state = step.init(0)
    before = jax.device_get(state.opt_state.master)
    state, _ = step(state, batch_of(0))
    assert_as_described(step, state)
    after = jax.device_get(state.opt_state.master)
    gradients = jax.device_get(state.opt_state.inner[0])
    for one, other, gradient in zip(
        *map(jax.tree.leaves, (before, after, gradients)), strict=True
    ):
        np.testing.assert_array_equal(other, one + np.float32(-1e-5) * gradient)


def test_lint_counts_the_bytes_that_are_stored():
    def bytes_of(line, dtype=jnp.float32):
        return sum(
            row.bytes for row in lint(model_of(dtype), Layout.parse(line)).parameters
        )

    fp32 = bytes_of("data=2")
    assert bytes_of("data=2", jnp.bfloat16) == fp32
    assert bytes_of("data=2" + IN_BF16 + "bf16") == fp32 // 2


def test_rounding_at_random_keeps_the_mean_and_what_needs_no_rounding():
    value = jnp.full((1 << 16,), 1 + 2**-10)  # a quarter of the way to the next bf16
    rounded = stochastic_round(value, jax.random.key(0)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1, 1 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-10, abs=2**-7 / 256 * 3)
    exact = jnp.asarray([0.0, -1.5, jnp.inf, jnp.nan, 2.0**-126])
    np.testing.assert_array_equal(
        stochastic_round(exact, jax.random.key(0)).astype(jnp.float32), exact
    )


def adding(amount):
    """An optimizer that adds a constant to every parameter, whatever its gradient."""

    def update(gradients, state, params=None):
        return jax.tree.map(lambda x: jnp.full_like(x, amount), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@functools.cache
def rounded_at_random(line):
    """Parameters before and after two additions that bf16 can only make at random."""
    step = step_of(line + IN_BF16 + "bf16_stochastic", adding(1e-4), model_of(layers=4))
    state = step.init(0)
    before = step.in_layer_order(state.params)
    for seed in range(2):
        state, _ = step(state, batch_of(seed))
    trees = before, step.in_layer_order(state.params)
    return [[np.float32(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees]


@pytest.mark.slow
@pytest.mark.parametrize("line", ROUNDED)
def test_random_rounding_does_not_depend_on_the_layout(line):
    before, expected = rounded_at_random("data=2")
    moved = jax.tree.map(lambda one, other: (other - one).ravel(), before, expected)
    moved = np.concatenate(moved)
    assert np.mean(moved == np.float32(2e-4)) < 0.1  # nearly all had to be rounded
    assert moved.mean() == pytest.approx(2e-4, rel=0.05)
    _, params = rounded_at_random(line)
    for one, other in zip(params, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("line", SKIPPING)
def test_gradients_that_are_not_finite_change_nothing_and_are_counted(line):
    step = step_of(line, optax.adam(1e-3), model_of(layers=4), max_grad_norm=1.0)
    state, _ = step(step.init(0), batch_of(0))
    before = jax.device_get((state.params, state.opt_state))
    infinite = np.full((BATCH, SEQ), np.inf, np.float32)
    state, metrics = step(state, batch_of(1, weights=infinite))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.opt_state)),
        before,
    )
    assert (int(state.step), int(metrics["skipped"])) == (2, 1)
    state, metrics = step(state, batch_of(2))
    assert (int(state.step), int(metrics["skipped"])) == (3, 1)
    assert np.isfinite(metrics["loss"])
    changed = jax.tree.map(
        lambda one, other: np.any(one != other), jax.device_get(state.params), before[0]
    )
    assert any(jax.tree.leaves(changed))


def test_updates_are_made_in_32_bits_also_of_initial_values_of_64():
    """As JAX draws them where it has been told to compute in 64 bits."""
    for dtype in (np.float64, np.float32, jnp.bfloat16, np.int32):
        assert full_dtype(dtype) == np.float32
    for dtype in (np.complex64, np.complex128):
        assert full_dtype(dtype) == np.complex64


@pytest.mark.slow
def test_a_step_trains_alike_where_jax_computes_in_64_bits():
    def trained(params=None):
        step = step_of("data=2", optax.adamw(1e-2))
        state, losses = step.init(0, params=params), []
        first = jax.device_get(state.params)
        for _ in range(3):
            state, metrics = step(state, batch_of(0))
            losses.append(float(metrics["loss"]))
        floats = [
            one.dtype
            for one in jax.tree.leaves(state)
            if jnp.issubdtype(one.dtype, jnp.floating)
        ]
        assert {*floats} == {np.dtype(np.float32)}
        return first, losses

    first, wanted = trained()
    with jax.enable_x64(True):
        _, found = trained(first)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[2] < wanted[0]
