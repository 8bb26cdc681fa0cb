"""Auxiliary losses of blocks: the same weighted mean under every layout."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshpar import Parameter, from_nnx, pipeline_value_and_grad
from meshpar.model.scope import Scope
from meshpar.model.tracing import loss
from tests.kept_gradients import KEEPING
from tests.marks import slow
from tests.pipelined import (
    QUICK,
    assert_close,
    batch_of,
    mlp_of,
    model_of,
    params_of,
    state_of,
    step_of,
)
from tests.test_pipeline_value_and_grad import (
    SCALE,
    TARGETS,
    X,
    assert_equal,
    blocks_of,
    mesh_of,
)

COEFFICIENTS = {"router_z": 0.3, "balance": 0.05}


@functools.cache
def with_router(layers):
    """A small model whose blocks have a router's z-loss and balance loss."""
    model = mlp_of(layers)
    (group,) = model.groups
    hidden = model.parameters["table"].shape[1]
    router = Parameter(
        shape=(hidden, 4),
        dtype=jnp.float32,
        logical_axes=("embed", None),
        initial=lambda key: jax.random.normal(key, (hidden, 4)),
        num_layers=layers,
    )

    def block(params, x, scope):
        others = {name: value for name, value in params.items() if name != "router"}
        y = group.block(others, x, scope)
        logits = (y @ params["router"]).astype(jnp.float32)
        weights = scope.batch["weights"]
        z = jax.nn.logsumexp(logits, -1) ** 2 * weights
        # Of each example by itself: share of tokens x mean probability, per expert.
        share = jax.nn.softmax(logits, -1).mean(1)
        chosen = jax.nn.one_hot(logits.argmax(-1), 4).mean(1)
        return y, {"router_z": z.sum(), "balance": (chosen * share).sum()}

    blocks = {**model.parameters["blocks"], "router": router}
    return replace(
        model,
        parameters={**model.parameters, "blocks": blocks},
        groups=(replace(group, block=block, auxiliary=COEFFICIENTS),),
    )


ALL_AXES = "data=2,fsdp=2,tensor=2,sequence_parallel=true"


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (4, ALL_AXES),
        slow(4, "fsdp=4,remat=full"),
        slow(3, "data=2,microbatches=3"),
        slow(4, "data=2,stage=2,tensor=2,microbatches=3"),
        slow(7, "fsdp=2,stage=4,microbatches=2"),
        slow(
            7, "stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=3,remat=stage"
        ),
    ],
)
def test_loss_and_gradients_equal_those_of_the_model_alone(layers, line):
    assert_trained_as_alone(with_router(layers), line)


def test_auxiliary_losses_count():
    (value, means), gradients = alone(with_router(4))
    added = sum(coefficient * means[name] for name, coefficient in COEFFICIENTS.items())
    assert added > 0.1
    without = jax.jit(lambda params: loss(mlp_of(4), params, batch_of(), SCOPE))
    assert float(value) == pytest.approx(
        float(without(without_router(params_of(with_router(4))))) + added, rel=1e-5
    )
    assert np.abs(gradients["blocks"]["router"]).max() > 0


def without_router(params):
    blocks = {**params["blocks"]}
    del blocks["router"]
    return {**params, "blocks": blocks}


SCOPE = Scope(batch=batch_of())


@functools.cache
def alone(model):
    """Loss with the mean of each auxiliary loss, and gradients, on one device.

    A mean is what the loss gains when its coefficient grows by 1.
    """
    (group,) = model.groups

    def weighted(params, coefficients):
        groups = (replace(group, auxiliary=coefficients),)
        return loss(replace(model, groups=groups), params, batch_of(), SCOPE)

    program = jax.jit(jax.value_and_grad(weighted, (0, 1)), compiler_options=QUICK)
    given = {name: np.float32(value) for name, value in group.auxiliary.items()}
    value, (gradients, means) = jax.device_get(program(params_of(model), given))
    return (value, means), gradients


@functools.cache
def step_with(model, line):
    """The step of a model and layout that two tests ask, compiled once."""
    return step_of(model, line, KEEPING)


@functools.cache
def updated(model, line):
    """Metrics and gradients of a step: the latter are its optimizer's state."""
    step = step_with(model, line)
    state, metrics = step(state_of(step, model), batch_of())
    return jax.device_get(metrics), step.in_layer_order(state.opt_state[0])


def assert_trained_as_alone(model, line):
    (value, _), wanted = alone(model)
    metrics, gradients = updated(model, line)
    assert abs(metrics["loss"] - value) <= 1e-5 * abs(value)
    assert_close(gradients, wanted)
    assert_reports_means(model, line)


