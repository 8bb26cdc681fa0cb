"""Optimizers by name: their options, weight decay, learning rates and averages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar.models.presets import build
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.optimizer_options import (
    FIRST_DEFAULT,
    OPTIMIZERS,
    keeps_average,
    parse_optimizer,
)
from meshpar.recipes.optimizers import (
    is_matrix,
    learning_rate_schedule,
    make_optimizer,
    muon_dims,
)
from meshpar.recipes.resume import refuse_other_optimizer
from meshpar.rules.sharding import path_name
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import read_arrays
from meshpar.train.optimizer.average import averaged_state, parameter_average
from tests.marks import slow
from tests.pipelined import batch_of, mlp_of, step_of
from tests.run_steps import SMALL
from tests.states import drawn

SPLIT, STAGED = "fsdp=2,tensor=2", "stage=2,microbatches=2"
ALL = [*OPTIMIZERS, "adamw with an average"]

BOUNDS = {"muon": 1e-3, "lion": 1e-3}
"""Bounds of the mean difference. Newton-Schulz amplifies rounding where gradients lack
a direction; Lion takes the sign of a value that may be all rounding."""


def options_of(name):
    """Options of a run with an optimizer, without a warm-up."""
    given = dict(optimizer=name, steps=9, warmup_steps=0, learning_rate=1e-2)
    if name.endswith("average"):
        given |= dict(optimizer="adamw", ema_decay=0.9)
    return RunConfig(**given)


def made(name, line):
    config, model = options_of(name), mlp_of(2)
    return step_of(model, line, make_optimizer(config, model), max_grad_norm=1.0)


@functools.cache
def trained(name, line):
    """Losses of three steps, and the values to evaluate, layers first to last."""
    step = made(name, line)
    state, losses = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    config = options_of(name)
    if keeps_average(config.optimizer, config.ema_decay):
        state = averaged_state(step, state)
    return losses, jax.tree.map(np.asarray, step.in_layer_order(state.params))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(slow(name, SPLIT) for name in ALL[:-1]),
        (ALL[-1], SPLIT),
        *(slow(name, STAGED) for name in ALL),
        slow("muon", "data=2,zero=2"),
    ],
)
def test_every_optimizer_trains_as_on_one_device(name, line):
    (losses, found), (wanted_losses, wanted) = (
        trained(name, one) for one in (line, "data=1")
    )
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert wanted_losses[2] < wanted_losses[0]
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        bound = BOUNDS.get(name, 1e-5) * np.abs(other).mean()
        assert np.abs(one - other).mean() <= bound


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_is_taken_for_each_layer_and_its_state_is_split(name):
    step = made(name, SPLIT)
    state = jax.tree.leaves(step.shardings.opt_state)
    shapes = jax.tree.leaves(step.state_shapes.opt_state)
    for shape, sharding in zip(shapes, state, strict=True):
        is_table_or_matrix = len(shape.shape) > 1 and min(shape.shape[-2:]) > 1
        assert is_table_or_matrix != sharding.is_fully_replicated


def test_weight_decay_is_for_matrices_and_for_all_by_a_switch():
    model = build("gpt2", layers=1, hidden=32, heads=4, vocab=64)
    params = jax.eval_shape(model.init, 0)
    decays = {
        path_name(path): it for path, it in jax.tree.leaves_with_path(is_matrix(params))
    }
    assert {path for path, it in decays.items() if it} == {
        *("blocks.attention.out", "blocks.attention.qkv"),
        *("blocks.mlp.down", "blocks.mlp.up"),
    }
    for text, moved in (("adamw", {"matrix"}), (FIRST_DEFAULT, {"matrix", "norm"})):
        optimizer = make_optimizer(RunConfig(optimizer=text, warmup_steps=0), model)
        values = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
        zeros = jax.tree.map(jnp.zeros_like, values)
        updates, _ = optimizer.update(zeros, optimizer.init(values), values)
        assert {name for name, it in updates.items() if (it != 0).any()} == moved


def test_muon_takes_each_matrix_of_the_blocks_by_what_it_contracts():
    dims = muon_dims(build("tiny-moe"))
    assert {path: (it.reduction_axis, it.output_axis) for path, it in dims.items()} == {
        "blocks.attention.out": ((0, 1), (2,)),
        "blocks.attention.qkv": ((0,), (1, 2, 3)),
        "blocks.mlp.down": ((1,), (2,)),
        "blocks.mlp.gate_up": ((1,), (2, 3)),
        "blocks.mlp.router.scores": ((0,), (1,)),
    }


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        (dict(), [0, 5e-3, 1e-2, 1e-3]),
        (dict(learning_rate_schedule="linear"), [0, 5e-3, 1e-2, 1e-3]),
        (dict(learning_rate_schedule="constant"), [0, 5e-3, 1e-2, 1e-2]),
        (dict(learning_rate_schedule="wsd", cooldown_steps=5), [0, 5e-3, 1e-2, 1e-3]),
        (dict(optimizer="schedule_free"), [0, 5e-3, 1e-2, 1e-2]),
        (dict(warmup_steps=0, final_rate_ratio=0.0), [1e-2, None, None, 0]),
        (
            dict(warmup_steps=0, learning_rate_schedule="linear"),
            [1e-2, 9.55e-3, 9.1e-3, 1e-3],
        ),
    ],
)
def test_the_learning_rate_rises_and_falls_as_its_schedule_says(options, rates):
    rate = learning_rate_schedule(
        RunConfig(steps=90, decay_steps=20, learning_rate=1e-2, **options)
    )
    for step, wanted in zip((0, 1, 2, 20), rates, strict=True):
        if wanted is not None:
            assert float(rate(step)) == pytest.approx(wanted, abs=1e-9)
    assert float(rate(60)) == float(rate(20))
    if options.get("learning_rate_schedule") == "wsd":
        assert [float(rate(step)) for step in (14, 15)] == pytest.approx([1e-2] * 2)
        assert float(rate(16)) == pytest.approx(1e-2 - 9e-3 / 5)


def test_the_average_forgets_its_first_value_and_then_decays():
    optimizer = optax.chain(optax.sgd(1.0), parameter_average(0.8))
    values = {"x": jnp.float32(4)}
    state, average, x = optimizer.init(values), 4.0, 4.0
    for number in range(60):
        gradients = {"x": jnp.float32(number % 3)}
        updates, state = optimizer.update(gradients, state, values)
        values = optax.apply_updates(values, updates)
        x -= number % 3
        average += max(0.2, 9 / (number + 10)) * (x - average)
    assert float(state[1].average["x"]) == pytest.approx(average, rel=1e-5)


def test_schedule_free_is_evaluated_where_optax_says():
    step = made("schedule_free", "data=1")
    state, _ = step(step.init(0), batch_of())
    found = averaged_state(step, state).params
    wanted = contrib.schedule_free_eval_params(state.opt_state, state.params)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6),
        found,
        wanted,
    )


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            dict(optimizer="sgd,ns_steps=6"),
            ("run.unknown_optimizer_option", "'sgd'", "ns_steps=6", "muon"),
        ),
        (dict(optimizer="adamm"), ("run.unknown_optimizer", "'adamm'", "'adamw'")),
        (dict(optimizer="adamw,beta1=1"), ("value.out_of_range", "beta1=1", 0.9)),
        (dict(optimizer="muon,ns_steps=0"), ("value.out_of_range", "ns_steps=0", 5)),
        (dict(optimizer="sgd,nesterov=1"), ("value.out_of_range", "nesterov=1")),
        (
            dict(optimizer="adamw,decay_mask=some"),
            ("value.out_of_range", "decay_mask=some", "matrices", "all"),
        ),
        (dict(optimizer="schedule_free,beta1=0"), ("value.out_of_range", "beta1=0.0")),
        (dict(optimizer="adamw,beta1"), ("optimizer.not_key_value", "beta1")),
        (dict(ema_decay=1.0), ("value.out_of_range", "ema_decay=1.0")),
        (dict(max_grad_norm=-1.0), ("value.out_of_range", "max_grad_norm=-1.0")),
        (dict(final_rate_ratio=2.0), ("value.out_of_range", "final_rate_ratio=2.0")),
        (
            dict(optimizer="schedule-free", ema_decay=0.9),
            ("run.two_averages", "ema_decay=0.9", "schedule_free"),
        ),
        (
            dict(optimizer="schedule_free", learning_rate_schedule="cosine"),
            ("run.schedule_of_schedule_free", "'cosine'", "'schedule_free'"),
        ),
        (
            dict(learning_rate_schedule="step"),
            ("run.unknown_learning_rate_schedule", "'step'", "wsd"),
        ),
        (
            dict(cooldown_steps=5),
            ("run.cooldown_without_wsd", "cooldown_steps=5", "'cosine'"),
        ),
        (dict(warmup_steps=150), ("run.warmup_too_long", "warmup_steps=150", 150)),
        (
            dict(learning_rate_schedule="wsd", warmup_steps=100, cooldown_steps=80),
            ("run.warmup_too_long", "warmup_steps=100", "cooldown_steps=80", 150),
        ),
        (dict(validate_with="average"), ("run.no_average", "'average'", "'adamw'")),
        (dict(tracker="clearml"), ("run.unknown_tracker", "'clearml'", "wandb")),
        (dict(log_every=0), ("value.not_whole_number", "log_every", 0, 1)),
    ],
)
def test_options_that_contradict_are_refused(options, refusal, refuses):
    with refuses(*refusal):
        RunConfig(**options)


@pytest.mark.parametrize(
    ("before", "now", "numbers"),
    [
        ({}, {"optimizer": "lion"}, ("optimizer=adamw", "lion")),
        ({"optimizer": "sgd"}, {"optimizer": "sgd,momentum=0"}, ("momentum=True",)),
        ({}, {"optimizer": "adamw", "ema_decay": 0.9}, ("ema=False", "True")),
    ],
)
def test_a_resumed_run_keeps_what_the_state_depends_on(before, now, numbers, refuses):
    with refuses("run.changed_optimizer", *numbers):
        refuse_other_optimizer(before, now)
    refuse_other_optimizer(now, {**now, "ema_decay": now.get("ema_decay") and 0.99})


def test_options_are_of_the_type_of_their_default():
    name, options = parse_optimizer("muon, ns_steps=6,nesterov=false ,rms=0")
    assert (name, options["ns_steps"]) == ("muon", 6)
    assert (options["nesterov"], options["rms"]) == (False, 0.0)
    assert options["beta2"] == OPTIMIZERS["muon"]["beta2"]


@pytest.mark.parametrize("name", ["schedule_free", "adamw with an average"])
def test_an_average_is_restored_under_another_layout_and_read_for_an_export(
    name, tmp_path
):
    step, other = made(name, "data=1"), made(name, SPLIT)
    state = drawn(step, scale=0.3, steps_done=3)
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {"layout": "data=1"})
    with Checkpoints(tmp_path, layer_orders=other.layer_orders) as checkpoints:
        restored = checkpoints.restore(other.state_shapes, other.shardings)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, restored.opt_state, state.opt_state)
    wanted = averaged_state(other, restored).params
    found = read_arrays(tmp_path, average=True)[1]["params"]
    jax.tree.map(lambda one, array: same(array[...], one), wanted, found)
    differs = [
        np.abs(np.asarray(one) - np.asarray(trained)).max() > 0.1
        for one, trained in zip(
            *map(jax.tree.leaves, (wanted, restored.params)), strict=True
        )
    ]
    assert all(differs), "the average is not what is trained"


def test_a_checkpoint_without_an_average_is_refused(tmp_path, refuses):
    step = made("sgd", "data=1")
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(drawn(step, scale=0.3, steps_done=3), {"layout": "data=1"})
    with refuses("checkpoint.no_average", "--ema-decay", words=False):
        read_arrays(tmp_path, average=True)
    with refuses("optimizer.no_average", "parameter_average"):
        averaged_state(step, drawn(step, scale=0.3))


@pytest.mark.slow
def test_a_run_resumed_under_a_pipeline_keeps_its_average(tmp_path, small_text):
    given = dict(layout="data=2", text=small_text, ema_decay=0.9, decay_steps=6)
    given = {**SMALL, "model": "vocab=256,layers=2", **given, "warmup_steps": 0}
    losses = {
        use: pretrain.pretrain(
            RunConfig(**given, steps=6, validate_with=use, out=tmp_path / use)
        ).validation_loss
        for use in ("average", "trained")
    }
    out = tmp_path / "part"
    pretrain.pretrain(RunConfig(**given, steps=3, out=out))
    given["layout"] = "stage=2,microbatches=2"
    rest = pretrain.pretrain(RunConfig(**given, steps=6, out=out, resume=True))
    assert rest.validation_loss == pytest.approx(losses["average"], rel=1e-5)
    assert losses["average"] != pytest.approx(losses["trained"], rel=1e-4)
