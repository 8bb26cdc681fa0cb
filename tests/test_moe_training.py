"""Models with experts train as a plain program does, whatever splits the experts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Layout, make_train_step
from meshpar.checks.examples import check_examples_apart
from meshpar.machine.mesh import use_mesh
from meshpar.model.parameter import initial_key
from meshpar.models.moe import DenseBlock, MoEConfig, RoutedBlock, moe
from meshpar.train.layer_order import in_model_order
from tests import moe_reference
from tests.marks import slow
from tests.states import normal_values

SMALL = MoEConfig(
    layers=2, embed=16, heads=4, kv_heads=2, vocab=32, experts=8, top_k=2, expert_ffn=8
)
CONFIGS = {
    "dropless": replace(SMALL, bias_rate=0.01),
    "capacity": replace(SMALL, capacity_factor=1.0),
    "sigmoid in groups, shared": replace(
        SMALL,
        score="sigmoid",
        groups=4,
        top_groups=2,
        shared_experts=1,
        scale=2.5,
        bias_rate=0.01,
    ),
    "like DeepSeek-V3": replace(
        SMALL,
        layers=3,
        kv_heads=0,
        dense_layers=1,
        ffn=24,
        score="sigmoid",
        groups=4,
        top_groups=2,
        shared_experts=1,
        scale=2.5,
        bias_rate=0.01,
        q_lora_rank=8,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "all experts": replace(SMALL, experts=4, top_k=4),
    "four layers": replace(SMALL, layers=4, bias_rate=0.01),
}
STEPS, BATCH, SEQ = 3, 8, 8
OPTIMIZER = optax.adamw(1e-2, eps=1e-4)
LIMIT = 0.5  # of the gradients' norm: all three steps are clipped


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, 32, (BATCH, SEQ + 1)).astype(np.int32)
        weights = (rng.random((BATCH, SEQ)) < 0.8).astype(np.float32)
        yield dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


def initial_of(config):
    """Values as Flax alone draws them, one block after another."""

    def group(name, kind, layers):
        @jax.jit
        def drawn(key):
            with nnx.use_eager_sharding(False):
                block = kind(config, nnx.Rngs(key))
            return nnx.to_pure_dict(nnx.split(block, nnx.Param, ...)[1])

        blocks = [drawn(initial_key(0, name, layer)) for layer in range(layers)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)

    dense = config.dense_layers
    found = {"blocks": group("blocks", RoutedBlock, config.layers - dense)}
    if dense:
        found["dense_blocks"] = group("dense_blocks", DenseBlock, dense)
    return found


@functools.cache
def given(name):
    """Parameters that no program draws."""
    model = moe(CONFIGS[name])
    return normal_values(jax.eval_shape(model.init, 0), scale=0.1)


@functools.cache
def reference(name):
    """Losses, norms and drops of the plain program, its parameters and biases."""
    config = CONFIGS[name]
    params = given(name)
    optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), OPTIMIZER)

    @jax.jit
    def step(params, opt_state, bias, batch):
        (loss, (dropped, tokens)), gradients = jax.value_and_grad(
            lambda params: moe_reference.loss(config, params, bias, batch), has_aux=True
        )(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        norm = optax.tree.norm(gradients)
        uneven = jnp.sign(tokens.mean(-1, keepdims=True) - tokens)
        bias = bias + config.bias_rate * uneven
        params = optax.apply_updates(params, updates)
        return params, opt_state, bias, loss, norm, dropped

    opt_state, rows = jax.jit(optimizer.init)(params), []
    bias = jnp.zeros((config.layers - config.dense_layers, config.experts))
    for batch in batches():
        params, opt_state, bias, *row = step(params, opt_state, bias, batch)
        rows.append([float(value) for value in row])
    return rows, params, bias


FAST = "capacity", "data=2,context=2,expert=2"
"""What `make test` trains; whether its examples are apart would take half its time."""


def step_of(name, line):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(
        moe(CONFIGS[name]),
        OPTIMIZER,
        layout,
        devices=devices,
        max_grad_norm=LIMIT,
        check=(name, line) != FAST,
    )


def trained(name, line):
    """The step's metrics, and its state after the steps."""
    step = step_of(name, line)
    state, rows = step.init(params=given(name)), []
    for batch in batches():
        state, metrics = step(state, batch)
        rows.append({key: float(value) for key, value in metrics.items()})
    state = in_order(step, state)
    return rows, jax.device_get((state.params, state.model_state))


