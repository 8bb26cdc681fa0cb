"""The state of any optimizer follows its parameter, and no layout changes a number."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar.train.optimizer_state import LARGE_BYTES
from tests.marks import slow
from tests.pipelined import mlp_of
from tests.test_precision import batch_of
from tests.test_precision import step_of as step_of_model


def with_scales(layers):
    """A small model of matrices whose blocks have a vector each besides."""
    model = mlp_of(layers)
    (group,) = model.groups
    blocks = model.parameters["blocks"]
    scale = replace(
        blocks["up"],
        shape=(32,),
        logical_axes=("mlp",),
        initial=lambda key: 1 + 0.3 * jax.random.normal(key, (32,)),
    )

    def block(params, x, scope):
        up = params["up"] * params["scale"]
        return group.block({"up": up, "down": params["down"]}, x, scope)

    return replace(
        model,
        parameters={**model.parameters, "blocks": {**blocks, "scale": scale}},
        groups=(replace(group, block=block),),
    )


MODEL = with_scales(4)


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
SMALL = 4 * 32
"""Values of the largest factor of Adafactor's that lacks the dim which is split."""

SPLIT = "fsdp=4,zero=2"
ON_HOST = SPLIT + ",optimizer_memory=host"
STAGED = "stage=2,tensor=2,microbatches=2"
UNEVEN = "fsdp=2,stage=3,microbatches=2"
QUICKLY = [("muon", SPLIT)]
"""Not left to `make test-full`."""

CASES = [
    *((name, SPLIT) for name in OPTIMIZERS),
    ("two optimizers", ON_HOST),
    *((name, STAGED) for name in ("adafactor", "average", "adam", "muon")),
    *((name, UNEVEN) for name in ("muon", "adam", "average")),
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


@pytest.mark.parametrize(
    ("name", "line"), [one if one in QUICKLY else slow(*one) for one in CASES]
)
def test_the_state_of_any_optimizer_follows_its_parameter(name, line, alone):
    """As on one device after two steps, and nothing large is whole."""
    step, params = after_two_steps(line, OPTIMIZERS[name])
    for one, other in zip(*map(jax.tree.leaves, (params, alone(name))), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
    assert_nothing_large_is_whole(step)


@pytest.mark.parametrize(("name", "line"), CASES)
def test_the_state_of_any_optimizer_is_split(name, line):
    assert_nothing_large_is_whole(step_of(line, OPTIMIZERS[name]))


def test_optimizer_state_is_said_to_lie_in_the_hosts_memory():
    shapes, shardings = (
        getattr(step_of(ON_HOST), name) for name in ("state_shapes", "shardings")
    )
    kinds = {
        sharding.memory_kind
        for leaf, sharding in zip(
            jax.tree.leaves(shapes.opt_state),
            jax.tree.leaves(shardings.opt_state),
            strict=True,
        )
        if leaf.ndim
    }
    assert kinds == {"pinned_host"}
    assert jax.tree.leaves(shardings.params)[0].memory_kind != "pinned_host"


def assert_nothing_large_is_whole(step):
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


@pytest.mark.slow
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
