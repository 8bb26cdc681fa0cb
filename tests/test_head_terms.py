"""Named terms of a head: the same metrics under every layout, evaluated or trained."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import TENSOR, Input, Layout, Scope, from_nnx, make_mesh, make_train_step
from meshpar.model.block_run import check_head
from meshpar.models.presets import build
from meshpar.parallel.head_loss import head_cross_entropy
from meshpar.parallel.reduction import term_means
from meshpar.train.step_functions import Evaluation
from tests.marks import slow

LAYOUTS = (
    "data=1",
    "data=2,fsdp=2",
    "data=2,tensor=2",
    "microbatches=4",
    "data=2,stage=2,microbatches=2",
)

NAMES = {"error", "positive", "perplexity"}


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def embed(self, batch, scope):
        return batch["x"]

    def head(self, stream, batch, scope):
        y = self.out(stream)[:, 0]
        losses, weights = (y - batch["y"]) ** 2, batch["weights"]
        positive = jnp.float32(batch["y"] > 0)
        terms = {
            "error": jnp.sum(jnp.abs(y - batch["y"]) * weights),
            "positive": (jnp.sum(y * positive), jnp.sum(positive)),
            "perplexity": jnp.sum(losses * weights),
        }
        return jnp.sum(losses * weights), jnp.sum(weights), terms


class Block(nnx.Module):
    def __init__(self, rngs):
        axes = {"out_sharding": ("embed", "mlp")}
        self.up = nnx.Linear(8, 8, kernel_metadata=axes, rngs=rngs)

    def __call__(self, stream, scope):
        return jnp.tanh(self.up(stream))


@functools.cache
def model():
    inputs = {"x": Input(("batch", None), shape=(None, 8))}
    inputs |= {"y": Input(("batch",)), "weights": Input(("batch",))}
    return from_nnx(ends=Ends, block=Block, num_layers=2, inputs=inputs)


def batch():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 8)), random.normal(size=8)
    weights = np.array([1, 0, 2, 1, 0.5, 1, 3, 0])  # uneven over devices
    return {k: v.astype(np.float32) for k, v in dict(x=x, y=y, weights=weights).items()}


def step_of(made, layout):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    return make_train_step(made, optax.sgd(0.1), layout, devices=devices)


@functools.cache
def measured(layout):
    """Metrics of an evaluation, and of a step."""
    step = step_of(model(), layout)
    state = step.init(seed=0)
    evaluated = dict(step.evaluate(state, batch()))
    return evaluated, step(state, batch())[1]


def expected():
    """The terms in plain NumPy."""
    step = step_of(model(), "data=1")
    params = jax.device_get(step.init(seed=0).params)
    given, x = batch(), batch()["x"]
    kernels, biases = params["blocks"]["up"]["kernel"], params["blocks"]["up"]["bias"]
    for kernel, bias in zip(kernels, biases, strict=True):
        x = np.tanh(x @ kernel + bias)
    y = (x @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]
    weights, positive = given["weights"], given["y"] > 0
    loss = np.average((y - given["y"]) ** 2, weights=weights)
    return {
        "error": np.average(abs(y - given["y"]), weights=weights),
        "positive": y[positive].mean(),
        "perplexity": np.exp(loss),
        "loss": loss,
    }


def test_terms_are_means_over_the_batch():
    wanted = expected()
    for metrics in measured("data=1"):
        found = {name: metrics[name] for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_terms_are_the_same_under_every_layout(layout):
    for found, wanted in zip(measured(layout), measured("data=1"), strict=True):
        assert found.keys() == wanted.keys() >= NAMES
        for name in {"loss", "weight_sum", *NAMES}:
            assert float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-5)


def test_terms_change_no_gradient():
    """Nor does one that is NaN keep a step from being taken."""
    bare = step_of(model(), "data=1")
    terms = {"bad": jnp.float32(jnp.nan)}

    def with_nan(params, stream, batch, scope):
        return (*model().head(params, stream, batch, scope)[:2], terms)

    kept = type(model())(**{**vars(model()), "head": with_nan})
    other = step_of(kept, "data=1")
    (one, _), (two, metrics) = (
        step(step.init(seed=0), batch()) for step in (bare, other)
    )
    assert int(metrics["skipped"]) == 0 and np.isnan(metrics["bad"])
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


@pytest.mark.parametrize(
    "terms, key, values",
    [
        ({"loss": 1.0}, "model.term_name_taken", ("'loss'",)),
        ({"auxiliary.a": 1.0}, "model.term_name_taken", ("'auxiliary.a'",)),
        ({3: 1.0}, "model.term_name_taken", ("3",)),
        ({"a": jnp.ones(2)}, "model.term_not_scalar", ("'a'", "(2,)")),
        ({"a": (1.0, 2.0, 3.0)}, "model.term_not_scalar", ("'a'",)),
        ({"a": 1j}, "model.complex_loss", ("complex64",)),
    ],
)
def test_a_wrong_term_is_refused_by_name(terms, key, values, refuses):
    with refuses(key, *values):
        check_head((1.0, 2.0, terms))


def test_a_term_without_weights_has_those_of_the_loss():
    sums = check_head((jnp.float32(1.0), 4.0, {"b": 2, "a": (3.0, 6.0)}))
    assert {name: float(mean) for name, mean in term_means(sums.terms).items()} == {
        "a": 0.5,
        "b": 0.5,
    }
    empty = term_means({"a": (jnp.float32(0), jnp.float32(0))})
    assert float(empty["a"]) == 0.0


@pytest.mark.parametrize("tensor, logits_bytes", [(1, 0), (2, 400), (4, 400)])
def test_a_hit_is_the_largest_logit_of_all_the_vocabulary(tensor, logits_bytes):
    random = np.random.default_rng(1)
    x, table = random.normal(size=(2, 6, 4)), random.normal(size=(40, 4))
    logits = x @ table.T
    targets = np.where(random.uniform(size=(2, 6)) < 0.5, logits.argmax(-1), 3)
    weights = random.uniform(0.1, 2.0, (2, 6)).astype(np.float32)
    targets[0, 0], weights[0, 0] = 99, 0.0  # no word: it must not count
    scope = Scope(rules=TENSOR, platform="cpu")
    with jax.set_mesh(make_mesh(Layout(tensor=tensor), jax.devices()[:tensor])):
        loss, weight, terms = jax.jit(
            lambda *arrays: head_cross_entropy(
                *arrays, scope, logits_bytes=logits_bytes, terms=True
            )
        )(x.astype(np.float32), table.astype(np.float32), targets, weights)
    hits = weights[logits.argmax(-1) == targets].sum()
    assert 0 < hits < weights.sum()
    assert float(terms["accuracy"]) == pytest.approx(hits, rel=1e-6)
    assert float(terms["perplexity"]) == float(loss)
    assert float(weight) == pytest.approx(weights.sum(), rel=1e-6)


def language_batch():
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (4, 17), np.int32)
    weights = random.integers(0, 2, (4, 16)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


@functools.cache
def evaluated(layout):
    step = step_of(build("test"), layout)
    state, given = step.init(seed=0), language_batch()
    metrics = {k: float(v) for k, v in step.evaluate(state, given).items()}
    if layout == "data=1":
        hits = np.argmax(step.logits(state, given), -1) == given["targets"]
        wanted = np.average(hits, weights=given["weights"])
        assert metrics["accuracy"] == pytest.approx(wanted, rel=1e-6)
    return metrics


@pytest.mark.parametrize(
    "layout", [slow("data=2,context=2,tensor=2"), "data=2,stage=2,microbatches=2"]
)
def test_a_language_model_has_accuracy_and_perplexity(layout):
    found, wanted = evaluated(layout), evaluated("data=1")
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)
    assert 0 <= found["accuracy"] <= 1


def test_an_evaluation_is_read_by_name_and_for_a_release_as_a_pair():
    evaluation = Evaluation({"loss": 2.0, "loss_sum": 8.0, "weight_sum": 4.0})
    assert dict(evaluation) == {**evaluation} == dict(evaluation.items())
    assert evaluation["loss"] == 2.0 and evaluation.get("accuracy", 1) == 1
    assert "loss" in evaluation and "accuracy" not in evaluation
    with pytest.warns(DeprecationWarning, match="evaluation\\['loss_sum'\\]"):
        loss_sum, weight_sum = evaluation
    with pytest.warns(DeprecationWarning):
        assert (loss_sum, weight_sum) == (evaluation[0], 4.0) == (8.0, 4.0)
    doubled = jax.tree.map(lambda x: 2 * x, evaluation)
    assert isinstance(doubled, Evaluation) and doubled["loss"] == 4.0
