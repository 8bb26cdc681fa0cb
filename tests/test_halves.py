"""Models that join examples where a trace does not look: found by running halves."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

from meshpar import Input, from_nnx, make_train_step
from meshpar.checks import examples, halves
from meshpar.checks.examples import check_examples_apart
from meshpar.checks.halves import what_halves_change
from tests.marks import slow

EMBED, SEQ, EXPERTS = 8, 4, 2
BATCH = {"x": jax.ShapeDtypeStruct((8, SEQ, EMBED), jnp.float32)}


def kernel(rngs, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape))


class Ends(nnx.Module):
    def __init__(self, rngs, after):
        self.w, self.after = kernel(rngs, EMBED, EMBED), after

    def embed(self, batch, scope):
        return batch["x"] @ self.w[...]

    def head(self, x, batch, scope):
        return (jnp.sin(self.after(x)) * jnp.arange(1.0, 1 + EMBED)).sum(), len(x)


class Block(nnx.Module):
    def __init__(self, rngs, function):
        self.w, self.function = kernel(rngs, EMBED), function

    def __call__(self, x, scope):
        return self.function(x * self.w[...])


def same(x):
    return x


def model(function=same, after=same):
    return from_nnx(
        ends=lambda rngs: Ends(rngs, after),
        block=lambda rngs: Block(rngs, function),
        num_layers=2,
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
    )


def backward(change):
    """The identity whose backward is another one."""

    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, None), lambda _, dx: (change(dx),))
    return function


def derivative(change):
    """The identity whose forward derivative is another one."""

    @jax.custom_jvp
    def function(x):
        return 1.0 * x

    function.defjvp(lambda x, dx: (1.0 * x[0], change(x[0], dx[0])))
    return function


def of_jax(change):
    """A function of JAX with a derivative of our own."""
    function = jax.custom_jvp(jax.nn.silu)
    function.defjvp(lambda x, dx: (jax.nn.silu(x[0]), change(x[0], dx[0])))
    return function


JOINING = {
    "largest": lambda x: x - x.max(0),
    "any": lambda x: x * (x > 1).any(0),
    "place of the largest": lambda x: x * jnp.argmax(x, 0),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "log of a sum": lambda x: x - jax.nn.logsumexp(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "median": lambda x: x - jnp.median(x, 0),
    "quantile": lambda x: x - jnp.quantile(x, 0.3, axis=0),
    "two largest": lambda x: x * lax.top_k(jnp.moveaxis(x, 0, -1), 2)[0][..., 1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "reversed": lambda x: x[::-1],
    "the first": lambda x: x - x[0],
    "branch of the sum": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "sums of pairs": lambda x: jax.ops.segment_sum(x, jnp.arange(len(x)) // 2, len(x)),
    "sums so far": lambda x: lax.scan(lambda c, y: (c + y, c), 0 * x[0], x)[1],
    "another order": lambda x: x.reshape(2, -1, *x.shape[1:])[::-1].reshape(x.shape),
    "8 bits": lambda x: jnp.round(x / jnp.abs(x).max() * 127) / 127,
    "product": lambda x: x * x.prod(0),
    "spectrum": lambda x: jnp.fft.fft(x, axis=0).real,
    "all of all": lambda x: (
        jnp.tanh(jnp.einsum("bse,cse->bc", x, x)).sum(1)[:, None, None] * x
    ),
    "gradient by its largest": backward(lambda dx: dx / jnp.abs(dx).max()),
    "gradient by its sum": backward(lambda dx: dx / (1 + jnp.abs(dx).sum())),
    "mean gradient": backward(lambda dx: dx - dx.mean(0)),
    "derivative by its sum": derivative(lambda x, dx: dx * x.sum(0)),
    "derivative of jax's own function": of_jax(lambda x, dx: dx * x.sum(0)),
    "custom gradient": jax.custom_gradient(lambda x: (x, lambda dx: dx - dx.mean(0))),
}
IN_ANOTHER_ORDER = ("rolled", "reversed", "another order", "sorted", "sums of pairs")
REPEATED = {
    *("log of a sum", "8 bits"),  # "softmax" and "largest" have what they do.
    *("sorted", "median", "quantile", "all of all"),  # See test_examples_apart.py.
    "another order",  # "reversed".
    *("gradient by its largest", "gradient by its sum"),  # As two tests below.
    *("softmax of tokens", "largest of each"),  # "8 bits of each".
    "injected gradient",  # "clipped gradient".
    "one after another",  # See test_examples_apart.py.
}
"""What `make test` asks in another case too."""


def quick_first(names):
    return [slow(name) if name in REPEATED else name for name in names]


APART = {
    "nothing": same,
    "softmax of tokens": lambda x: jax.nn.softmax(x, 1),
    "largest of each": lambda x: x - x.max((1, 2), keepdims=True),
    "examples and tokens as one dim": lambda x: jnp.tanh(
        x.reshape(-1, EMBED) @ jnp.ones((EMBED, EMBED))
    ).reshape(x.shape),
    "8 bits of each": lambda x: jnp.round(x / jnp.abs(x).max((1, 2), keepdims=True)),
    "derivative of each": derivative(lambda x, dx: dx * jnp.cos(x)),
    "clipped gradient": backward(lambda dx: jnp.clip(dx, -0.01, 0.01)),
    "injected gradient": backward(lambda dx: dx + 0.1),
    "gradient of each by its largest": backward(
        lambda dx: dx / (1e-3 + jnp.abs(dx).max((1, 2), keepdims=True))
    ),
    "one after another": lambda x: lax.map(jnp.tanh, x),
}


@pytest.mark.parametrize("place", ["function", slow("after")])
@pytest.mark.parametrize("name", quick_first(JOINING))
def test_what_joins_examples_is_refused(name, place, refuses):
    wrong = model(**{place: JOINING[name]})
    if place == "after" and name in IN_ANOTHER_ORDER:
        # A sum over examples is the same, as of pairs where parts have whole ones.
        check_examples_apart(wrong, BATCH, "data=2")
        return
    with refuses("model.joins_examples", "data=2"):
        check_examples_apart(wrong, BATCH, "data=2")


@pytest.mark.parametrize("place", ["function", slow("after")])
@pytest.mark.parametrize("name", quick_first(APART))
def test_what_keeps_examples_apart_is_taken(name, place):
    right = model(**{place: APART[name]})
    check_examples_apart(right, BATCH, "data=2")
    assert what_halves_change(right, BATCH) is None


class Experts(nnx.Module):
    """A block with the usual loss for balanced experts, of all tokens of a batch."""

    def __init__(self, rngs, flat):
        self.w, self.flat = kernel(rngs, EMBED, EXPERTS), flat

    def __call__(self, x, scope):
        logits = x @ self.w[...]
        if self.flat:
            logits = logits.reshape(-1, EXPERTS)
        share = jax.nn.softmax(logits).mean(tuple(range(logits.ndim - 1)))
        chosen = jax.nn.one_hot(jnp.argmax(logits, -1), EXPERTS)
        chosen = chosen.mean(tuple(range(logits.ndim - 1)))
        return x, {"balance": EXPERTS * (share * chosen).sum() * len(x)}


@pytest.mark.parametrize("flat", [True, slow(False)])
def test_a_balance_of_all_tokens_is_refused_in_any_shape(flat, refuses):
    joined = from_nnx(
        ends=lambda rngs: Ends(rngs, same),
        block=lambda rngs: Experts(rngs, flat),
        num_layers=1,
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
        auxiliary={"balance": 0.1},
    )
    with refuses("model.joins_examples", "balance"):
        check_examples_apart(joined, BATCH, "data=2")


class Normalised(nnx.Module):
    """A block with statistics of the global batch, and an error beside them if told."""

    def __init__(self, rngs, function=same):
        self.w, self.function = kernel(rngs, EMBED), function

    def __call__(self, x, scope):
        count = scope.batch_sum(jnp.float32(x[..., 0].size))
        mean = scope.batch_sum(x.sum((0, 1))) / count
        return self.function((x - mean) * self.w[...])


def test_sums_over_the_global_batch_hide_nothing_beside_them(refuses):
    build = partial(
        from_nnx,
        ends=lambda rngs: Ends(rngs, same),
        num_layers=1,
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
    )
    check_examples_apart(build(block=Normalised), BATCH, "data=2")
    joined = build(block=lambda rngs: Normalised(rngs, JOINING["largest"]))
    with refuses("model.joins_examples", "the stream"):
        check_examples_apart(joined, BATCH, "data=2")


def test_a_layer_too_large_to_run_is_judged_by_its_trace_with_a_warning(
    monkeypatch, refuses
):
    monkeypatch.setattr(halves, "MOST_VALUES", 1)
    with pytest.warns(UserWarning, match="trace alone"):
        check_examples_apart(model(JOINING["gradient by its sum"]), BATCH, "data=2")
    with (
        pytest.warns(UserWarning, match="trace alone"),
        refuses("model.joins_examples", "sub"),
    ):
        check_examples_apart(model(lambda x: x - x.mean(0)), BATCH, "data=2")


def test_who_knows_leaves_the_check_out(refuses):
    wrong = model(JOINING["largest"])
    devices = jax.devices()[:2]
    make = partial(make_train_step, wrong, optax.sgd(0.1), "data=2", devices=devices)
    make(check=False).compile(BATCH)
    with refuses("model.joins_examples", "reduce_max"):
        make().compile(BATCH)


def grouped(x):
    """Each example less the mean of its group of three."""
    groups = x.reshape(len(x) // 3, 3, *x.shape[1:])
    return (groups - groups.mean(1, keepdims=True)).reshape(x.shape)


def test_examples_in_groups_are_taken_where_parts_have_whole_groups():
    batch = {"x": jax.ShapeDtypeStruct((24, SEQ, EMBED), jnp.float32)}
    check_examples_apart(model(grouped), batch, "data=2")


def in_16_bits(function):
    return lambda x: function(x.astype(jnp.bfloat16)).astype(jnp.float32)


def test_rounding_of_16_bits_is_no_joining(refuses):
    clipped = in_16_bits(APART["clipped gradient"])
    check_examples_apart(model(clipped), BATCH, "data=2")
    assert what_halves_change(model(clipped), BATCH) is None
    with refuses("model.joins_examples"):
        check_examples_apart(model(in_16_bits(JOINING["largest"])), BATCH, "data=2")


def test_results_that_are_not_finite_say_nothing():
    joined = model(lambda x: JOINING["largest"](jnp.log(x)))
    with pytest.warns(UserWarning, match="not finite"):
        check_examples_apart(joined, BATCH, "data=2")


class NormedBlock(nnx.Module):
    """A bias before a batch norm, whose gradient is 0 but for rounding."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(EMBED, EMBED, rngs=rngs)
        self.norm = nnx.BatchNorm(EMBED, rngs=rngs)

    def __call__(self, x, scope):
        return x + self.norm(jnp.sin(3 * self.linear(x)) + self.linear(x))


