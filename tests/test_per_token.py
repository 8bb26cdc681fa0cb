"""Ends that a model calls token-wise, whose tokens the ranks of a pipeline share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar import Input, from_nnx, make_train_step
from meshpar.model.scope import Scope
from tests.marks import slow
from tests.zoo.plain import normal

VOCAB, EMBED, SEQ = 16, 8, 8


class Ends(nnx.Module):
    def __init__(self, rngs, loss):
        self.loss = loss
        self.read, self.write = (
            normal(rngs, (VOCAB, EMBED)),
            normal(rngs, (EMBED, VOCAB)),
        )

    def embed(self, batch, scope):
        x = self.read[...][batch["tokens"]]
        return x + batch["memory_seq"].mean(1)[:, None] if "memory_seq" in batch else x

    def head(self, x, batch, scope):
        loss = self.loss(x @ self.write[...], batch, scope)
        return loss if isinstance(loss, tuple) else (loss, batch["weights"].sum())

    def logits(self, x, scope):
        return x - x.mean(1)[:, None]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.weight = normal(rngs, (EMBED, EMBED))

    def __call__(self, x, scope):
        return x + jnp.tanh(jnp.cumsum(x, 1) @ self.weight[...])


def step_of(loss, layout, *, per_token=True):
    model = from_nnx(
        ends=lambda rngs: Ends(rngs, loss),
        block=Block,
        num_layers=2,
        per_token=per_token,
        inputs={
            "tokens": Input(("batch", "seq"), "int", below=VOCAB),
            "weights": Input(("batch", "seq"), is_weight=True),
            "memory_seq": Input(
                ("batch", "memory_seq", None), shape=(None, None, EMBED), optional=True
            ),
        },
    )
    devices = jax.devices()[:2] if "2" in layout else jax.devices()[:1]
    return make_train_step(model, optax.sgd(0.1), layout, devices=devices)


@functools.cache
def state_of(layout):
    """The first state, which is the same whatever the loss."""
    return step_of(of_each_token, layout).init(0)


def losses_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def of_each_token(logits, batch, scope):
    return (losses_of(logits, batch["tokens"]) * batch["weights"]).sum()


def of_the_next_token(logits, batch, scope):
    return losses_of(logits[:, :-1], batch["tokens"][:, 1:]).sum()


def of_the_mean(logits, batch, scope):
    mean = scope.sequence_sum(logits.sum(1)) / scope.seq_length(logits.shape[1])
    return ((logits - mean[:, None]) ** 2).sum()


def of_whole_sequences(logits, batch, scope):
    return (scope.over_sequence(lambda x: jnp.cumsum(x, 1), logits) ** 2).sum()


def by_examples(logits, batch, scope):
    return losses_of(logits, batch["tokens"]).sum(), jnp.float32(len(logits))


@pytest.mark.parametrize(
    ("loss", "refusal"),
    [
        (by_examples, ("model.per_token_joins_tokens", "per_token=True", 2)),
        (of_the_next_token, ("model.per_token_joins_tokens", "slice", 2)),
        (of_the_mean, ("model.whole_sequence_in_ends", "scope.sequence_sum")),
        (of_whole_sequences, ("model.whole_sequence_in_ends", "scope.over_sequence")),
    ],
)
def test_ends_that_mix_tokens_are_refused_under_stages(refuses, loss, refusal):
    def traced(layout, **options):
        step = step_of(loss, layout, **options)
        batch = meshpar.batch_shapes(step.model, 4, seq=SEQ)
        jax.eval_shape(step.functions.evaluated, step.state_shapes, batch)

    with refuses(*refusal):
        traced("stage=2")
    traced("stage=1")
    traced("stage=2", per_token=False)


@pytest.mark.parametrize("name", ["batch_sum", "sequence_sum", "over_sequence"])
def test_sums_of_whole_sequences_are_refused_where_ranks_share_tokens(refuses, name):
    scope, x = Scope(token_positions=jnp.arange(4)), jnp.ones((2, 4))
    given = (jnp.cumsum, x) if name == "over_sequence" else (x,)
    with refuses("model.whole_sequence_in_ends", f"scope.{name}", "per_token"):
        getattr(scope, name)(*given)


def by_size(logits, batch, scope):
    losses = losses_of(logits, batch["tokens"])
    return losses.sum(), losses.size


def by_ones(logits, batch, scope):
    losses = losses_of(logits, batch["tokens"])
    return losses.sum(), jnp.ones_like(losses).sum()


def of_flat_tokens(logits, batch, scope):
    losses = losses_of(logits.reshape(-1, VOCAB), batch["tokens"].reshape(-1))
    return (losses * batch["weights"].reshape(-1)).sum()


def of_written_over(logits, batch, scope):
    return losses_of(logits.at[..., 0].set(0.0), batch["tokens"]).sum()


@functools.cache
def mean_loss(loss, layout):
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, VOCAB, (4, SEQ)).astype(np.int32),
        "weights": np.ones((4, SEQ), np.float32),
        "memory_seq": rng.normal(size=(4, 6, EMBED)).astype(np.float32),
    }
    evaluation = step_of(loss, layout).evaluate(state_of(layout), batch)
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    return float(loss_sum / weight_sum)


@pytest.mark.parametrize(
    ("loss", "of_one_rank"),
    [
        slow(of_each_token, of_each_token),
        (by_size, of_each_token),  # as all weights are 1
        (by_ones, of_each_token),
        (of_flat_tokens, of_each_token),
        slow(of_written_over, of_written_over),
    ],
)
def test_token_wise_ends_are_shared_and_change_no_loss(loss, of_one_rank):
    expected = mean_loss(of_one_rank, "stage=1")
    assert mean_loss(loss, "stage=2") == pytest.approx(expected, rel=1e-5)


def test_logits_that_mix_tokens_are_refused_where_ranks_share_them(refuses):
    def traced(layout, **options):
        step = step_of(of_each_token, layout, **options)
        batch = meshpar.batch_shapes(step.model, 4, seq=SEQ)
        jax.eval_shape(step.functions.logits, step.state_shapes, batch)

    with refuses("model.logits_join_tokens", "per_token=True", 2, "logits"):
        traced("stage=2")
    traced("stage=1")
