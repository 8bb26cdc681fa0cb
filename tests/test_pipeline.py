"""The pipeline against the model alone: loss and gradients under every schedule."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import Input, RuleError, default_rules
from meshpar.layout import Layout
from meshpar.parallel.pipeline import executor
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.schedules import SCHEDULES
from tests.covering import every_pair
from tests.marks import slow
from tests.pipelined import (
    BATCH,
    SEQ,
    assert_close,
    assert_equal_to_plain,
    batch_of,
    mlp_of,
    model_of,
    params_of,
    plain,
    plain_logits,
    state_of,
    step_of,
)
from tests.schedule_cases import SYNCHRONOUS

TABLE = [
    (4, "microbatches=3"),
    (4, "stage=2,microbatches=4"),
    (4, "stage=4,microbatches=1"),
    (7, "stage=4,microbatches=2"),
    (7, "data=2,stage=4,microbatches=6"),
    (7, "fsdp=2,stage=3,splits=1/4/2,microbatches=4,remat=full"),
    (9, "stage=8,microbatches=8"),
    (7, "data=2,stage=2,tensor=2,microbatches=3,remat=stage"),
    (5, "fsdp=2,stage=2,microbatches=4,remat=stage_full,fsdp_gather=microbatch"),
    (4, "data=2,stage=2,tensor=2,schedule=gpipe,microbatches=3"),
    (7, "stage=2,tensor=2,schedule=interleaved_1f1b,chunks=2,microbatches=3"),
    (4, "fsdp=2,stage=2,schedule=looped_bfs,chunks=2,microbatches=3,remat=selective"),
    (
        7,
        "fsdp=2,stage=2,tensor=2,sequence_parallel=true,microbatches=4,"
        "schedule=interleaved_1f1b,chunks=2,splits=1/2/3/1",
    ),
]
"""Layers and layouts: each thing that can go wrong in one of them at least.

Of a Llama; on a model that compiles sooner most stand among those with NaN in bubbles.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "line"), TABLE)
def test_loss_and_gradients_equal_those_of_the_model_alone(layers, line):
    assert_equal_to_plain(model_of(layers), line)


MESHES = [
    *itertools.product((2, 4), ("", "data=2,", "fsdp=2,", "tensor=2,")),
    (2, "data=2,tensor=2,"),
    (8, ""),
]


def every_combination():
    """Schedules, meshes, microbatches and layers: any two of these values meet."""
    for schedule, (stage, split), num, is_even in every_pair(
        SYNCHRONOUS, MESHES, (1, 3, 6, 12), (True, False)
    ):
        chunks = SCHEDULES[schedule].num_chunks or 2
        even = stage * chunks
        uneven = (30 if stage == 8 else 7) if chunks == 1 else even + 3
        layers = even if is_even else uneven
        line = f"{split}stage={stage},microbatches={num},schedule={schedule}"
        yield layers, line + (f",chunks={chunks}" if chunks > 1 else "")
        if "tensor" in split:
            yield layers, f"{line},chunks={chunks},sequence_parallel=true"


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "line"), [*every_combination()])
def test_every_combination_equals_the_model_alone(layers, line):
    assert_equal_to_plain(model_of(layers), line)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("mlp", "stage=2,microbatches=3,remat=stage"),
        slow("gpt2", "stage=2,tensor=2,microbatches=3"),
        slow("gpt2", "microbatches=4"),
    ],
)
def test_dropout_does_not_depend_on_stages_or_microbatches(model, line):
    of = {"mlp": mlp_of, "gpt2": model_of}[model]
    assert_equal_to_plain(of(3, dropout=0.3), line)


# Bubbles.


@pytest.fixture
def poisoned(monkeypatch):
    """NaN wherever a rank has nothing to do, and in buffers before their first use."""
    first_state = executor.Executor._first_state

    def nan_state(self, **options):
        state = first_state(self, **options)
        buffers = state.inputs, state.gradients, state.saved
        inputs, gradients, saved = jax.tree.map(_filled_with_nan, buffers)
        return replace(state, inputs=inputs, gradients=gradients, saved=saved)

    monkeypatch.setattr(executor.Executor, "_first_state", nan_state)
    monkeypatch.setattr(executor, "IDLE", jnp.nan)


