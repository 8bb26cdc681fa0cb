"""Functions that join tokens of a split sequence are found, and others are taken."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from meshpar import Input, Layout, default_rules, from_nnx, lint, make_train_step
from meshpar.checks.sequence_probe import check_sequences
from meshpar.checks.sequences import check_token_wise
from meshpar.trace.token_mixing import mixes_tokens

T, D = 8, 4
STREAM = ("batch", "residual_seq", "embed")
TABLE = np.arange(32.0 * D, dtype=np.float32).reshape(32, D)


def found(function, shape=(3, T, D)):
    """What joins tokens, the second dim of an array, in a function of it."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return mixes_tokens(lambda tokens: function(*tokens), T, [(x, 1)])


def spread(places):
    return jnp.broadcast_to(places, (3, T, D))


def pooled(x, window):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 1, 1), "SAME")


def by_places(x, places):
    return lax.map(lambda one: jnp.tanh(one[0]) * one[1], (x.swapaxes(0, 1), places))


def scores(x):
    return lax.map(lambda q: jnp.einsum("bd,bsd->bs", q, x), x.swapaxes(0, 1))


def looked_up(x, axis):
    places = jnp.cos(jnp.arange(T, dtype=jnp.float32))[None, :, None]
    table = jnp.broadcast_to(places, x.shape)
    return jnp.take_along_axis(table, jnp.argsort(x, axis), axis)


def sorted_with(x, places):
    places = jnp.broadcast_to(places, x.shape)
    return lax.sort((x, places), dimension=2, num_keys=1)[1]


JOINED = {
    "shift": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0))),
        "pad along the sequence",
    ),
    "first": (
        lambda x: lax.dynamic_update_slice(x, jnp.ones((3, 1, D)), (0, 0, 0)),
        "dynamic_update_slice along the sequence",
    ),
    "pooling": (lambda x: pooled(x, (1, 3, 1)), "reduce_window_max along the sequence"),
    "window": (
        lambda x: lax.reduce_window(
            x, 1.0, lambda a, b: a * b + a, (1, 3, 1), (1, 1, 1), "SAME"
        ),
        "reduce_window along the sequence",
    ),
    "reduction": (
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (1,)),
        "reduce along the sequence",
    ),
    "einsum": (
        lambda x: jnp.einsum("btd,td->btd", x, TABLE[:T]),
        "a matmul of tokens and an array of places",
    ),
    "map_places": (
        lambda x: by_places(x, jnp.arange(T)),
        "a loop of tokens and an array of places",
    ),
    "branch": (
        lambda x: lax.cond(x.size > 2, jnp.tanh, lambda x: spread(TABLE[:T]), x),
        "a loop or branch of tokens and an array of places",
    ),
    "start": (
        lambda x: lax.fori_loop(0, 2, lambda _, y: x, spread(TABLE[:T])),
        "a loop or branch of tokens and an array of places",
    ),
    "map_scores": (lambda x: scores(x), "each of which meets all of them"),
    "table": (
        lambda x: looked_up(x, 2),
        "gather of tokens and an array of places",
    ),
    "merged": (
        lambda x: x.reshape(3 * T, D) * jnp.arange(3.0 * T)[:, None],
        "mul of tokens and an array of places",
    ),
    "merged_unlike": (
        lambda x: x.reshape(3 * T, D)[:, :1] + x[:, :, 0].reshape(1, 3 * T),
        "merges",
    ),
    "sort": (
        lambda x: sorted_with(x, jnp.arange(float(T))[None, :, None]),
        "sort of tokens and an array of places",
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_what_joins_tokens_is_found(case):
    function, message = JOINED[case]
    assert re.search(message, str(found(function)))


def test_linear_algebra_of_tokens_is_found_where_they_make_the_matrix():
    root = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    assert re.search("cholesky along", str(found(root, (3, T, T))))
    assert found(root, (3, T, D, D)) is None
    assert found(jnp.linalg.eigvalsh, (3, T, D, D)) is None


def rotary(x):
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even - odd, odd + even], -1).reshape(x.shape)


def convolved(x, width):
    """A convolution along the tokens, of so many."""
    kernel = jnp.ones((width, D, D))
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


@jax.custom_batching.custom_vmap
def with_a_vmap_of_its_own(x):
    return jnp.sin(x)


with_a_vmap_of_its_own.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
TOKEN_WISE = {
    "custom_vmap": with_a_vmap_of_its_own,
    "stack": rotary,
    "unstack": lambda x: sum(jnp.unstack(x, axis=2)),
    "fft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5),
    "pooling": lambda x: pooled(x, (1, 1, 3)),
    "pad": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0), (1, -1, 0))),
    "convolution_of_one": lambda x: convolved(x, 1),
    "whole_update": lambda x: lax.dynamic_update_slice(
        jnp.zeros((3, T, 2 * D)), x, (0, 0, D)
    ),
    "map": lambda x: lax.map(jnp.tanh, x.swapaxes(0, 1)),
    "map_beside_alike": lambda x: by_places(x, jnp.ones(T)),
    "top_values": lambda x: lax.top_k(x, 2)[0] + jnp.argsort(x)[..., :2],
    "barrier": lambda x: lax.optimization_barrier((x, x[..., 0]))[1],
    "special": lambda x: lax.erf_inv(lax.lgamma(jax.nn.gelu(x))),
}


