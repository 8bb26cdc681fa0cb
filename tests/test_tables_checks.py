"""A step with tables refuses states, batches and steps that are not its own."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from meshpar import InputError, embedding_tables, make_train_step, memory_report
from meshpar.models.presets import build
from meshpar.tables import SGD, LazyAdam, Table, with_tables

MODEL = build("tiny-dlrm", features=1, bottom=(16,), top_width=8, top_layers=1)
TABLES = (Table(name="film", rows=10, dim=16),)


@functools.cache
def dense_step(logits=True):
    model = MODEL if logits else dataclasses.replace(MODEL, logits=None)
    return make_train_step(model, optax.sgd(0.1), "data=2", devices=jax.devices()[:2])


@functools.cache
def step_of(optimizer, logits=True):
    return with_tables(dense_step(logits), embedding_tables(TABLES, optimizer))


def batch(examples=2, **more):
    return {
        "film": np.zeros((examples, 1), np.int32),
        "numbers": np.ones((examples, 4), np.float32),
        "clicks": np.ones(examples, np.float32),
        **more,
    }


def deleted(state):
    jax.tree.map(lambda array: array.delete(), state)
    return state


USES = {
    "call": lambda step, state: step(state, batch()),
    "evaluate": lambda step, state: step.evaluate(state, batch()),
    "logits": lambda step, state: step.logits(state, batch()),
    "host_tables": lambda step, state: step.host_tables(state),
    "portable": lambda step, state: step.portable(state),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_state_that_is_gone_or_of_another_step_is_refused(use):
    step, other = step_of(SGD(0.1)), step_of(LazyAdam(0.1))
    with pytest.raises(InputError, match="is gone: a step donates the state"):
        use(step, deleted(step.init(0)))
    missing = "has no model_state.embedding_tables.replicated_16.rows, which this step"
    with pytest.raises(InputError, match=missing):
        use(step, dense_step().init(0))
    more = "has model_state.embedding_tables.replicated_16.mu and 1 more, which this"
    with pytest.raises(InputError, match=more):
        use(step, other.init(0))
    with pytest.raises(InputError, match="state is a NoneType"):
        use(step, None)


@pytest.mark.parametrize(
    "use", ["call", "evaluate", "logits", "host_tables", "portable"]
)
def test_a_state_that_lies_on_another_mesh_is_refused(use):
    dense = make_train_step(MODEL, optax.sgd(0.1), "fsdp=2", devices=jax.devices()[:2])
    other = with_tables(dense, embedding_tables(TABLES, SGD(0.1)))
    there = "lies on a mesh of fsdp=2, and this step's has data=2; give"
    with pytest.raises(InputError, match=there):
        USES[use](step_of(SGD(0.1)), other.init(0))


DENSE_USES = {
    **{name: USES[name] for name in ("call", "evaluate", "logits")},
    "gradients": lambda step, state: step.loss_and_gradients(state, batch()),
}


@pytest.mark.parametrize("use", DENSE_USES.values(), ids=DENSE_USES)
def test_a_model_alone_refuses_such_states_too(use):
    step = dense_step()
    with pytest.raises(InputError, match="is gone: a step donates the state"):
        use(step, deleted(step.init(0)))
    more = "the state has model_state.embedding_tables.* does not keep; give one that"
    with pytest.raises(InputError, match=more):
        use(step, step_of(SGD(0.1)).init(0))


def test_a_state_without_its_optimizers_is_evaluated():
    step = step_of(LazyAdam(0.1))
    state = step.init(0)
    loss, _ = step.evaluate(state, batch())
    bare = dataclasses.replace(state, opt_state=())
    assert float(step.evaluate(bare, batch())[0]) == float(loss)


def test_logits_that_a_model_has_not_are_refused():
    step = step_of(SGD(0.1), logits=False)
    with pytest.raises(InputError, match="the model has no logits function; give"):
        step.logits(step.init(0), batch())


@pytest.mark.parametrize(
    "given, match",
    [
        (
            batch(film_weight=np.ones((2, 1), np.float32)),
            r"batch\['film_weight'\] is read by no table .* mean 'film_weights'",
        ),
        (
            batch(embedded=np.ones((2, 1, 16), np.float32)),
            r"batch\['embedded'\] is given, but is looked up in tables from 'film'",
        ),
        (batch(0), "the batch has 0 examples; give 1 or more"),
        (None, "the batch is a NoneType; give a dict of arrays"),
    ],
)
def test_a_batch_of_what_nobody_reads_is_refused(given, match):
    step = step_of(SGD(0.1))
    with pytest.raises(InputError, match=match):
        step.place(given)
    weights = np.ones((2, 1), np.float32)
    step.place(batch(film_weights=weights, weights=weights[:, 0]))


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: with_tables(dense_step(), list(TABLES)), "a list; give what embeddin"),
        (
            lambda: with_tables(step_of(SGD(0.1)), step_of(SGD(0.1)).tables),
            "a TableStep; give what make_train_step returned, and all tables at once",
        ),
        (
            lambda: memory_report(step_of(SGD(0.1)), batch()),
            r"not a TableStep; .* take step.predicted_memory\(batch\)",
        ),
    ],
)
def test_what_takes_another_kind_of_step_or_tables_says_so(make, match):
    with pytest.raises(InputError, match=match):
        make()
