"""The state of any optimizer follows its parameter, and no layout changes a number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar.models.presets import build
from meshpar.train.optimizer_state import LARGE_BYTES
from tests.marks import slow
from tests.test_precision import batch_of
from tests.test_precision import step_of as step_of_model

MODEL = build(layers=4, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=64, gated=True)


def average_of_parameters(decay):
    """Keeps the exponential moving average of parameters, and changes no update."""

    def update(updates, average, params):
        new = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new, average, 1 - decay)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.array, params), update
    )


# Adam divides by a gradient: one of rounding alone would become a whole step.
EPS = 1e-5
ADAM = optax.adam(1e-3, eps=EPS)
OPTIMIZERS = {
    "adam": ADAM,
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "muon": contrib.muon(1e-3),
    "average": optax.chain(ADAM, average_of_parameters(0.9)),
    "lion": optax.lion(1e-4),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "masked": optax.masked(ADAM, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "two optimizers": optax.multi_transform(
        {"matrix": optax.adamw(1e-3, eps=EPS), "vector": optax.sgd(1e-2, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree),
    ),
    "scheduled": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, eps=EPS),
}
SMALL = 4 * 64 * 2
"""Values of the largest factor of Adafactor's that lacks the dim which is split."""

SPLIT = "fsdp=4,zero=2"
STAGED = "stage=2,tensor=2,microbatches=2"
UNEVEN = "fsdp=2,stage=3,microbatches=2"
CASES = [
    *((name, SPLIT) for name in OPTIMIZERS),
    *((name, STAGED) for name in ("adafactor", "average")),
    *(slow(name, STAGED) for name in ("adam", "muon")),
    ("muon", UNEVEN),
    *(slow(name, UNEVEN) for name in ("adam", "average")),
]


def step_of(line, optimizer=ADAM, model=MODEL):
    return step_of_model(line, optimizer, model)


def after_two_steps(line, optimizer):
    """The step, and its parameters and averages of them after two batches."""
    step = step_of(line, optimizer)
    state = step.init(0)
    for seed in range(2):
        state, _ = step(state, batch_of(seed))
    trees = [state.params]
    if optimizer is OPTIMIZERS["average"]:
        trees.append(state.opt_state[1])
    return step, [step.in_layer_order(tree) for tree in trees]


@pytest.fixture(scope="module")
def alone():
    """What each optimizer makes of the parameters on one device, made once."""
    made = {}

    def by(name):
        if name not in made:
            made[name] = after_two_steps("data=1", OPTIMIZERS[name])[1]
        return made[name]

    return by


@pytest.mark.parametrize(("name", "line"), CASES)
def test_the_state_of_any_optimizer_follows_its_parameter(name, line, alone):
    """As on one device after two steps, and nothing large is whole."""
    step, params = after_two_steps(line, OPTIMIZERS[name])
    for one, other in zip(*map(jax.tree.leaves, (params, alone(name))), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
    for leaf, sharding in zip(
        jax.tree.leaves(step.state_shapes.opt_state),
        jax.tree.leaves(step.shardings.opt_state),
        strict=True,
    ):
        assert leaf.size <= SMALL or not sharding.is_fully_replicated, (leaf, sharding)


def with_history(size):
    """An optimizer that keeps an array of no parameter."""
    return optax.GradientTransformation(
        lambda params: {"history": jnp.zeros(size)},
        lambda updates, state, params=None: (updates, state),
    )


@pytest.mark.parametrize("line", ["fsdp=4", "data=2,zero=1", "tensor=2"])
def test_large_state_of_no_parameter_is_refused_where_states_are_split(line, refuses):
    step_of(line, with_history(LARGE_BYTES // 4))
    numbers = ("'history'", (262145,), "1,048,580", "1,048,576")
    larger = with_history(LARGE_BYTES // 4 + 1)
    with refuses("optimizer.large_unsplit_state", *numbers):
        step_of(line, larger)
    step_of("data=2", larger)


def test_optimizer_state_in_the_hosts_memory_stays_there_and_changes_no_number():
    steps = [step_of("fsdp=4"), step_of("fsdp=4,optimizer_memory=host")]
    states = []
    for step in steps:
        state = step.init(0)
        for seed in range(2):
            state, _ = step(state, batch_of(seed))
        states.append(state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(states[1].opt_state)
        if leaf.ndim
    }
    assert kinds == {"pinned_host"}
    assert jax.tree.leaves(states[1].params)[0].sharding.memory_kind != "pinned_host"
