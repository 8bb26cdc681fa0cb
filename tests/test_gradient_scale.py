"""Gradients in bf16 are scaled in fp32: a rounded scale would move all one way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from meshpar import pipeline_value_and_grad
from meshpar.parallel.context.splash import over_root
from meshpar.parallel.reduction import scaled
from tests.marks import slow
from tests.pipelined import BATCH, QUICK, SEQ, batch_of, mlp_of, state_of, step_of

BETWEEN = 1 + 0.9 / 256
"""Almost half-way between 1 and the next number in bf16, which is 1 + 2 / 256."""

BOUND = 1.5e-3
"""Of the bias: a rounded scale has 3.5e-3. What is in bf16 already has too few bits to
become `BETWEEN` times as large on average, by 1e-3."""

DTYPES = ("bf16", "fp32")


def bias(found, wanted):
    """How much longer `found` is than `wanted`, along `wanted`."""
    one, other = (
        np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (found, wanted)
    )
    return one @ other / (other @ other) - 1


def test_a_scale_is_not_rounded_to_the_bits_of_what_it_scales():
    values = jnp.asarray(np.random.default_rng(0).normal(size=9999), jnp.bfloat16)
    found = scaled({"x": values}, jnp.float32(BETWEEN))["x"]
    assert found.dtype == jnp.bfloat16
    assert abs(bias(found, BETWEEN * np.float64(values))) < BOUND


@pytest.mark.parametrize(
    "line", ["data=2", slow("microbatches=2"), slow("stage=2,microbatches=2")]
)
def test_the_mean_over_the_weights_of_a_batch_is_not_rounded(line):
    model = mlp_of(2)
    batch = {**batch_of(), "weights": np.full((BATCH, SEQ), 2 / 3 / BETWEEN)}
    found, wanted = (
        step.in_layer_order(step.loss_and_gradients(state_of(step, model), batch)[1])
        for step in (step_of(model, line, gradient_dtype=dtype) for dtype in DTYPES)
    )
    assert abs(bias(found, wanted)) < BOUND


def test_gradients_are_clipped_before_they_are_rounded():
    step = step_of(mlp_of(2), "data=2", gradient_dtype="bf16")
    _, gradients = step.loss_and_gradients(step.init(0), batch_of())
    norm = float(optax.tree.norm(jax.tree.map(np.float32, jax.device_get(gradients))))
    limit = norm / 2 * BETWEEN
    step = step_of(mlp_of(2), "data=2", gradient_dtype="bf16", max_grad_norm=limit)
    before = jax.device_get(step.init(0).params)
    after = jax.device_get(step(step.init(0), batch_of())[0].params)
    change = float(optax.tree.norm(jax.tree.map(np.subtract, before, after)))
    assert change == pytest.approx(limit, rel=3e-4)


def test_a_users_bf16_gradients_are_scaled_in_fp32():
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",), axis_types=(AxisType.Auto,))
    value_and_grad = pipeline_value_and_grad(
        lambda w, x: jnp.tanh(x @ w),
        lambda scale, x, y: (jnp.sum((scale * x - y) ** 2), jnp.float32(BETWEEN)),
        mesh=mesh,
        num_microbatches=2,
    )
    random = np.random.default_rng(0)
    weights = jnp.asarray(random.normal(size=(2, 32, 32)) / 6, jnp.bfloat16)
    x = jnp.asarray(random.normal(size=(8, 32)), jnp.bfloat16)
    scale = jnp.ones((), jnp.bfloat16)

    def outer(weights, factor):
        return factor * value_and_grad(weights, scale, x, x)[0]

    gradient = jax.jit(jax.grad(outer), compiler_options=QUICK)
    once, more = gradient(weights, 1.0), gradient(weights, BETWEEN)
    assert abs(bias(more, BETWEEN * np.float64(once))) < BOUND


def test_scores_are_scaled_in_fp32_too():
    """The root of 1/200 lies between two numbers of bf16."""
    q = jnp.asarray(np.linspace(1, 2, 200), jnp.bfloat16)[None]
    wanted = (np.asarray(q, np.float64) / 200**0.5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(over_root(q), wanted)
    assert (np.asarray(q * jnp.asarray(200**-0.5, q.dtype)) != wanted).any()
