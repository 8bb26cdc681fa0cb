"""Parameters in bf16: what is kept in fp32, and how values are rounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, lint, make_train_step
from meshpar.model import is_parameter
from meshpar.testing.quick_compile import quick_compile_options
from models.presets import build

BATCH, SEQ = 8, 16
PARAM_DTYPES = ("fp32", "bf16", "bf16_stochastic")
IN_BF16 = ",precision=bf16,param_dtype="


def model_of(dtype=jnp.float32, **sizes):
    """A model whose initial values are of that dtype."""
    model = build("test", **sizes)
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


@pytest.mark.parametrize("param_dtype", PARAM_DTYPES)
def test_a_model_of_bf16_values_is_updated_in_fp32(param_dtype):
    line = f"data=2,precision=bf16,param_dtype={param_dtype}"
    step = step_of(line, optax.adam(1e-3), model_of(jnp.bfloat16))
    state, _ = step(step.init(0), batch_of(0))
    described = [(x.shape, x.dtype) for x in jax.tree.leaves(step.state_shapes)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == described
    floats = {x.dtype for x in jax.tree.leaves(state.opt_state) if x.dtype != jnp.int32}
    assert floats == {np.dtype(np.float32)}


def test_a_small_update_moves_the_master_of_bf16_values():
    """A step of 1e-5 is far below what bf16 of values near 1 can tell apart."""
    line = "data=1" + IN_BF16 + "bf16"
    step = step_of(line, optax.sgd(1e-5), model_of(jnp.bfloat16))
    state = step.init(0)
    before = jax.device_get(state.opt_state.master)
    gradients = jax.device_get(step.loss_and_gradients(state, batch_of(0))[1])
    after = jax.device_get(step(state, batch_of(0))[0].opt_state.master)
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