def in_order(step, state):
    """The state with its layers first to last, which stages store otherwise."""
    with use_mesh(step.mesh):
        return in_model_order(state, step.layer_orders)


CASES = [
    FAST,
    slow("like DeepSeek-V3", "fsdp=2,expert=2,tensor=2,zero_axes=fsdp"),
    slow("dropless", "fsdp=2,expert=2,zero_axes=fsdp"),
    slow("dropless", "expert=4,zero=1,zero_axes=expert"),
    slow("dropless", "data=2,expert=2,tensor=2,zero=2,zero_axes=data/expert"),
    slow(
        "dropless",
        "fsdp=2,stage=2,expert=2,microbatches=2,zero_axes=fsdp/expert,"
        "fsdp_gather=microbatch",
    ),
    slow("like DeepSeek-V3", "fsdp=2,stage=2,expert=2,microbatches=2,remat=full"),
    slow("like DeepSeek-V3", "context=2,expert=2,tensor=2,sequence_parallel=true"),
    slow("dropless", "stage=2,context=2,expert=2,microbatches=2"),
    slow("dropless", "context=4,expert=2,attention=ulysses"),
    slow("dropless", "expert=8"),
    slow("sigmoid in groups, shared", "expert=2,tensor=2"),
    slow("all experts", "fsdp=2,expert=2"),
    slow("capacity", "expert=8"),
    slow("capacity", "stage=2,expert=2,tensor=2,microbatches=2"),
    slow("dropless", "fsdp=2,expert=2,tensor=2,sequence_parallel=true,remat=full"),
    slow("four layers", "stage=2,expert=2,microbatches=4,schedule=gpipe"),
    *(
        slow("four layers", f"stage=2,chunks=2,expert=2,microbatches=4,schedule={name}")
        for name in ("interleaved_1f1b", "looped_bfs")
    ),
]


@pytest.mark.parametrize("name, line", CASES)
def test_steps_are_those_of_the_plain_program(name, line):
    rows, params, bias = reference(name)
    found, states = trained(name, line)
    for (loss, norm, dropped), row in zip(rows, found, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
        lost = row["auxiliary.dropped"] * row["weight_sum"]
        assert lost == pytest.approx(dropped)
    after, model_state = states

    def close(value, wanted):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * scale)

    jax.tree.map(close, after, jax.device_get(params))
    if CONFIGS[name].bias_rate:
        found = model_state["blocks"]["mlp"]["router"]["bias"]
        np.testing.assert_allclose(found, bias, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_experts_keep_examples_apart(name):
    batch = jax.eval_shape(lambda: next(batches()))
    check_examples_apart(moe(CONFIGS[name]), batch, "data=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        FAST,
        ("like DeepSeek-V3", "fsdp=2,stage=2,expert=2,microbatches=2"),
        ("like DeepSeek-V3", "expert=2,tensor=2"),
        ("four layers", "stage=2,chunks=2,expert=2,schedule=interleaved_1f1b"),
    ],
)
def test_initial_values_are_those_that_flax_draws(name, line):
    config, step = CONFIGS[name], step_of(name, line)
    wanted = {**jax.jit(moe(config).init)(0), **initial_of(config)}
    found = in_order(step, step.init(0)).params
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((found, wanted)))


def test_drops_are_counted_where_experts_have_a_capacity_and_nowhere_else():
    assert all(row[2] > 0 for row in reference("capacity")[0])
    config = CONFIGS["dropless"]
    bias = jnp.zeros((config.layers, config.experts))
    loss = jax.jit(functools.partial(moe_reference.loss, config))
    assert loss(given("dropless"), bias, next(batches()))[1][0] == 0