def _filled_with_nan(buffer):
    if jnp.issubdtype(buffer.dtype, jnp.floating):
        return jnp.full_like(buffer, jnp.nan)
    return buffer


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("mlp", "microbatches=3"),
        ("mlp", "stage=4,microbatches=2,remat=selective"),
        slow("mlp", "fsdp=2,stage=3,splits=1/4/2,microbatches=4,remat=full"),
        slow(
            "mlp",
            "fsdp=2,stage=2,tensor=2,sequence_parallel=true,microbatches=3,"
            "schedule=looped_bfs,chunks=2,remat=stage_full,fsdp_gather=microbatch",
        ),
        slow("llama", "stage=4,microbatches=2"),
        slow("llama", "stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=3"),
        slow("llama", "stage=4,microbatches=2,remat=stage"),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_nan_in_the_bubbles_changes_nothing(model, line):
    assert_equal_to_plain({"mlp": mlp_of, "llama": model_of}[model](7), line)


# Order of layers.


@pytest.mark.parametrize(
    "line",
    [
        "stage=3,splits=1/4/2,microbatches=2",
        "stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=2",
    ],
)
def test_initial_parameters_are_those_of_the_model_to_the_bit(line):
    model = mlp_of(7)
    step = step_of(model, line)
    params = step.init(3).params
    jax.tree.map(
        np.testing.assert_array_equal, step.in_layer_order(params), params_of(model)
    )
    assert_equal_shapes(params, step.model)


def assert_equal_shapes(params, model):
    shapes = {p: v.stacked_shape for p, v in model.flat_parameters().items()}
    assert list(shapes.values()) == [value.shape for value in jax.tree.leaves(params)]


def test_layers_are_put_in_order_and_empty_places_left_out():
    model = model_of(3)
    order = (2, -1, 0, 1)
    arranged = replace(
        model,
        parameters=jax.tree.map(
            lambda one: replace(one, layer_order=order) if one.num_layers else one,
            model.parameters,
            is_leaf=lambda node: hasattr(node, "layer_order"),
        ),
    )
    tree = jax.tree.map(
        lambda one: np.arange(len(order)) if one.num_layers else np.arange(5),
        model.parameters,
        is_leaf=lambda node: hasattr(node, "layer_order"),
    )
    found = in_layer_order(arranged, tree)
    assert {tuple(leaf.tolist()) for leaf in jax.tree.leaves(found["blocks"])} == {
        (2, 3, 0)
    }
    assert found["token_embed"].tolist() == [0, 1, 2, 3, 4]


def test_without_stages_the_order_is_the_models_own():
    model = mlp_of(7)
    step = step_of(model, "data=2")
    params = state_of(step, model).params
    jax.tree.map(
        np.testing.assert_array_equal, step.in_layer_order(params), params_of(model)
    )


# Evaluation and logits.


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            "mlp",
            "data=2,stage=2,tensor=2,sequence_parallel=true,microbatches=3,"
            "schedule=interleaved_1f1b,chunks=2",
        ),
        slow("llama", "data=2,stage=2,tensor=2,sequence_parallel=true,microbatches=4"),
        slow("llama", "stage=3,schedule=interleaved_1f1b,chunks=2,microbatches=3"),
    ],
)
def test_evaluation_and_logits_equal_those_of_the_model_alone(model, line):
    model, batch = {"mlp": mlp_of, "llama": model_of}[model](7), batch_of()
    step = step_of(model, line)
    state = state_of(step, model)
    evaluation = step.evaluate(state, batch)
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    assert float(loss_sum / weight_sum) == pytest.approx(float(plain(model)[0]))
    assert float(weight_sum) == batch["weights"].sum()
    found = step.logits(state, batch["tokens"])
    assert_close([np.asarray(found)], [plain_logits(model)])


def with_image(**inputs):
    """A model whose losses are times an image that is as wide as sequences are long."""
    base = mlp_of(7)

    def head(params, x, batch, scope):
        assert batch["image"].shape[1] == SEQ
        weights = batch["weights"] * batch["image"].mean(1, keepdims=True)
        loss_sum, _ = base.head(params, x, {**batch, "weights": weights}, scope)
        return loss_sum, batch["weights"].sum()

    image = np.broadcast_to(np.linspace(0.5, 2, SEQ, dtype=np.float32), (BATCH, SEQ))
    model = replace(base, head=head, inputs={**base.inputs, **inputs})
    return model, {**batch_of(), "image": image}


