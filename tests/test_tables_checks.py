"""A step with tables refuses states, batches and steps that are not its own."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from meshpar import embedding_tables, make_train_step, memory_report
from meshpar.models.presets import build
from meshpar.tables import SGD, LazyAdam, Table, with_tables
from tests.states import zeros_of

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
def test_a_state_that_is_gone_or_of_another_step_is_refused(use, refuses):
    step, other = step_of(SGD(0.1)), step_of(LazyAdam(0.1))
    with refuses("step.donated_state"):
        use(step, deleted(zeros_of(step)))
    where = "model_state.embedding_tables.replicated_16"
    with refuses("step.state_tree_differs", "no", f"{where}.rows"):
        use(step, zeros_of(dense_step()))
    with refuses("step.state_tree_differs", f"{where}.mu", 1):
        use(step, zeros_of(other))
    with refuses("step.not_a_state", "NoneType"):
        use(step, None)


@pytest.mark.parametrize(
    "use", ["call", "evaluate", "logits", "host_tables", "portable"]
)
def test_a_state_that_lies_on_another_mesh_is_refused(use, refuses):
    dense = make_train_step(MODEL, optax.sgd(0.1), "fsdp=2", devices=jax.devices()[:2])
    other = with_tables(dense, embedding_tables(TABLES, SGD(0.1)))
    with refuses("step.state_on_other_mesh", "fsdp=2", "data=2"):
        USES[use](step_of(SGD(0.1)), zeros_of(other))


DENSE_USES = {
    **{name: USES[name] for name in ("call", "evaluate")},
    "logits": lambda step, state: step.logits(state, {"numbers": batch()["numbers"]}),
    "gradients": lambda step, state: step.loss_and_gradients(state, batch()),
}


@pytest.mark.parametrize("use", DENSE_USES.values(), ids=DENSE_USES)
def test_a_model_alone_refuses_such_states_too(use, refuses):
    step = dense_step()
    with refuses("step.donated_state"):
        use(step, deleted(zeros_of(step)))
    more = "model_state.embedding_tables.replicated_16.rows"
    with refuses("step.state_tree_differs", more):
        use(step, zeros_of(step_of(SGD(0.1))))


def test_a_state_without_its_optimizers_is_evaluated():
    step = step_of(LazyAdam(0.1))
    state = step.init(0)
    evaluation = step.evaluate(state, batch())
    loss = evaluation["loss_sum"]
    bare = dataclasses.replace(state, opt_state=())
    assert float(step.evaluate(bare, batch())["loss_sum"]) == float(loss)


def test_logits_that_a_model_has_not_are_refused(refuses):
    step = step_of(SGD(0.1), logits=False)
    with refuses("model.missing_logits", "logits"):
        step.logits(zeros_of(step), batch())


@pytest.mark.parametrize(
    "given, refusal",
    [
        (
            batch(film_weight=np.ones((2, 1), np.float32)),
            ("batch.unknown_array", "'film_weight'", "'film_weights'"),
        ),
        (
            batch(embedded=np.ones((2, 1, 16), np.float32)),
            ("batch.looked_up_array", "embedded", "film"),
        ),
        (batch(0), ("batch.no_examples", 0, 1)),
        (None, ("batch.not_a_dict", "NoneType", "dict")),
    ],
)
def test_a_batch_of_what_nobody_reads_is_refused(given, refusal, refuses):
    step = step_of(SGD(0.1))
    with refuses(*refusal):
        step.place(given)
    weights = np.ones((2, 1), np.float32)
    step.place(batch(film_weights=weights, weights=weights[:, 0]))


@pytest.mark.parametrize(
    "make, refusal",
    [
        (
            lambda: with_tables(dense_step(), list(TABLES)),
            ("tables.not_embedding_tables", "list", "embedding_tables"),
        ),
        (
            lambda: with_tables(step_of(SGD(0.1)), step_of(SGD(0.1)).tables),
            ("tables.not_train_step", "TableStep", "make_train_step"),
        ),
        (
            lambda: memory_report(step_of(SGD(0.1)), batch()),
            ("step.wrong_kind", "TableStep", "step.predicted_memory(batch)"),
        ),
    ],
)
def test_what_takes_another_kind_of_step_or_tables_says_so(make, refusal, refuses):
    with refuses(*refusal):
        make()
