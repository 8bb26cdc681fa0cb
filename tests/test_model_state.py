"""State that a step makes of its blocks' sums."""

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from tests.zoo.batch_statistics import RUNNING_MEAN


def running_mean(layout):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    step = make_train_step(
        RUNNING_MEAN.model(2), optax.sgd(0.1), layout, devices=devices
    )
    state, _ = step(step.init(0), RUNNING_MEAN.batch())
    return np.asarray(jax.device_get(state.model_state)["blocks"]["mean"])


@pytest.mark.slow
def test_sums_of_16_bits_are_added_up_over_a_split_batch():
    """XLA:CPU would end the process where it adds them up in 16."""
    split = running_mean("data=2,tensor=2,precision=bf16")
    np.testing.assert_allclose(split, running_mean("precision=bf16"), atol=2e-3)
    assert np.abs(split).max() > 0.01