def test_only_the_inputs_with_a_sequence_are_shared_whatever_the_size_of_others():
    model, batch = with_image(image=Input(("batch", None)))
    step = step_of(model, "stage=2,microbatches=1")
    value, gradients = step.loss_and_gradients(state_of(step, mlp_of(7)), batch)
    wanted_value, wanted = plain(mlp_of(7))
    factor = batch["image"][0].mean()
    assert float(value) == pytest.approx(factor * float(wanted_value), rel=1e-6)
    wanted = jax.tree.map(lambda gradient: factor * gradient, wanted)
    assert_close(step.in_layer_order(gradients), wanted)


def test_an_input_that_is_not_declared_may_have_a_sequence_in_any_dim(refuses):
    model, batch = with_image()
    step = step_of(replace(model, inputs=None), "stage=2,microbatches=2")
    with refuses("model.unknown_token_dim", "batch['image']", "per_token=True"):
        step.compile(batch)


def test_a_model_whose_ends_look_at_several_tokens_is_not_shared():
    model = mlp_of(7)
    step = step_of(replace(model, per_token=False), "stage=2,microbatches=3")
    value, gradients = step.loss_and_gradients(state_of(step, model), batch_of())
    wanted_value, wanted = plain(model)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    assert_close(step.in_layer_order(gradients), wanted)


# What is refused.


@pytest.mark.parametrize(
    ("layers", "line", "refusal"),
    [
        (2, "stage=4,microbatches=4", ("layout.too_many_stages", "stage=4", 4, 2)),
        (4, "stage=2,splits=1/1/2", ("layout.splits_not_stages", "1/1/2", 3, 2)),
        (4, "stage=2,splits=2/3", ("layout.splits_not_layers", "splits=2/3", 5, 4)),
        (
            4,
            "stage=2,chunks=2",
            ("schedule.unsupported_chunks", "chunks=2", "'1f1b'"),
        ),
        (
            4,
            "microbatches=2,remat=stage",
            ("layout.stage_remat_without_stages", "stage=1", "remat=full"),
        ),
        (
            4,
            "microbatches=2,splits=4",
            ("layout.option_without_axis", "splits", "stage=1"),
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused(layers, line, refusal, refuses):
    with refuses(*refusal):
        step_of(model_of(layers), line)


def test_microbatches_that_do_not_divide_the_batch_are_refused(refuses):
    step = step_of(model_of(4), "data=2,stage=2,microbatches=5")
    with refuses("batch.indivisible", "batch['tokens']", BATCH, 2, "microbatches=5"):
        step.compile(batch_of())


def test_blocks_that_change_the_shape_are_refused(refuses):
    model = model_of(4)
    (group,) = model.groups

    def block(params, x, scope):
        return group.block(params, x, scope)[:, :-1]

    wrong = replace(model, groups=(replace(group, block=block),))
    step = step_of(wrong, "stage=2,microbatches=3")
    with refuses("model.stream_changed", "float32(24, 16, 32)", "float32(24, 15, 32)"):
        step.compile(batch_of())


@pytest.mark.parametrize(
    ("parameters", "refusal"),
    [
        ({}, ("rules.layers_not_on_stage", "'layers'", None, "stage=2")),
        ({"layers": "tensor"}, ("rules.split_layers", "'layers'", ("tensor",))),
        ({"layers": "fsdp"}, ("rules.split_layers", "'layers'", ("fsdp",))),
        (
            {"layers": "stage", "embed": "stage"},
            ("rules.claimed_twice", "'embed'", "'stage'"),
        ),
    ],
)
def test_rules_that_do_not_split_the_layers_over_stage_are_refused(
    parameters, refusal, refuses
):
    line = "stage=2,tensor=2,microbatches=2"
    rules = replace(default_rules(Layout.parse(line)), parameters=parameters)
    with refuses(*refusal, kind=RuleError):
        step_of(model_of(4), line, rules=rules)
