"""Optimizers whose updates would depend on how a pipeline stacks the layers."""

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import Layout, make_train_step
from tests.pipelined import QUICK, assert_close, batch_of, model_of

ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=16)
PADDED = "stage=2,microbatches=2"  # 3 layers as 2 and 1
INTERLEAVED = "stage=2,microbatches=2,schedule=interleaved_1f1b,chunks=2"


def trained(line, optimizer, layers, num_steps=3):
    """Parameters after some steps, in the model's order of layers."""
    layout = Layout.parse(line)
    step = make_train_step(
        model_of(layers),
        optimizer,
        layout,
        devices=jax.devices()[: layout.num_devices],
        compiler_options=QUICK,
    )
    state = step.init(0)
    for _ in range(num_steps):
        state, _ = step(state, batch_of())
    return step.in_layer_order(state.params)


def noise():
    """An optimizer that draws noise of an array's shape."""
    return optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1.0))


def every(num_steps, optimizer):
    """An optimizer that adds up the gradients of some steps."""
    return optax.MultiSteps(optimizer, num_steps).gradient_transformation()


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAFACTOR,
        optax.chain(optax.clip_by_block_rms(1e-4), optax.sgd(1.0)),
        optax.chain(optax.clip_by_block_rms(10.0), optax.sgd(1.0)),
        optax.adafactor(optax.linear_schedule(0.0, 1e-2, 5)),
        every(6, optax.adafactor(1e-2)),
    ],
)
def test_an_optimizer_that_sees_the_empty_places_is_refused(optimizer):
    match = r"3 layers in 4 places, 1 of them empty.* blocks\..* even size"
    with pytest.raises(ValueError, match=match):
        trained(PADDED, optimizer, layers=3)


def test_an_optimizer_that_sees_the_order_of_layers_is_refused():
    with pytest.raises(ValueError, match="4 layers in another order"):
        trained(INTERLEAVED, noise(), layers=4)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
        optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-3)),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 4, 9)),
        every(4, optax.adam(1e-3)),
    ],
)
def test_an_optimizer_of_single_values_is_not_refused(optimizer):
    trained(PADDED, optimizer, layers=3, num_steps=0)


def test_a_mean_over_stacked_layers_equals_that_of_one_device_where_none_is_empty():
    wanted = trained("data=1", ADAFACTOR, layers=4)
    assert_close(trained(INTERLEAVED, ADAFACTOR, layers=4), wanted, 1e-4)


def test_an_optimizer_of_the_models_own_sizes_is_left():
    def update(gradients, state, params=None):
        for gradient in jax.tree.leaves(gradients["blocks"]):
            if gradient.shape[0] != 4:
                raise ValueError("as many places as the layout has")
        return gradients, state

    fixed = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    trained(PADDED, fixed, layers=3, num_steps=0)
