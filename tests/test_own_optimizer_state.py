"""Optimizers whose state has other dims than the parameters, and no layout sees it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from meshpar import lint
from meshpar.train.optimizer_state import WholeStateWarning
from tests.marks import slow
from tests.pipelined import mlp_of
from tests.test_precision import batch_of
from tests.test_precision import step_of as step_of_model

BLOCK = 16
SPLIT = "fsdp=2,tensor=2"
STAGED = "stage=2,microbatches=2"  # 3 layers as 2 and 1
MODEL = mlp_of(3)

step_of = functools.partial(step_of_model, model=MODEL)


def by_parameter(function, params, *trees):
    """A tree like `params`, of what lies at each of its paths in other trees."""
    leaves, treedef = jax.tree.flatten(params)
    columns = [treedef.flatten_up_to(tree) for tree in trees]
    return [function(*row) for row in zip(leaves, *columns, strict=True)], treedef


def quantized(values):
    """Blocks of 8-bit values, and the scale of each block."""
    blocks = jnp.pad(values.ravel(), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), 1, keepdims=True) / 127
    codes = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
    return {"codes": codes.astype(jnp.int8), "scales": scales}


def restored(state, like):
    return (state["codes"] * state["scales"]).ravel()[: like.size].reshape(like.shape)


def adam_8bit(rate, decay=0.9, second_decay=0.99, eps=1e-3):
    """Adam whose moments are kept in 8 bits, one scale for each block of 16 values."""

    def init(params):
        zeros = jax.tree.map(lambda x: quantized(jnp.zeros_like(x)), params)
        return {"mean": zeros, "root": zeros}

    def update(updates, state, params=None):
        def one(gradient, mean, root):
            mean = decay * restored(mean, gradient) + (1 - decay) * gradient
            square = second_decay * restored(root, gradient) ** 2
            root = jnp.sqrt(square + (1 - second_decay) * gradient**2)
            update = -rate * mean / (root + eps)
            return update, quantized(mean), quantized(root)

        rows, tree = by_parameter(one, updates, state["mean"], state["root"])
        new, mean, root = (tree.unflatten(column) for column in zip(*rows, strict=True))
        return new, {"mean": mean, "root": root}

    return optax.GradientTransformation(init, update)


def shampoo(rate, damping=1e-2):
    """Shampoo of matrices (Gupta et al. 2018): L^(-1/4) G R^(-1/4)."""

    def init(params):
        def one(x):
            return [jnp.eye(size) * damping for size in x.shape]

        return jax.tree.map(one, params)

    def inverse_root(matrix):
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * jnp.maximum(values, damping) ** -0.25) @ vectors.T

    def update(updates, state, params=None):
        def one(gradient, factors):
            left, right = factors
            left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
            step = inverse_root(left) @ gradient @ inverse_root(right)
            return -rate * step, [left, right]

        rows, tree = by_parameter(one, updates, state)
        new, state = (tree.unflatten(column) for column in zip(*rows, strict=True))
        return new, state

    return optax.GradientTransformation(init, update)


def after_three_steps(step):
    state = step.init(0)
    for seed in range(3):
        state, _ = step(state, batch_of(seed))
    return state, step.in_layer_order(state.params)


def assert_close(found, wanted, bound):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


def in_parts(path, shape):
    """Blocks of 8-bit values over both mesh axes; scales too."""
    return PartitionSpec(("fsdp", "tensor"), None) if len(shape) == 2 else None


@pytest.mark.parametrize(
    ("optimizer", "bound"), [(adam_8bit(1e-3), 1e-6), (shampoo(1e-3), 1e-6)]
)
@pytest.mark.parametrize("line", [SPLIT, slow(STAGED)])
def test_state_of_other_dims_trains_as_on_one_device(optimizer, bound, line):
    _, alone = after_three_steps(step_of("data=1", optimizer))
    _, params = after_three_steps(step_of(line, optimizer))
    assert_close(params, alone, bound)


def test_the_user_says_how_state_of_other_dims_is_sharded():
    optimizer = adam_8bit(1e-3)
    step = step_of(SPLIT, optimizer, state_spec=in_parts)
    state, params = after_three_steps(step)
    _, alone = after_three_steps(step_of("data=1", optimizer))
    assert_close(params, alone, 1e-6)
    codes = state.opt_state["mean"]["blocks"]["up"]["codes"]
    assert codes.shape == (3, 32, BLOCK) and codes.dtype == jnp.int8
    assert codes.sharding.shard_shape(codes.shape) == (3, 8, BLOCK)


def test_large_whole_state_is_told_unless_the_user_says_how_it_is_sharded(monkeypatch):
    monkeypatch.setattr("meshpar.train.optimizer_state.LARGE_BYTES", 1000)
    told = r"'(mean|root)\.blocks\.up\.codes' .* 1,536 bytes .* state_spec="
    with pytest.warns(WholeStateWarning, match=told):
        step_of(SPLIT, adam_8bit(1e-3))
    found = lint(MODEL, SPLIT, optimizer=adam_8bit(1e-3)).findings
    assert {one.path for one in found} >= {"mean.blocks.up.codes"}
    assert {one.key for one in found} == {"optimizer.whole_state"}
    step_of(SPLIT, adam_8bit(1e-3), state_spec=in_parts)
    assert not lint(
        MODEL, SPLIT, optimizer=adam_8bit(1e-3), state_spec=in_parts
    ).findings
    step_of("data=2", adam_8bit(1e-3))


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (PartitionSpec("rows"), ("'rows'", 2)),
        (PartitionSpec(None, None, "fsdp"), (3, 2)),
        (PartitionSpec(None, ("fsdp", "tensor")), (1, 4)),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(spec, numbers, refuses):
    with refuses("optimizer.state_spec_does_not_fit", *numbers, words=False):
        step_of(SPLIT, adam_8bit(1e-3), state_spec=lambda path, shape: spec)


def layers_alone(tree):
    """Every layer a parameter of its own, as `unroll_optimizer` has them."""
    blocks = {
        name: tuple(array[at] for at in range(3))
        for name, array in tree["blocks"].items()
    }
    return {**tree, "blocks": blocks}


UNROLLED = {
    "noise": optax.noisy_sgd(1e-2, 0.1, 0.5, 0),
    "flat": optax.flatten(optax.adam(1e-2, eps=1e-4)),
}


@pytest.mark.parametrize("name", ["flat", slow("noise")])
def test_an_unrolled_optimizer_gets_each_layer_as_a_parameter_of_its_own(name):
    optimizer = UNROLLED[name]
    step = step_of(STAGED, optimizer, unroll_optimizer=True)
    state = step.init(0)
    params = layers_alone(step.in_layer_order(state.params))
    _, gradients = step.loss_and_gradients(state, batch_of(0))
    gradients = layers_alone(step.in_layer_order(gradients))
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    wanted = optax.apply_updates(params, updates)
    state, _ = step(state, batch_of(0))
    assert_close(layers_alone(step.in_layer_order(state.params)), wanted, 1e-5)


def distributed_shampoo(monkeypatch):
    """Distributed Shampoo of Google Research."""
    for name in ("map", "flatten", "unflatten", "leaves", "structure"):
        function = getattr(jax.tree, name)  # The library is of 2023.
        monkeypatch.setattr(jax, f"tree_{name}", function, raising=False)
    from precondition.distributed_shampoo import distributed_shampoo

    return distributed_shampoo(
        1e-2,
        block_size=64,
        matrix_epsilon=1e-3,
        start_preconditioning_step=1,
        generate_training_metrics=False,
        eigh=True,
    )


def kron(monkeypatch):
    """PSGD with Kronecker factors."""
    from psgdax.psgd import kron

    optimizer = kron(1e-3)

    def update(updates, state, params=None):  # It takes no loss, unlike its signature.
        return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("library", [kron, slow(distributed_shampoo)])
def test_preconditioners_of_a_library_train_as_on_one_device(library, monkeypatch):
    make = functools.partial(
        step_of,
        optimizer=library(monkeypatch),
        model=mlp_of(2),
        unroll_optimizer=True,
    )
    _, alone = after_three_steps(make("data=1"))
    _, params = after_three_steps(make(SPLIT))
    assert_close(params, alone, 1e-5)