class CancelledBlock(NormedBlock):
    def __call__(self, x, scope):
        return x + jnp.tanh(self.norm(self.linear(x)))


@pytest.mark.parametrize("block", [NormedBlock, CancelledBlock])
def test_gradients_that_cancel_are_sums_but_for_rounding(block):
    normed = from_nnx(
        ends=lambda rngs: Ends(rngs, same),
        block=block,
        num_layers=2,
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
    )
    check_examples_apart(normed, BATCH, "data=2")
    assert what_halves_change(normed, BATCH) is None


class QuantisedGradients(nnx.Module):
    """Flax calls a function whose backward joins examples."""

    def __init__(self, rngs):
        marked = JOINING["gradient by its largest"]
        self.linear = nnx.Linear(
            EMBED,
            EMBED,
            use_bias=False,
            rngs=rngs,
            dot_general=lambda x, w, *dims, **options: marked(
                lax.dot_general(x, w, *dims, **options)
            ),
        )

    def __call__(self, x, scope):
        return self.linear(x)


def test_a_backward_that_flax_calls_is_judged_by_who_wrote_it(refuses):
    joined = from_nnx(
        ends=lambda rngs: Ends(rngs, same),
        block=QuantisedGradients,
        num_layers=1,
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
    )
    with refuses("model.joins_examples", "the gradient"):
        check_examples_apart(joined, BATCH, "data=2")