@pytest.mark.parametrize("case", TOKEN_WISE)
def test_what_leaves_tokens_alone_is_taken(case):
    assert found(TOKEN_WISE[case]) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.cumsum(x.reshape(3 * T, D), 0),
        lambda x: jnp.cumsum(x.reshape(3 * T, D), 1),
        lambda x: x.reshape(3, 2, T // 2, D),
        lambda x: x.reshape(3, T * D).reshape(3, D, T),
        lambda x: x.reshape(T, 3, D),
    ],
)
def test_tokens_merged_with_other_dims_are_found(function):
    assert re.search("merges or cuts the sequence", str(found(function)))


def filtered(x):
    """Each token's values convolved, for which JAX merges tokens with examples."""
    each = functools.partial(jnp.convolve, v=jnp.ones(3), mode="same")
    return jax.vmap(jax.vmap(each))(x)


def test_tokens_merged_with_examples_and_parted_again_are_taken():
    assert found(filtered) is None
    assert found(lambda x: jax.nn.relu(filtered(x))) is None
    assert found(lambda x: 2 * jnp.tanh(x.reshape(3 * T, D)).reshape(3, T, D)) is None
    assert found(lambda x: x.reshape(3 * T, D).reshape(3, T, D)) is None


def test_convolutions_along_tokens_are_found_and_those_of_each_taken():
    assert re.search(
        "conv_general_dilated along", str(found(lambda x: convolved(x, 3)))
    )
    first = lambda x: convolved(x.swapaxes(0, 1), 3).swapaxes(0, 1)  # noqa: E731
    assert found(first) is None


