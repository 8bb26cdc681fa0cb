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
from meshpar.model.single import loss
from tests.pipelined import (
    QUICK,
    assert_equal_to_plain,
    batch_of,
    model_of,
    params_of,
    plain,
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
    """A small Llama whose blocks have a router's z-loss and balance loss."""
    model = model_of(layers)
    (group,) = model.groups
    hidden = model.parameters["token_embed"].shape[1]
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


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (4, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (4, "fsdp=4,remat=full"),
        (3, "data=2,microbatches=3"),
        (4, "data=2,stage=2,tensor=2,microbatches=3"),
        (7, "fsdp=2,stage=4,microbatches=2"),
        (7, "stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=3,remat=stage"),
    ],
)
def test_loss_and_gradients_equal_those_of_the_model_alone(layers, line):
    assert_equal_to_plain(with_router(layers), line)


def test_auxiliary_losses_count():
    with_loss, without = with_router(4), model_of(4)
    assert float(plain(with_loss)[0]) > float(plain(without)[0]) + 0.1
    gradient = plain(with_loss)[1]["blocks"]["router"]
    assert np.abs(gradient).max() > 0


def means_alone(model):
    """The mean of each auxiliary loss, by changing its coefficient in the loss."""
    (group,) = model.groups

    def total(name):
        one = replace(group, auxiliary={**dict.fromkeys(COEFFICIENTS, 0.0), name: 1.0})
        none = replace(group, auxiliary=dict.fromkeys(COEFFICIENTS, 0.0))
        values = [
            loss(
                replace(model, groups=(each,)),
                params_of(model),
                batch_of(),
                Scope(batch=batch_of()),
            )
            for each in (one, none)
        ]
        return float(values[0] - values[1])

    return {f"auxiliary.{name}": total(name) for name in COEFFICIENTS}


@pytest.mark.parametrize("line", ["fsdp=2", "data=2,stage=2,microbatches=2"])
def test_a_step_reports_each_mean_and_evaluates_without_them(line):
    model = with_router(4)
    step = step_of(model, line)
    state = state_of(step, model)
    loss_sum, weight_sum = step.evaluate(state, batch_of())
    _, metrics = step(state, batch_of())
    wanted = means_alone(model)
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4)
    beside = sum(
        coefficient * wanted[f"auxiliary.{name}"]
        for name, coefficient in COEFFICIENTS.items()
    )
    alone = float(metrics["loss"]) - beside
    assert float(loss_sum / weight_sum) == pytest.approx(alone, rel=1e-4)


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


@pytest.mark.parametrize("line", ["data=2", "stage=3,microbatches=2"])
def test_an_nnx_block_may_return_sums(line):
    model = from_nnx(ends=Ends, block=Block, num_layers=4, auxiliary={"size": 0.1})
    assert_equal_to_plain(model, line)


# Of the pipeline alone.


@pytest.mark.parametrize("sizes", [dict(stage=3), dict(data=2, stage=2)])
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
    half = jax.tree.map(lambda w: w[0].astype(jnp.bfloat16), params_of(model)["blocks"])
    x = jnp.ones((24, 16, model.parameters["token_embed"].shape[1]), jnp.bfloat16)
    _, sums = group.run(half, x, Scope(batch=batch_of()))
    assert {value.dtype for value in sums.values()} == {jnp.dtype("float32")}