# What the head and the blocks sum up.


class SumsOf(nnx.Module):
    """Ends whose head makes its two sums of one loss for each example."""

    def __init__(self, rngs, sums):
        self.w, self.sums = kernel(rngs, EMBED, EMBED), sums

    def embed(self, batch, scope):
        return batch["x"] @ self.w[...]

    def head(self, x, batch, scope):
        return self.sums(self, (x**2).sum((1, 2)))


class WithSum(nnx.Module):
    """A block with an auxiliary loss."""

    def __init__(self, rngs, auxiliary):
        self.w, self.auxiliary = kernel(rngs, EMBED), auxiliary

    def __call__(self, x, scope):
        y = x * self.w[...]
        return y, {"auxiliary": self.auxiliary(self, y)}


def with_sums(head=lambda ends, x: (x.sum(), jnp.float32(len(x))), auxiliary=None):
    block = partial(WithSum, auxiliary=auxiliary or (lambda block, y: (y**2).sum()))
    return from_nnx(
        ends=partial(SumsOf, sums=head),
        block=block,
        num_layers=1,
        auxiliary={"auxiliary": 0.5},
        inputs={"x": Input(("batch", None, None), shape=(None, SEQ, EMBED))},
    )


ARE_SUMS = {
    "sums": {},
    "mean of the loss": {  # And of nothing else, which the weight would divide.
        "head": lambda ends, x: (x.mean(), jnp.float32(1.0)),
        "auxiliary": lambda block, y: jnp.float32(0.0),
    },
    "twice the weight": {"head": lambda ends, x: (2 * x.sum(), 2.0 * len(x))},
    "nothing": {"auxiliary": lambda block, y: jnp.float32(0.0)},
}
ARE_NONE = {
    "one weight": {"head": lambda ends, x: (x.sum(), jnp.float32(1.0))},
    "one more": {"head": lambda ends, x: (x.sum(), jnp.float32(len(x) + 1))},
    "decay": {
        "head": lambda ends, x: (x.sum() + (ends.w[...] ** 2).sum(), 1.0 * len(x))
    },
    "root": {"head": lambda ends, x: (jnp.sqrt(x.sum()), jnp.float32(len(x)))},
    "one less": {"head": lambda ends, x: (x.sum() / (len(x) - 1), jnp.exp(x).sum())},
    "root of the count": {
        "head": lambda ends, x: (x.sum() / len(x) ** 0.5, jnp.exp(x).sum())
    },
    "losses by one less": {
        "head": lambda ends, x: ((x / (len(x) - 1)).sum(), jnp.exp(x).sum())
    },
    "mean": {"auxiliary": lambda block, y: (y**2).mean()},
    "of parameters": {"auxiliary": lambda block, y: (block.w[...] ** 2).sum()},
    "constant": {"auxiliary": lambda block, y: jnp.float32(1.0)},
}


