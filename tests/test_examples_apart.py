"""Models that join the examples of a batch: refused where devices have some each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Input, Layout, from_nnx, make_train_step
from meshpar.checks.examples import check_examples_apart
from tests.marks import slow
from tests.states import normal_values
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


def model_of(loss):
    return from_nnx(
        ends=lambda rngs: Ends(rngs, loss),
        block=Block,
        num_layers=2,
        inputs={
            "x": Input(("batch", "seq", None), shape=(None, None, EMBED)),
            "label": Input(("batch",), "int", below=EMBED),
        },
    )


def step_of(loss, layout):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    return make_train_step(model_of(loss), optax.sgd(0.1), layout, devices=devices)


def evaluated(loss, layout):
    step = step_of(loss, layout)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, SEQ, EMBED)).astype(np.float32)
    label = rng.integers(0, EMBED, EXAMPLES).astype(np.int32)
    state = jax.device_put(normal_values(step.state_shapes), step.shardings)
    evaluation = step.evaluate(state, {"x": x, "label": label})
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
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


def summed_up_to_each(x, batch, scope):
    return jnp.tanh(jnp.cumsum(x.sum((1, 2)))).sum(), len(x)


def noise_of_split_keys(x, batch, scope):
    keys = jax.random.split(jax.random.key(3), len(x))
    draw = lambda key: jax.random.normal(key, (SEQ, EMBED))  # noqa: E731
    return (x * jax.vmap(draw)(keys)).sum(), len(x)


def chosen_by_the_sum(x, batch, scope):
    root = jnp.sqrt((x**2).sum())
    return jax.lax.cond(root > 1, lambda: x.sum(), lambda: 0.0), 1.0


def halved_until_small(x, batch, scope):
    big = lambda at: jnp.exp(x.sum()) * at > 1  # noqa: E731
    return x.sum() * jax.lax.while_loop(big, lambda at: at / 2, 1.0), 1.0


JOINED = [
    (contrastive, ()),
    (normalised_by_hand, ()),
    (noise_of_the_batch, ()),
    (by_place_in_the_batch, ()),
    (of_the_worst_example, ("reduce_max",)),
    (sorted_by_loss, ("sort",)),
    (root_of_the_sum, ("sqrt",)),
    (summed_up_to_each, ("cumsum",)),
    (noise_of_split_keys, ()),
    (chosen_by_the_sum, ("sqrt",)),
    (halved_until_small, ("exp",)),
]
SHAPES = {
    "x": jax.ShapeDtypeStruct((EXAMPLES, SEQ, EMBED), jnp.float32),
    "label": jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32),
}
SPLITS = ["data=2", "fsdp=2,zero=1", "microbatches=2", "stage=2,microbatches=2"]


def refused(layout, loss, operation):
    """One split finds most losses, and every split the first; all do if slow.

    A difference to the mean is asked of below, and a branch in test_halves.py.
    """
    repeated = normalised_by_hand, root_of_the_sum, chosen_by_the_sum
    is_quick = layout == SPLITS[0] and loss not in repeated or loss is contrastive
    marks = () if is_quick else pytest.mark.slow
    return pytest.param(
        layout, loss, operation, marks=marks, id=f"{layout}-{loss.__name__}"
    )


@pytest.mark.parametrize(
    ("layout", "loss", "operation"),
    [refused(layout, *joined) for layout in SPLITS for joined in JOINED],
)
def test_what_joins_examples_is_refused_by_its_line_where_they_are_split(
    refuses, layout, loss, operation
):
    step = step_of(loss, layout)
    values, words = (repr(str(step.layout)), *operation), layout == SPLITS[0]
    with refuses("model.joins_examples", *values, words=words) as error:
        jax.eval_shape(step.functions.update, step.state_shapes, SHAPES)
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


def of_its_label(x, batch, scope):
    log_p = jax.nn.log_softmax(x.mean(1))
    return -log_p[jnp.arange(len(x)), batch["label"]].sum(), len(x)


def by_flat_places(x, batch, scope):
    places = jnp.arange(len(x)) * SEQ + batch["label"] % SEQ
    return (x.reshape(-1, EMBED)[places] ** 2).sum(), len(x)


def written_at_its_label(x, batch, scope):
    hot = jnp.zeros((len(x), EMBED)).at[jnp.arange(len(x)), batch["label"]].set(1.0)
    return (x.mean(1) * hot).sum(), len(x)


def over_the_batch(x):
    return jnp.broadcast_to(jnp.arange(SEQ), (len(x), SEQ))


TABLE = np.arange(float(SEQ * EMBED), dtype=np.float32).reshape(SEQ, EMBED)


def positions_looked_up(x, batch, scope):
    return ((x + jnp.asarray(TABLE)[over_the_batch(x)]) ** 2).sum(), len(x)


def positions_of_the_scope_looked_up(x, batch, scope):
    places = jnp.tile(scope.positions(SEQ)[None], (len(x), 1))
    return ((x + jnp.take(jnp.asarray(TABLE), places, axis=0)) ** 2).sum(), len(x)


def angles_by_einsum(x, batch, scope):
    angles = jnp.einsum("bt,d->btd", over_the_batch(x) * 1.0, jnp.arange(1.0, 17.0))
    return (x * jnp.cos(angles)).sum(), len(x)


def angles_joined(x, batch, scope):
    angles = over_the_batch(x)[..., None] * jnp.arange(1.0, 9.0)
    return (x * jnp.cos(jnp.concatenate([angles, angles], -1))).sum(), len(x)


def masked(x, mask):
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", x, x), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x).sum(), len(x)


def mask_tiled(x, batch, scope):
    return masked(x, jnp.tile(jnp.tri(SEQ, dtype=bool)[None], (len(x), 1, 1)))


def mask_stacked(x, batch, scope):
    return masked(x, jnp.stack([jnp.tri(SEQ, dtype=bool)] * len(x)))


def alike_noise(x, batch, scope):
    keys = jnp.broadcast_to(jax.random.key(3), (len(x),))
    noise = jax.vmap(lambda key: jax.random.normal(key, (SEQ, 1)))(keys)
    return (x * noise).sum(), len(x)


def pairs(x, batch, scope):
    first, second = jnp.moveaxis(x.reshape(len(x) // 2, 2, SEQ, EMBED), 1, 0)
    return ((first - second) ** 2).sum(), len(x)


def signs_of_pairs(x, batch, scope):
    signs = 1.0 - 2.0 * (jnp.arange(len(x)) % 2)
    return (x.sum((1, 2)) * signs).sum(), len(x)


def sorted_for_experts(x, batch, scope):
    order = jnp.argsort(batch["label"] % 2)
    return (jnp.tanh(x[order])[jnp.argsort(order)] * x).sum(), len(x)


def sum_of_the_sorted(x, batch, scope):
    return jnp.sort(x.sum((1, 2))).sum(), len(x)


def in_two_parts(x, batch, scope):
    parts = [jnp.tanh(part) for part in jnp.split(x, 2)]
    return (jnp.concatenate(parts) * x).sum(), len(x)


def stable_exponential(x, batch, scope):
    logits = x.sum((1, 2))
    most = jax.lax.stop_gradient(logits.max())
    return (jnp.exp(logits - most) * jnp.exp(most)).sum(), len(x)


def guarded(x, batch, scope):
    return jnp.where(jnp.isnan(x).any(), 0.0, (x**2).sum()), len(x)


def watched(x, batch, scope):
    jax.debug.callback(lambda *several: None, x.max(), jnp.sqrt((x**2).sum()))
    return (x**2).sum(), len(x)


APART = [plain, one_example_after_another, noise_of_each_example]
APART_TOO = [
    *(a_mean_of_weight_one, rows_of_all_examples, of_all_pairs_of_tokens, mask_tiled),
    *(each_by_itself, of_its_label, pairs, sorted_for_experts),
]
TAKEN = [
    *(of_its_label, pairs, sorted_for_experts, mask_tiled, by_flat_places),
    *(written_at_its_label, angles_by_einsum, positions_of_the_scope_looked_up),
    *(alike_noise, sum_of_the_sorted, stable_exponential, guarded, watched),
]
# Each is much like one of those, or what models of other tests do.
TAKEN_TOO = [
    *(a_mean_of_weight_one, rows_of_all_examples, of_all_pairs_of_tokens),
    *(positions_looked_up, angles_joined, mask_stacked, signs_of_pairs, in_two_parts),
]


@pytest.mark.parametrize(
    "loss", [*APART, *map(slow, APART_TOO)], ids=lambda loss: loss.__name__
)
def test_what_treats_each_example_by_itself_is_as_on_one_device(loss):
    found, alone = (evaluated(loss, layout) for layout in ("data=2", "data=1"))
    assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "loss", [*TAKEN, *map(slow, TAKEN_TOO)], ids=lambda loss: loss.__name__
)
def test_what_may_treat_each_example_by_itself_is_taken(loss):
    check_examples_apart(model_of(loss), SHAPES, "data=2")


def test_examples_are_told_from_sizes_of_the_batch(refuses):
    """There are as many tokens as the examples that it would be traced with."""
    largest = lambda x, batch, scope: (x.max(0).sum(), len(x))  # noqa: E731
    x = jax.ShapeDtypeStruct((EXAMPLES, 13 * EXAMPLES, EMBED), jnp.float32)
    with refuses("model.joins_examples", "reduce_max"):
        check_examples_apart(model_of(largest), {**SHAPES, "x": x}, "data=2")


def test_the_place_that_is_named_keeps_its_name(refuses):
    inside: dict = {}
    text = "def loss(x, batch, scope):\n    return (x - x.mean(0)).sum(), len(x)"
    exec(compile(text, "/mine/token_wise.py", "exec"), inside)
    with refuses("model.joins_examples", "/mine/token_wise.py:2"):
        check_examples_apart(model_of(inside["loss"]), SHAPES, "data=2")
