"""What `logits` may do with the tokens and examples that a device has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar import Input, Layout, from_nnx, make_train_step
from tests.marks import slow
from tests.zoo.plain import normal

VOCAB, EMBED = 16, 8


class Ends(nnx.Module):
    def __init__(self, rngs, outputs):
        self.outputs = outputs
        self.read = normal(rngs, (VOCAB, EMBED))

    def embed(self, batch, scope):
        return self.read[...][batch["tokens"]]

    def head(self, x, batch, scope):
        return ((x**2).sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    def logits(self, x, scope):
        return self.outputs(x, scope)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.weight = normal(rngs, (EMBED,))

    def __call__(self, x, scope):
        return x + 1.0 + jnp.tanh(x) * self.weight[...]


def step_of(outputs, layout):
    model = from_nnx(
        ends=lambda rngs: Ends(rngs, outputs),
        block=Block,
        num_layers=2,
        inputs={
            "tokens": Input(("batch", "seq"), "int", below=VOCAB),
            "weights": Input(("batch", "seq"), is_weight=True),
        },
    )
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    return make_train_step(model, optax.sgd(0.1), layout, devices=devices)


def traced(outputs, layout):
    step = step_of(outputs, layout)
    batch = {"tokens": meshpar.batch_shapes(step.model, 4, seq=8)["tokens"]}
    jax.eval_shape(step.functions.logits, step.state_shapes, batch)


def less_the_mean(x, scope):
    mean = scope.sequence_sum(x.sum(1)) / scope.seq_length(x.shape[1])
    return x - mean[:, None]


def less_the_mean_at_hand(x, scope):
    return x - x.mean(1)[:, None]


def summed_at_hand(x, scope):
    return x.sum(1)


def less_the_mean_of_examples(x, scope):
    return x - x.mean(0)


def flat(x, scope):
    return jnp.tanh(x.reshape(-1, EMBED)).reshape(x.shape)


@pytest.mark.parametrize(
    ("outputs", "layout", "refusal"),
    [
        (less_the_mean_at_hand, "context=2", ("model.logits_join_tokens", "sub")),
        (summed_at_hand, "context=2", ("model.logits_join_tokens", "context=1")),
        (less_the_mean_of_examples, "data=2", ("model.joins_examples", "sub")),
        (less_the_mean_of_examples, "stage=2", ("model.joins_examples", "logits")),
    ],
)
def test_logits_that_join_what_devices_share_are_refused(
    refuses, outputs, layout, refusal
):
    with refuses(*refusal):
        traced(outputs, layout)
    traced(outputs, "data=1")


def test_logits_of_each_token_may_lie_flat_meanwhile():
    traced(flat, "context=2")


@pytest.mark.parametrize("outputs", [less_the_mean, slow(flat)])
def test_logits_of_a_split_sequence_are_those_of_a_whole_one(outputs):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 8)).astype(np.int32)
    found = []
    for layout in ("data=1", "context=2"):
        step = step_of(outputs, layout)
        found.append(step.logits(step.init(0), {"tokens": tokens}))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_sums_over_the_sequence_in_logits_are_refused_where_padding_would_count(
    refuses,
):
    step = step_of(less_the_mean, "context=2")
    with refuses("batch.padding_in_sequence_sum", 7, "scope.sequence_sum"):
        step.logits(step.state_shapes, {"tokens": np.ones((2, 7), np.int32)})
