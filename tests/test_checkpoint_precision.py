"""A run resumes under another `param_dtype`, and all that a state counts survives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.train.checkpoint import Checkpoints
from meshpar.train.optimizer_state import Mastered
from tests.marks import slow
from tests.states import drawn
from tests.test_precision import BATCH, PARAM_DTYPES, SEQ, batch_of, model_of, step_of

SPLIT = "fsdp=2,zero=2"
STAGED = "stage=2,microbatches=2,schedule=interleaved_1f1b,chunks=2"
ON_HOST = STAGED + ",optimizer_memory=host"
UNEVEN = "fsdp=2,stage=3,microbatches=2,optimizer_memory=host"


@functools.cache
def step_in(line, param_dtype):
    line += f",precision=bf16,param_dtype={param_dtype}"
    return step_of(line, optax.adam(1e-3), model_of(layers=4))


def after_two_steps(step):
    """The state after a step that counts and one that is skipped."""
    state, _ = step(step.init(0), batch_of(0))
    infinite = np.full((BATCH, SEQ), np.inf, np.float32)
    return step(state, batch_of(1, weights=infinite))[0]


def as_after_two_steps(step):
    """Such a state of drawn values, without a program: those in bf16 are rounded."""
    state = drawn(step, scale=1.0, steps_done=2)
    skipped = jax.device_put(np.int32(1), step.shardings.skipped)
    state = dataclasses.replace(state, skipped=skipped)
    if not isinstance(state.opt_state, Mastered):
        return state
    rounded = jax.tree.map(
        lambda master, one: jax.device_put(master.astype(one.dtype), one.sharding),
        jax.device_get(state.opt_state.master),
        state.params,
    )
    return dataclasses.replace(state, params=rounded)


def saved_under(folder, line, param_dtype, state_of):
    """A checkpoint of such a state; its step and the state."""
    step = step_in(line, param_dtype)
    state = state_of(step)
    with Checkpoints(folder, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {})
    return step, state


def restored_under(folder, line, param_dtype):
    step = step_in(line, param_dtype)
    with Checkpoints(folder, layer_orders=step.layer_orders) as checkpoints:
        return step, checkpoints.restore(step.state_shapes, step.shardings)


def values_of(step, state):
    """The parameters in the most bits that the state has, and Adam's two moments."""
    mastered = isinstance(state.opt_state, Mastered)
    params = state.opt_state.master if mastered else state.params
    inner = state.opt_state.inner if mastered else state.opt_state
    return [step.in_layer_order(tree) for tree in (params, inner[0].mu, inner[0].nu)]


def assert_lies_as_said(step, state):
    for array, shape, sharding in zip(
        *map(jax.tree.leaves, (state, step.state_shapes, step.shardings)), strict=True
    ):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert sharding.memory_kind in (None, array.sharding.memory_kind)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder, step and state of each checkpoint, made once."""

    @functools.cache
    def on(line, param_dtype, state_of=after_two_steps):
        folder = tmp_path_factory.mktemp(param_dtype)
        return folder, *saved_under(folder, line, param_dtype, state_of)

    return on


@pytest.mark.parametrize(
    "state_of", [as_after_two_steps, slow(after_two_steps)], ids=["drawn", "trained"]
)
@pytest.mark.parametrize("there", ["fp32", "bf16", slow("bf16_stochastic")])
@pytest.mark.parametrize("here", PARAM_DTYPES)
def test_a_run_resumes_in_another_param_dtype_on_another_layout(
    there, here, state_of, saved
):
    """fp32 values become the master and its rounding; bf16 values are kept as such."""
    folder, step_there, state_there = saved(SPLIT, there, state_of)
    step, state = restored_under(folder, ON_HOST, here)
    assert_lies_as_said(step, state)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    params, *moments = values_of(step_there, state_there)
    as_stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wanted = as_stored if here == "bf16_stochastic" else params
    in_fp32 = jax.tree.map(lambda x: x.astype(np.float32), (wanted, *moments))
    found = jax.tree.map(lambda x: x.astype(np.float32), values_of(step, state))
    assert_equal(tuple(found), in_fp32)
    if here == "bf16":
        assert_equal(step.in_layer_order(state.params), as_stored)


@pytest.mark.slow
@pytest.mark.parametrize("here", PARAM_DTYPES)
def test_a_master_copy_on_the_host_of_uneven_stages_survives(here, saved):
    folder, there, state_there = saved(UNEVEN, "bf16")
    step, state = restored_under(folder, SPLIT, here)
    assert_lies_as_said(step, state)
    params, *moments = values_of(there, state_there)
    if here == "bf16_stochastic":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert_equal(values_of(step, state), [params, *moments])
    state, metrics = step(state, batch_of(2))
    assert (int(state.step), int(metrics["skipped"])) == (3, 1)


@pytest.mark.slow
def test_a_run_goes_on_in_fp32_from_bf16_and_its_master_as_before(saved):
    folder, step, state = saved(SPLIT, "bf16")
    in_fp32, restored = restored_under(folder, STAGED, "fp32")
    expected = step.loss_and_gradients(state, batch_of(2))[0]
    loss = in_fp32.loss_and_gradients(restored, batch_of(2))[0]
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