@pytest.mark.parametrize(
    "name", ["sums", "mean of the loss", slow("twice the weight"), "nothing"]
)
def test_sums_over_examples_are_taken(name):
    check_examples_apart(with_sums(**ARE_SUMS[name]), BATCH, "data=2")


@pytest.mark.parametrize(
    "name",
    [
        *("one weight", "one less", "root of the count", "mean", "constant"),
        *map(slow, ("losses by one less", "one more", "decay", "root")),
    ],
)
def test_what_is_no_sum_over_examples_is_refused(name, refuses):
    with refuses("model.joins_examples", "data=2", words=False):
        check_examples_apart(with_sums(**ARE_NONE[name]), BATCH, "data=2")


def test_sums_that_a_trace_settles_are_not_run(monkeypatch):
    """The count of examples needs a second trace; a sum of the weights does not."""
    monkeypatch.setattr(examples, "_run_in_halves", None)
    check_examples_apart(with_sums(), BATCH, "data=2")

    def weighted(ends, x):
        return x.sum(), jnp.exp(x).sum()

    monkeypatch.setattr(examples, "_times", lambda batch, times: 1 / 0)
    monkeypatch.setattr(examples, "_with_own_size", lambda batch, *_: many_of(batch))
    check_examples_apart(with_sums(weighted), BATCH, "data=2")


def many_of(batch):
    return {
        name: jax.ShapeDtypeStruct((104, *x.shape[1:]), x.dtype)
        for name, x in batch.items()
    }
