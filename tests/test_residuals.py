"""A backward without its known arrays keeps none of them and still is `jax.vjp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.parallel.blocks import restore_vjp, vjp_without


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


WEIGHTS = {"up": normal(0, 4, 7), "down": normal(1, 7, 4), "scale": normal(2, 4)}
X = normal(3, 5, 4)
SHIFT = normal(4, 5, 4)


def two_matmuls(weights, x):
    hidden = jnp.tanh((x + SHIFT) @ weights["up"])
    return (hidden @ weights["down"]) * weights["scale"]


def tied_matmuls(weights, x):
    return jnp.sin(x @ weights["up"]) @ weights["up"].T


def unused_weights(weights, x):
    return jnp.exp(x)


def looped(weights, x):
    def body(x, _):
        return jnp.tanh(x @ weights["up"] @ weights["down"]), None

    return jax.lax.scan(body, x, length=3)[0]


FUNCTIONS = {
    "two matmuls": two_matmuls,
    "a weight used twice": tied_matmuls,
    "unused weights": unused_weights,
    "full remat": jax.checkpoint(two_matmuls),
    "a loop": looped,
}


@pytest.fixture(params=FUNCTIONS, scope="module")
def function(request):
    return FUNCTIONS[request.param]


@functools.cache
def without(function, known):
    """Value and gradients, the residuals crossing from one jit into another."""
    forward = jax.jit(
        lambda weights, x: vjp_without(function, (weights, x), known(weights, x))
    )
    backward = jax.jit(
        lambda residuals, dy, weights, x: restore_vjp(residuals, known(weights, x))(dy)
    )
    value, residuals = forward(WEIGHTS, X)
    return value, backward(residuals, jnp.cos(value), WEIGHTS, X), residuals


KNOWN = {
    "nothing": lambda weights, x: (),
    "weights": lambda weights, x: weights,
    "weights and input": lambda weights, x: (weights, {"x": x}),
}


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_the_restored_backward_gives_the_gradients_of_jax_vjp(function, known):
    expected, vjp = jax.vjp(function, WEIGHTS, X)
    value, gradients, _ = without(function, known)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda found, wanted: np.testing.assert_allclose(
            found, wanted, rtol=1e-5, atol=1e-5
        ),
        gradients,
        vjp(jnp.cos(expected)),
    )


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_no_known_array_is_kept(function, known):
    *_, residuals = without(function, known)
    held = [np.asarray(array) for array in jax.tree.leaves(known(WEIGHTS, X))]
    kept = [np.asarray(array) for array in residuals.kept]
    assert not any(np.array_equal(one, other) for one in held for other in kept)


def test_what_is_not_known_is_kept():
    *_, residuals = without(two_matmuls, KNOWN["nothing"])
    shapes = {array.shape for array in residuals.kept}
    assert {WEIGHTS["up"].shape, WEIGHTS["down"].shape} <= shapes


def test_full_remat_keeps_nothing_when_weights_and_input_are_known():
    closed = jax.checkpoint(tied_matmuls)
    *_, residuals = without(closed, KNOWN["weights and input"])
    assert residuals.kept == []
