"""Derivatives that a user wrote and that join tokens are refused where devices share.

No trace of a forward tells of them: the model runs whole and in halves.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from meshpar import Input, Layout, from_nnx
from meshpar.checks import halves, sequences
from meshpar.checks.sequences import check_per_token, check_token_wise, tokens_joined
from meshpar.models.presets import build
from tests.marks import slow


def with_backward(backward):
    """The identity, whose backward is of (x, cotangent)."""

    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return function


def with_derivative(derivative):
    """The identity, whose forward derivative is of (x, tangent)."""

    @jax.custom_jvp
    def function(x):
        return 1.0 * x

    function.defjvp(lambda x, dx: (1.0 * x[0], derivative(x[0], dx[0])))
    return function


def share(g):
    """By the largest of each example, as quantised gradients are scaled."""
    return g / (jnp.abs(g).max((1, 2), keepdims=True) + 1e-6)


APART = {
    "scaled": with_backward(lambda x, g: 2 * g),
    "normalised": with_backward(lambda x, g: g / (1 + jnp.abs(g).max(-1)[..., None])),
    "injected": with_backward(lambda x, g: g + 0.1),
    "of its own place": with_derivative(lambda x, dx: dx * jnp.cos(x)),
}
JOINED = {
    "largest": with_backward(lambda x, g: share(g)),
    "sum": with_backward(lambda x, g: g + g.sum(1, keepdims=True)),
    "sums so far": with_backward(lambda x, g: jnp.cumsum(g, 1)),
    "reversed": with_backward(lambda x, g: g[:, ::-1]),
    "of all places": with_derivative(lambda x, dx: dx * x.sum(1, keepdims=True)),
}


def model_of(function, *, in_head=False, **options):
    """A model whose block, or else head, applies `function` to the stream."""

    class Ends(nnx.Module):
        def __init__(self, rngs):
            self.read = nnx.Embed(11, 4, rngs=rngs)
            self.write = nnx.Linear(4, 11, rngs=rngs)

        def embed(self, batch, scope):
            return self.read(batch["x"])

        def head(self, stream, batch, scope):
            stream = function(stream) if in_head else stream
            losses = optax.softmax_cross_entropy_with_integer_labels(
                self.write(stream), batch["x"]
            )
            return losses.sum(), jnp.float32(losses.size)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, stream, scope):
            stream = stream if in_head else function(stream)
            return stream + nnx.gelu(self.up(stream))

    return from_nnx(
        ends=Ends,
        block=Block,
        num_layers=1,
        stream=("batch", "seq", "embed"),
        inputs={"x": Input(("batch", "seq"), "int", below=11)},
        **options,
    )


@pytest.mark.parametrize(
    "name", ["scaled", "normalised", slow("injected"), slow("of its own place")]
)
def test_what_keeps_tokens_apart_is_taken(name):
    check_token_wise(model_of(APART[name]))


@pytest.mark.parametrize(
    "name",
    ["largest", "of all places", slow("sum"), slow("sums so far"), slow("reversed")],
)
def test_what_joins_tokens_is_refused(name, refuses):
    with refuses("model.joins_tokens", "gradient", words=False) as caught:
        check_token_wise(model_of(JOINED[name]))
    assert f"{__file__}:" in str(caught.value)


def test_ranks_that_share_the_tokens_of_the_head_refuse_it_too(refuses):
    layout = Layout.parse("stage=2,microbatches=2")
    check_per_token(model_of(APART["scaled"], in_head=True, per_token=True), layout)
    with refuses("model.per_token_joins_tokens", "gradient", 2, words=False):
        check_per_token(
            model_of(JOINED["largest"], in_head=True, per_token=True), layout
        )
    # Blocks have whole sequences there.
    check_per_token(model_of(JOINED["largest"], per_token=True), layout)


def test_a_model_without_such_a_backward_is_not_run(monkeypatch):
    monkeypatch.setattr(sequences, "what_halves_change", None)
    check_token_wise(model_of(nnx.silu))


def test_one_that_cannot_run_is_told(monkeypatch):
    monkeypatch.setattr(halves, "MOST_VALUES", 10)
    with pytest.warns(UserWarning, match="'blocks'.*10"):
        check_token_wise(model_of(JOINED["sum"]))


def test_a_model_of_short_sequences_is_traced_on_those():
    def at_most_8(stream):
        if stream.shape[1] > 8:
            raise ValueError("too long: 8 tokens at most")
        return stream

    check_token_wise(model_of(at_most_8))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["test", "tiny-moe", "tiny-t5", "tiny-dit"])
def test_attention_and_experts_run_on_halves(preset):
    model = build(preset)

    def after_embed(function):
        def embed(params, batch, scope):
            stream = model.embed(params, batch, scope)
            return jax.tree.map(lambda x: function(x) if x.ndim == 3 else x, stream)

        return replace(model, embed=embed)

    assert tokens_joined(after_embed(APART["normalised"])) is None
    assert tokens_joined(after_embed(JOINED["largest"])) is not None
