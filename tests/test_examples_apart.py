"""Models that join the examples of a batch: refused where devices have some each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Input, InputError, Layout, from_nnx, make_train_step
from tests.zoo.plain import normal

EXAMPLES, SEQ, EMBED = 8, 4, 16


class Ends(nnx.Module):
    def __init__(self, rngs, loss):
        self.loss = loss
        self.weight = normal(rngs, (EMBED, EMBED))

    def embed(self, batch, scope):
        return batch["x"] @ self.weight[...]

    def head(self, x, batch, scope):
        return self.loss(x, batch, scope)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.weight = normal(rngs, (EMBED,))

    def __call__(self, x, scope):
        return x + jnp.tanh(x) * self.weight[...]


def step_of(loss, layout):
    model = from_nnx(
        ends=lambda rngs: Ends(rngs, loss),
        block=Block,
        num_layers=2,
        inputs={"x": Input(("batch", "seq", None), shape=(None, None, EMBED))},
    )
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    return make_train_step(model, optax.sgd(0.1), layout, devices=devices)


def evaluated(loss, layout):
    step = step_of(loss, layout)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, SEQ, EMBED))
    loss_sum, weight_sum = step.evaluate(step.init(0), {"x": x.astype(np.float32)})
    return float(loss_sum / weight_sum)


def contrastive(x, batch, scope):
    pooled = x.mean(1)
    return -jnp.diag(jax.nn.log_softmax(pooled @ pooled.T)).sum(), len(x)


def normalised_by_hand(x, batch, scope):
    return jnp.abs((x - x.mean(0)) / x.std(0)).sum(), len(x)


def noise_of_the_batch(x, batch, scope):
    return (x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)).sum(), len(x)


def by_place_in_the_batch(x, batch, scope):
    return (x.sum((1, 2)) * jnp.arange(len(x))).sum(), len(x)


def of_the_worst_example(x, batch, scope):
    return (x**2).sum((1, 2)).max() * len(x), len(x)


def sorted_by_loss(x, batch, scope):
    return jnp.sort((x**2).sum((1, 2)))[-2:].sum(), 2.0


def root_of_the_sum(x, batch, scope):
    return jnp.sqrt((x**2).sum()), 1.0


JOINED = [
    (contrastive, "every example with every example"),
    (normalised_by_hand, "of a sum over examples"),
    (noise_of_the_batch, "an array of places"),
    (by_place_in_the_batch, "an array of places"),
    (of_the_worst_example, "reduce_max over the batch"),
    (sorted_by_loss, "sort along the batch"),
    (root_of_the_sum, "sqrt of a sum over examples"),
]
SPLITS = ["data=2", "fsdp=2,zero=1", "microbatches=2", "stage=2,microbatches=2"]


@pytest.mark.parametrize(
    ("loss", "words"), JOINED, ids=[one.__name__ for one, _ in JOINED]
)
@pytest.mark.parametrize("layout", SPLITS)
def test_what_joins_examples_is_refused_by_its_line_where_they_are_split(
    loss, words, layout
):
    step = step_of(loss, layout)
    batch = {"x": jax.ShapeDtypeStruct((EXAMPLES, SEQ, EMBED), jnp.float32)}
    with pytest.raises(InputError, match=words) as error:
        jax.eval_shape(step.functions.update, step.state_shapes, batch)
    assert repr(str(step.layout)) in str(error.value)
    assert f"{__file__}:" in str(error.value)


def test_one_device_with_the_whole_batch_may_join_them():
    assert evaluated(contrastive, "data=1") > 0


def plain(x, batch, scope):
    return (x**2).sum(), len(x)


def a_mean_of_weight_one(x, batch, scope):
    return (x**2).mean(), 1.0


def rows_of_all_examples(x, batch, scope):
    rows = x.reshape(-1, x.shape[-1])
    found = jax.nn.log_softmax(rows @ jnp.ones((EMBED, 3)))
    return -found[:, 0].reshape(x.shape[:2]).sum(), len(x)


def one_example_after_another(x, batch, scope):
    add = lambda total, one: (total + (one**2).sum(), None)  # noqa: E731
    return jax.lax.scan(add, jnp.float32(0), x)[0], len(x)


def each_by_itself(x, batch, scope):
    return jax.lax.map(lambda one: jnp.sqrt((one**2).sum()), x).sum(), len(x)


def noise_of_each_example(x, batch, scope):
    draw = lambda key: jax.random.normal(key, (SEQ, EMBED))  # noqa: E731
    return (x * jax.vmap(draw)(scope.key("noise"))).sum(), len(x)


def of_all_pairs_of_tokens(x, batch, scope):
    return jax.nn.logsumexp(jnp.einsum("bid,bjd->bij", x, x), axis=-1).sum(), len(x)


APART = [
    *(plain, a_mean_of_weight_one, rows_of_all_examples, one_example_after_another),
    *(each_by_itself, noise_of_each_example, of_all_pairs_of_tokens),
]


@pytest.mark.parametrize("loss", APART, ids=[one.__name__ for one in APART])
def test_what_treats_each_example_by_itself_is_as_on_one_device(loss):
    found, alone = (evaluated(loss, layout) for layout in ("data=2", "data=1"))
    assert found == pytest.approx(alone, rel=1e-5)