def counted(function):
    """What of a function depends on how many tokens are at hand."""
    few, many = (jax.ShapeDtypeStruct((3, size, D), np.float32) for size in (T // 2, T))
    return mixes_tokens(function, T, (many, 1), fewer=(function, (few, 1)))


def times(count):
    """A scale made of a number in a way that leaves the number as no literal."""
    return lambda x: x * count(x.shape[1])


def until(x, limit):
    step = lambda at, y: (at + 1, y * 0.9)  # noqa: E731
    return lax.while_loop(lambda c: c[0] < limit, lambda c: step(*c), (0, x))[1]


COUNTED = {
    "exponent": times(lambda size: jnp.exp(jnp.ones(D)) ** size),
    "array": times(lambda size: jnp.array([float(size)])[0]),
    "linspace": times(lambda size: jnp.linspace(1.0, size, 3)[-1]),
    "counting": times(lambda size: lax.fori_loop(0, size, lambda _, n: n + 1.0, 0.0)),
    "slice": times(lambda size: jnp.asarray(TABLE)[size - 1]),
    "branch": times(lambda size: lax.cond(size > 4, lambda: 1.0, lambda: 2.0)),
    "decay": lambda x: lax.fori_loop(0, x.shape[1], lambda _, y: y * 0.9, x),
    "while": lambda x: until(x, x.shape[1]),
    "map": lambda x: lax.map(lambda one: one * x.shape[1], x.swapaxes(0, 1)),
    "join": lambda x: jnp.concatenate([x, jnp.full_like(x, x.shape[1])], 2),
    "width": lambda x: jnp.max(x @ TABLE.T[:, : x.shape[1]], -1),
    "rows": lambda x: jnp.asarray(TABLE)[: x.shape[1]][x[..., 0].astype(int)],
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_depends_on_how_many_tokens_are_at_hand_is_found(case):
    assert re.search("how many are at hand", str(counted(COUNTED[case])))


def test_loops_of_a_number_of_turns_are_taken():
    assert counted(lambda x: lax.fori_loop(0, 3, lambda _, y: y * 0.9, x)) is None
    assert counted(lambda x: until(x, 3)) is None


class Ends(nnx.Module):
    """Reads and weighs tokens of the leaf `x`."""

    def __init__(self, rngs):
        self.read = nnx.Param(jax.random.normal(rngs.params(), (D, D)))

    def embed(self, batch, scope):
        return {"x": batch["x"] @ self.read, "memory": jnp.zeros((len(batch["x"]), D))}

    def head(self, x, batch, scope):
        return (x["x"] ** 2 * batch["w"][..., None]).sum(), batch["w"].sum()


def model(mix, layers=2, **inputs):
    """Of blocks `mix(leaves, w, scope)`."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), (D, D)))

        def __call__(self, leaves, scope):
            return {**leaves, **mix(leaves, self.w[...], scope)}

    inputs["x"] = Input(("batch", "seq", None), shape=(None, None, D))
    inputs["w"] = Input(("batch", "seq"), is_weight=True)
    return from_nnx(
        ends=Ends,
        block=Block,
        num_layers=layers,
        stream={"x": STREAM, "memory": ("batch", "embed")},
        inputs=inputs,
    )


def of_tokens(function):
    """A block that adds a function of the leaf `x`."""
    return lambda leaves, w, scope: {"x": leaves["x"] + function(leaves["x"], w, scope)}


def through_memory(leaves, w, scope):
    """A sum over tokens that the next layer takes the tanh of."""
    x, memory = leaves["x"], leaves["memory"]
    return {"x": x + jnp.tanh(memory)[:, None] * x, "memory": (x @ w).sum(1)}


def test_what_the_next_layer_makes_of_a_sum_over_tokens_is_refused(refuses):
    with refuses("model.joins_tokens", "tanh"):
        check_token_wise(model(through_memory))
    check_token_wise(model(through_memory, layers=1))


def test_an_input_with_two_dims_of_tokens_is_refused(refuses):
    mix = of_tokens(lambda x, w, scope: x * scope.batch["pairs"].sum(-1)[..., None])
    with refuses("model.several_sequence_dims", "'pairs'", "'seq'", "'other_seq'"):
        check_token_wise(model(mix, pairs=Input(("batch", "seq", "other_seq"))))
    rows = Input(("batch", "seq", None), shape=(None, None, D))
    check_token_wise(model(mix, pairs=rows))


def over(function):
    """A block that runs `function(whole, at hand, scope)` of whole sequences."""

    def mix(x, w, scope):
        at_hand = x @ w
        return scope.over_sequence(lambda z: function(z, at_hand, scope), x)

    return of_tokens(mix)


@pytest.mark.parametrize(
    ("function", "refusal"),
    [
        (lambda z, x, scope: jnp.cumsum(z, 1) * x, ("model.joins_tokens",)),
        (
            lambda z, x, scope: z * scope.positions(z.shape[1])[:, None],
            ("model.joins_tokens", "scope.positions"),
        ),
        (
            lambda z, x, scope: z / scope.seq_length(z.shape[1]),
            ("model.wrong_number_of_tokens", "scope.seq_length", 2, 1),
        ),
        (lambda z, x, scope: z[:, :1], ("model.over_sequence_changes_tokens", 1, 2)),
    ],
)
def test_functions_of_whole_sequences_have_no_tokens_at_hand(
    refuses, function, refusal
):
    with refuses(*refusal):
        check_token_wise(model(over(function)))


def reversed_sums(z, x, scope):
    """Of each token and the later ones, by their mean place."""
    places = jnp.arange(z.shape[1])[:, None] / z.shape[1]
    return jnp.cumsum(z[:, ::-1], 1)[:, ::-1] * places


def test_functions_of_whole_sequences_see_no_padding():
    rng = np.random.default_rng(0)
    batch = dict(x=rng.normal(size=(2, 6, D)), w=np.ones((2, 6)))
    batch = {name: array.astype(np.float32) for name, array in batch.items()}
    made, losses = model(over(reversed_sums), layers=1), []
    for layout in ("data=1", "context=2"):
        devices = jax.devices()[: Layout.parse(layout).num_devices]
        step = make_train_step(made, optax.sgd(0.1), layout, devices=devices)
        losses.append(step.evaluate(step.init(0), batch)["loss_sum"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 5])
def test_noise_of_other_tokens_than_those_at_hand_is_refused(refuses, size):
    mix = of_tokens(
        lambda x, w, scope: x * scope.normal((len(x), size, D), "noise")[:, :1]
    )
    with refuses("model.wrong_number_of_tokens", "scope.normal('noise')", size, 2):
        check_token_wise(model(mix))


def less_the_mean(x, w, scope):
    mean = scope.sequence_sum(x.sum(1, keepdims=True))
    return -mean / scope.seq_length(x.shape[1])


@pytest.mark.parametrize("given", [lambda x: x, lambda x: jnp.ones(()), lambda x: 2.0])
def test_sums_over_the_sequence_are_of_what_each_device_has_a_part_of(refuses, given):
    mix = of_tokens(lambda x, w, scope: 0 * x + scope.sequence_sum(given(x)).mean())
    with refuses("model.joins_tokens", "scope.sequence_sum"):
        check_token_wise(model(mix))


def test_sums_and_counts_over_the_sequence_are_taken():
    def less(x, w, scope):
        num = scope.sequence_sum(x.shape[1]) + scope.sequence_sum(0.5 * (x > 0).sum())
        return x - scope.sequence_sum(2 * x.sum(1, keepdims=True)) / num

    check_token_wise(model(of_tokens(less)))


def test_sums_over_the_sequence_are_refused_where_padding_would_count(refuses):
    made, layout = model(of_tokens(less_the_mean)), Layout.parse("context=2")
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)  # noqa: E731
    for partly in (False, True):
        given = made, layout, default_rules(layout)
        check_sequences(*given, dict(x=shape(2, 8, D), w=shape(2, 8)), partly=partly)
        with refuses("batch.padding_in_sequence_sum", 6, "scope.sequence_sum"):
            batch = dict(x=shape(2, 6, D), w=shape(2, 6))
            check_sequences(*given, batch, partly=partly)
    assert lint(made, layout, seq=8).findings == ()