def assert_reports_means(model, line):
    (_, means), _ = alone(model)
    metrics, _ = updated(model, line)
    for name, value in means.items():
        found = float(metrics[f"auxiliary.{name}"])
        assert found == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize(
    "line", [ALL_AXES, slow("fsdp=2"), slow("data=2,stage=2,microbatches=2")]
)
def test_a_step_reports_each_mean_and_evaluates_without_them(line):
    model = with_router(4)
    assert_reports_means(model, line)
    (_, means), _ = alone(model)
    beside = sum(value * means[name] for name, value in COEFFICIENTS.items())
    step = step_with(model, line)
    state = state_of(step, model)
    evaluation = step.evaluate(state, batch_of())
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    without = updated(model, line)[0]["loss"] - beside
    assert float(loss_sum / weight_sum) == pytest.approx(float(without), rel=1e-4)


# From Flax NNX.


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(64, 16, rngs=rngs)

    def embed(self, batch, scope):
        return self.table(batch["tokens"])

    def head(self, x, batch, scope):
        errors = ((x - 1) ** 2).mean(-1)
        return (errors * batch["weights"]).sum(), batch["weights"].sum()


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x, scope):
        y = x + jnp.tanh(self.linear(x))
        return y, {"size": (y**2).sum()}


@pytest.mark.parametrize("line", ["data=2", slow("stage=3,microbatches=2")])
def test_an_nnx_block_may_return_sums(line):
    model = from_nnx(ends=Ends, block=Block, num_layers=4, auxiliary={"size": 0.1})
    assert_trained_as_alone(model, line)


# Of the pipeline alone.


@pytest.mark.parametrize("sizes", [slow(dict(stage=3)), dict(data=2, stage=2)])
def test_the_pipeline_alone_adds_them_to_the_loss(sizes):
    num_microbatches = 3
    run = pipeline_value_and_grad(
        sized_block,
        sum_head,
        mesh=mesh_of(**sizes),
        num_microbatches=num_microbatches,
        auxiliary={"size": 0.1},
    )

    def alone(blocks, scale, x):
        total = 0.0
        for layer in range(7):
            x, sums = sized_block(jax.tree.map(lambda w, at=layer: w[at], blocks), x)
            total += 0.1 * sums["size"]
        loss_sum, weight_sum = sum_head(scale, x, TARGETS)
        return (loss_sum + total) / weight_sum

    wanted = jax.jit(jax.value_and_grad(alone, (0, 1, 2)), compiler_options=QUICK)
    assert_equal(run(blocks_of(), SCALE, X, TARGETS), wanted(blocks_of(), SCALE, X))


def sized_block(layer, x):
    y = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return y, {"size": (y**2).sum()}


def sum_head(scale, x, targets):
    return ((scale * x - targets) ** 2).sum(), jnp.float32(x.size)


# What is refused.


@pytest.mark.parametrize(
    ("auxiliary", "result", "numbers"),
    [
        ({"z": 1.0}, lambda y: y, ("x", ["z"])),
        ({}, lambda y: (y, {"z": y.sum()}), ({"z": ()}, [])),
        ({"z": 1.0}, lambda y: (y, {"balance": y.sum()}), ({"balance": ()}, ["z"])),
        ({"z": 1.0}, lambda y: (y, {"z": y.sum(-1)}), ({"z": (24, 16)}, ["z"])),
    ],
)
def test_a_block_that_returns_other_sums_is_refused(
    auxiliary, result, numbers, refuses
):
    model = model_of(4)
    (group,) = model.groups

    def block(params, x, scope):
        return result(group.block(params, x, scope))

    wrong = replace(model, groups=(replace(group, block=block, auxiliary=auxiliary),))
    with refuses("model.wrong_sums", "block=LlamaBlock", *numbers):
        step_of(wrong, "tensor=2").compile(batch_of())


def test_their_sums_are_taken_in_fp32():
    model = with_router(4)
    (group,) = model.groups
    blocks = params_of(model)["blocks"]
    half = jax.tree.map(lambda w: w[0].astype(jnp.bfloat16), blocks)
    x = jax.ShapeDtypeStruct((24, 16, half["up"].shape[0]), jnp.bfloat16)
    _, sums = jax.eval_shape(lambda x: group.run(half, x, SCOPE), x)
    assert {value.dtype for value in sums.values()} == {jnp.dtype("float32")}
