"""Every layout starts the backward from the gradient of the mean loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from meshpar import Layout, from_nnx, make_train_step, pipeline_value_and_grad
from meshpar.model.inputs import Input
from tests.marks import slow

EXAMPLES, EMBED, LAYERS = 16, 4, 2


@jax.custom_vjp
def marked(x):
    """Return x; its backward clips each value of the gradient, and adds a constant.

    So do gradients clipped in a model, and auxiliary losses that a layer injects.
    """
    return x


marked.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -0.05, 0.05) + 0.1,))


def block(w, x):
    return marked(x + jnp.tanh(x @ w))


def head_sums(w, x, weights):
    return (((x @ w) ** 2).sum(-1) * weights).sum(), weights.sum()


def kernel(rngs):
    value = jax.random.normal(rngs.params(), (EMBED, EMBED))
    return nnx.Param(value, out_sharding=("embed", None))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = kernel(rngs), kernel(rngs)

    def embed(self, batch, scope):
        return batch["x"] @ self.first

    def head(self, x, batch, scope):
        return head_sums(self.last[...], x, batch["weights"])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = kernel(rngs)

    def __call__(self, x, scope):
        return block(self.w[...], x)


def model():
    inputs = {"x": Input(("batch", "embed")), "weights": Input(("batch",))}
    return from_nnx(ends=Ends, block=Block, num_layers=LAYERS, inputs=inputs)


def batch():
    random = np.random.default_rng(0)
    x = random.standard_normal((EXAMPLES, EMBED), np.float32)
    return {"x": x, "weights": random.uniform(0, 2, EXAMPLES).astype(np.float32)}


def mean_loss(first, blocks, last, *, x, weights):
    """The mean loss as plain JAX computes it."""
    x = x @ first
    for w in blocks:
        x = block(w, x)
    total, weight = head_sums(last, x, weights)
    return total / weight


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "line",
    [
        slow("data=2,microbatches=2"),
        "fsdp=2,stage=2,microbatches=4",
        slow("data=1"),
        slow("data=2"),
        slow("stage=2"),
        slow("fsdp=2,microbatches=4,zero=2"),
        slow("stage=2,microbatches=4,schedule=gpipe"),
        slow("data=2,stage=2,tensor=2,microbatches=4,remat=stage"),
    ],
)
def test_gradients_are_those_of_the_mean_loss(line):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(model(), optax.sgd(0.1), layout, devices=devices)
    state = step.init(0)
    params = jax.device_get(step.in_layer_order(state.params))
    given = params["first"], params["blocks"]["w"], params["last"]
    wanted = jax.jit(jax.grad(mean_loss, argnums=(0, 1, 2)))(*given, **batch())
    _, found = step.loss_and_gradients(state, batch())
    found = jax.device_get(step.in_layer_order(found))
    for one, other in zip(
        (found["first"], found["blocks"]["w"], found["last"]), wanted, strict=True
    ):
        close(one, other)


def test_a_pipeline_of_functions_has_the_gradients_of_the_mean_loss():
    random, given = np.random.default_rng(1), batch()
    first, last = random.standard_normal((2, EMBED, EMBED), np.float32)
    blocks = random.standard_normal((LAYERS, EMBED, EMBED), np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "stage"))
    run = pipeline_value_and_grad(
        block,
        lambda ends, x, weights: head_sums(ends["last"], x, weights),
        mesh=mesh,
        num_microbatches=4,
        embed=lambda ends, x: x @ ends["first"],
    )
    ends = {"first": first, "last": last}
    loss, (of_blocks, of_ends, _) = run(blocks, ends, given["x"], given["weights"])
    wanted_loss, wanted = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1, 2)))(
        first, blocks, last, **given
    )
    close(loss, wanted_loss)
    for one, other in zip(
        (of_ends["first"], of_blocks, of_ends["last"]), wanted, strict=True
    ):
        close(one, other)
