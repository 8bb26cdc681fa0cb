"""Training with optimizers that look at whole arrays, their rank or their sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar import Layout, make_train_step
from meshpar.models.presets import build
from tests.kept_gradients import keeping_gradients
from tests.marks import slow
from tests.pipelined import QUICK, assert_close, batch_of, mlp_of
from tests.test_optimizer_state import with_scales

MUON = contrib.muon(1e-2)
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=16)
PADDED = "stage=2,microbatches=2"  # 3 layers as 2 and 1
INTERLEAVED = "stage=2,microbatches=2,schedule=interleaved_1f1b,chunks=2"


def step_of(line, optimizer, model):
    layout = Layout.parse(line)
    return make_train_step(
        model,
        optimizer,
        layout,
        devices=jax.devices()[: layout.num_devices],
        compiler_options=QUICK,
    )


def unrolled(model, tree):
    """Every layer a parameter of its own."""
    return {
        name: tuple(
            jax.tree.map(lambda x, at=at: x[at], value)
            for at in range(model.groups[0].num_layers)
        )
        if name == model.groups[0].name
        else value
        for name, value in tree.items()
    }


@pytest.mark.parametrize(
    ("line", "optimizer", "layers"),
    [
        slow("fsdp=2,zero=2", MUON, 3),
        slow(PADDED, MUON, 3),
        slow(PADDED, optax.chain(optax.clip_by_global_norm(0.1), ADAFACTOR), 3),
        slow(INTERLEAVED, ADAFACTOR, 4),
        slow("fsdp=2,stage=3,microbatches=2", MUON, 4),
        slow(INTERLEAVED, contrib.prodigy(), 4),
    ],
)
def test_a_step_updates_each_layer_as_a_parameter_of_its_own(line, optimizer, layers):
    # Gradients of so few tokens lack directions, which Muon makes of rounding: 6e-8 of
    # the largest gradient, added anywhere, moves a matrix by 1.5e-4.
    bound = 2e-4 if optimizer is MUON else 1e-5
    model = with_scales(layers)
    step = step_of(line, optax.chain(keeping_gradients(), optimizer), model)
    state = step.init(0)
    params = unrolled(model, step.in_layer_order(state.params))
    state, _ = step(state, batch_of())
    gradients = unrolled(model, step.in_layer_order(state.opt_state[0]))
    found = unrolled(model, step.in_layer_order(state.params))

    @jax.jit
    def updated(params, gradients):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    wanted = jax.device_get(updated(params, gradients))
    assert_close(found, wanted, bound)


def test_a_plateau_of_the_loss_lowers_the_rate():
    plateau = contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    step = step_of("data=2", optax.chain(optax.sgd(1e-3), plateau), mlp_of(3))
    state = step.init(0)
    for _ in range(3):
        state, metrics = step(state, batch_of())
    assert float(state.opt_state[1].best_value) == pytest.approx(
        float(metrics["loss"]), rel=0.1
    )
    assert float(state.opt_state[1].scale) < 1


def test_masks_in_the_order_of_layers_are_refused_under_chunks_whatever_the_sizes(
    refuses,
):
    random = np.random.default_rng(0)
    for ffn in (136, 24):
        model = build("test", layers=4, ffn=ffn)
        mask = jax.tree.map(
            lambda x: random.integers(0, 2, x.shape).astype(np.float32),
            jax.eval_shape(model.init, 0)["blocks"],
        )

        def update(updates, state, params=None, mask=mask):
            blocks = jax.tree.map(jnp.multiply, updates["blocks"], mask)
            return {**updates, "blocks": blocks}, state

        masked = optax.GradientTransformation(optax.init_empty_state, update)
        optimizer = optax.chain(optax.adam(1e-3), masked)
        step_of("data=1", optimizer, model)
        with refuses(
            *("optimizer.stacked_out_of_order", repr(INTERLEAVED)),
            *("blocks.attention.out", "4 layers", (4, 8, 32), (4, 4, 8, 32)),
        ):
            step_of(INTERLEAVED, optimizer, model)
