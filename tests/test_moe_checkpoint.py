"""A run with experts goes on under another degree of `expert`."""

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.models.presets import build
from meshpar.train.checkpoint import Checkpoints
from tests.states import drawn

SIZES = dict(layers=2, embed=16, heads=2, kv_heads=2, vocab=32, expert_ffn=8)


def step_of(line):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(
        build("tiny-moe", **SIZES), optax.adam(1e-2), layout, devices=devices
    )


def moved(state, other, folder):
    """The state, as a checkpoint gives it to another step."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state, {"layout": "expert=8"})
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(other.state_shapes, other.shardings)
    for wanted, found in zip(
        jax.tree.leaves(state), jax.tree.leaves(restored), strict=True
    ):
        np.testing.assert_array_equal(wanted, found)
    return restored


def test_a_state_is_the_same_under_another_degree(tmp_path):
    state = drawn(step_of("expert=8"), scale=1.0, steps_done=1)
    moved(state, step_of("fsdp=2,expert=2"), tmp_path)


@pytest.mark.slow
def test_a_state_and_its_next_step_are_the_same_under_another_degree(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9))
    batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((8, 8)))
    one, other = step_of("expert=8"), step_of("fsdp=2,expert=2")
    state, _ = one(one.init(0), batch)
    restored = moved(state, other, tmp_path)
    after, metrics = one(state, batch)
    again, found = other(restored, batch)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    for wanted, found in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(again.params), strict=True
    ):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale)
    np.testing.assert_array_equal(
        after.model_state["blocks"]["mlp"]["router"]["bias"],
        again.model_state["blocks"]["mlp"]["router"]["bias"],
    )
