"""A run starts from given values; each device asks for its part of them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import make_train_step
from meshpar.models.presets import build


class Asked:
    """An array that notes which parts of it are asked for."""

    def __init__(self, values):
        self.values, self.shape, self.parts = values, values.shape, []

    def __getitem__(self, index):
        self.parts.append(self.values[index].size)
        return self.values[index]


@pytest.fixture(scope="module")
def steps():
    def step(layout, count):
        model = build("test", layers=3)
        devices = jax.devices()[:count]
        return make_train_step(model, optax.adamw(1e-3), layout, devices=devices)

    return {
        "one": step("data=1", 1),
        "uneven": step("stage=2,microbatches=2,precision=bf16,param_dtype=bf16", 2),
    }


@pytest.fixture(scope="module")
def values(steps):
    state = steps["one"].init(3)
    return jax.tree.map(np.asarray, state.params)


def test_a_state_is_born_with_the_seed_that_its_randomness_follows_from(steps):
    for step in steps.values():
        assert [int(step.init(seed).seed) for seed in (0, 3)] == [0, 3]


@pytest.mark.parametrize("kind", ["numpy", "jax", "asked"])
def test_values_go_to_uneven_stages_and_come_back(kind, steps, values):
    step = steps["uneven"]
    make = {"numpy": np.asarray, "jax": jnp.asarray, "asked": Asked}[kind]
    given = jax.tree.map(make, values)
    state = step.init(params=given)
    # The master copy has all bits, what is stored is rounded, and moments start at 0.
    found = step.in_layer_order(jax.tree.map(np.asarray, state.opt_state.master))
    jax.tree.map(np.testing.assert_array_equal, found, values)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert not any(np.any(x) for x in jax.tree.leaves(state.opt_state.inner[0].mu))
    if kind == "asked":
        for leaf in jax.tree.leaves(given):
            assert sum(leaf.parts) == leaf.values.size
    if kind == "jax":  # What is given stays the caller's.
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_what_is_not_of_the_model_is_named(steps, refuses):
    step = steps["one"]
    shapes = step.state_shapes.params
    values = jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), shapes)
    with refuses("model.unknown_parameter", "'mlp'"):
        step.init(params={**values, "mlp": np.zeros(3)})
    fewer = {name: value for name, value in values.items() if name != "token_embed"}
    with refuses("model.missing_parameter", "'token_embed'", 1):
        step.init(params=fewer)
    with refuses("model.wrong_parameter_shape", "token_embed", (2, 2)):
        step.init(params={**values, "token_embed": np.zeros((2, 2))})
    with refuses("model.unknown_parameter", "'mean'"):
        step.init(model_state={"mean": np.zeros(3)})
