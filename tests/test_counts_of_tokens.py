"""What devices that share sequences may sum: counts of tokens, shares of examples."""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Input, InputError, Layout, default_rules, from_nnx
from meshpar.checks.sequence_probe import check_sequences
from meshpar.checks.sequences import tokens_joined
from meshpar.testing.batches import check_undeclared, undeclared, with_batch
from meshpar.testing.equivalence import check_layouts

SEQ = 16
TOKENS = {name: Input(("batch", "seq"), "int", below=11) for name in ("x", "label")}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, stream, scope):
        return stream + nnx.gelu(self.up(stream))


def model_of(head, inputs=TOKENS, **options):
    """A model of tokens whose `head` makes its sums of (batch, seq) losses."""

    class Ends(nnx.Module):
        def __init__(self, rngs):
            self.read = nnx.Embed(11, 4, rngs=rngs)
            self.write = nnx.Linear(4, 11, rngs=rngs)

        def embed(self, batch, scope):
            return self.read(batch["x"])

        def head(self, stream, batch, scope):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                self.write(stream), batch["label"]
            )
            return head(losses, batch, scope)

    return from_nnx(
        ends=Ends,
        block=Block,
        num_layers=1,
        stream=("batch", "seq", "embed"),
        inputs=inputs,
        **options,
    )


def batch_of(**more):
    tokens = np.random.default_rng(0).integers(0, 11, (8, SEQ))
    return {"x": tokens, "label": tokens, **more}


ADD_UP = {
    "size": lambda losses: jnp.float32(losses.size),
    "shape": lambda losses: jnp.asarray(np.prod(losses.shape), jnp.float32),
    "ones": lambda losses: jnp.ones_like(losses).sum(),
    "half": lambda losses: jnp.float32(losses.size) / 2,
    "twice": lambda losses: -(-2 * jnp.float32(losses.size)),
    "sum": lambda losses: jnp.float32(losses.size) + jnp.ones_like(losses).sum(),
}
DO_NOT = {
    "examples": lambda losses: jnp.float32(losses.shape[0]),
    "one more": lambda losses: jnp.float32(losses.size + 1),
    "plus one": lambda losses: jnp.float32(losses.size) + 1,
    "square": lambda losses: jnp.float32(losses.shape[1] ** 2),
    "product": lambda losses: jnp.float32(losses.size) * jnp.ones_like(losses).sum(),
    "complex": lambda losses: (1j * losses.size * jnp.ones((), jnp.complex64)).real,
    "inverse": lambda losses: 1 / jnp.float32(losses.size),
    "root": lambda losses: jnp.sqrt(jnp.float32(losses.size)),
}


@pytest.mark.parametrize("name", ADD_UP)
def test_a_multiple_of_how_many_tokens_there_are_is_a_sum(name):
    model = model_of(lambda losses, batch, scope: (losses.sum(), ADD_UP[name](losses)))
    assert tokens_joined(model) is None


@pytest.mark.parametrize("name", DO_NOT)
def test_what_the_devices_would_not_add_up_to_is_refused_with_a_way_out(name):
    model = model_of(lambda losses, batch, scope: (losses.sum(), DO_NOT[name](losses)))
    assert "scope.sequence_sum" in tokens_joined(model)


def share_of_examples(losses, scope):
    """What these tokens are of each example: 1 over all devices."""
    here = jnp.full(losses.shape[:1], losses.shape[1], jnp.float32)
    return here / scope.sequence_sum(here)


def by_example(losses, batch, scope):
    """The mean over examples of the means over their tokens."""
    means = losses.sum(1) / scope.seq_length(losses.shape[1])
    return means.sum(), share_of_examples(losses, scope).sum()


@pytest.mark.slow
def test_sums_of_sizes_and_of_shares_train_as_on_one_device():
    of_tokens = model_of(lambda losses, *_: (losses.sum(), jnp.float32(losses.size)))
    check_layouts(of_tokens, batch_of(), ["context=2"])
    check_layouts(model_of(by_example), batch_of(), ["data=2,context=2"])


def test_sizes_that_nobody_names_are_those_of_the_batch(refuses):
    more = {"m": Input(("batch", None, "seq"))}
    model = model_of(lambda *_: None, {**TOKENS, **more})
    found = with_batch(model, batch_of(m=np.ones((8, 3, SEQ), np.float32)))
    assert found.inputs["m"].sizes == (None, 3, None)
    assert {name: found.inputs[name] for name in TOKENS} == TOKENS
    with refuses("batch.size_not_given", "'m'", "shape", "N"):
        tokens_joined(model)
    sized = Input(("batch", None, None), shape=(None, 3, None))
    with refuses("batch.size_not_given", "'m'", 3, "N"):
        tokens_joined(model_of(lambda *_: None, {**TOKENS, "m": sized}))


def test_padding_is_not_counted(refuses):
    weights = {"weights": Input(("batch", "seq"), is_weight=True)}

    def head(losses, batch, scope):
        return (losses * batch["weights"]).sum(), ADD_UP["ones"](losses)

    model, layout = model_of(head, {**TOKENS, **weights}), Layout.parse("context=2")
    arrays = batch_of(weights=np.ones((8, SEQ), np.float32))
    for seq in (SEQ, 9):
        cut = {name: array[:, :seq] for name, array in arrays.items()}
        with refuses("batch.padding_in_count", 9) if seq == 9 else nullcontext():
            check_sequences(model, layout, default_rules(layout), cut)


def padded(losses, batch, scope):
    return (losses * batch["pad"]).sum(), batch["pad"].sum()


def test_a_model_that_declares_nothing_reads_any_array_of_the_batch(refuses):
    batch = batch_of(pad=np.ones((8, SEQ), np.float32))
    assert check_layouts(model_of(padded, None), batch, ["data=2"]).ok
    assert undeclared(model_of(padded, None), batch) == ["x", "label", "pad"]
    for line, per_token in (("context=2", False), ("stage=2,microbatches=2", True)):
        model, layout = model_of(padded, None, per_token=per_token), Layout.parse(line)
        with refuses("model.unknown_token_dim", "'x'", "inputs"):
            check_undeclared(model, batch, layout, default_rules(layout))
        with pytest.raises(InputError):
            check_layouts(model, batch, [line])


@pytest.mark.slow
def test_tokens_are_not_shared_by_a_single_rank():
    batch = batch_of(pad=np.ones((8, SEQ), np.float32))
    model = model_of(padded, None, per_token=True)
    assert check_layouts(model, batch, ["microbatches=4"]).ok
