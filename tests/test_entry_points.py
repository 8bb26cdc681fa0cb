"""What a user calls refuses what is of another kind, in one line that says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import (
    DATA_PARALLEL,
    Input,
    Layout,
    audit,
    batch_shapes,
    from_nnx,
    lint,
    make_mesh,
    make_train_step,
    tree_shardings,
)
from meshpar.model.tracing import loss
from meshpar.models.presets import build
from tests.marks import slow
from tests.pipelined import batch_of, mlp_of
from tests.states import zeros_of

ADAM = optax.adam(1e-3)


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (
            lambda: make_train_step(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ADAM, "data=8"),
            ("model.not_a_model", "Linear", "meshpar.Model", "meshpar.from_nnx"),
        ),
        (
            lambda: make_train_step(build("test"), "adam", "data=8"),
            ("optimizer.not_an_optimizer", "'adam'", "optax.adamw"),
        ),
        (
            lambda: make_train_step(build("test"), ADAM, {"data": 8}),
            ("layout.not_a_layout", "dict", "meshpar.Layout", "'data=2,tensor=4'"),
        ),
        (
            lambda: make_train_step(build("test"), ADAM, "data=8").init("x"),
            ("value.not_whole_number", "seed='x'", 4294967296),
        ),
        (
            lambda: lint("llama", "tensor=8"),
            ("model.not_a_model", "str", "meshpar.Model"),
        ),
        (
            lambda: tree_shardings(
                {"w": ("embed", "mlp")},
                {"w": jnp.zeros((4, 8))},
                make_mesh("data=8"),
                DATA_PARALLEL,
            ),
            ("rules.array_without_axes", "w", "tuple", "ArrayImpl"),
        ),
        (
            lambda: tree_shardings({}, {}, DATA_PARALLEL, make_mesh("data=8")),
            ("rules.misplaced_argument", "mesh", "Rules", "Mesh", "tree_shardings"),
        ),
    ],
)
def test_other_kinds_are_refused(call, refusal, refuses):
    with refuses(*refusal):
        call()


def test_a_layout_may_be_a_text_everywhere():
    assert make_mesh("data=2,tensor=4").shape["tensor"] == 4
    assert lint(build("test"), "data=2,tensor=2").findings == ()


def test_a_state_that_a_step_has_taken_is_refused(refuses):
    step, batch = make_train_step(mlp_of(2), ADAM, "data=8"), batch_of()
    taken = zeros_of(step)
    state, _ = step(taken, batch)
    with refuses("step.donated_state", "step"):
        step(taken, batch)
    step(state, batch)


@functools.cache
def sgd_step(layout, **sizes):
    return make_train_step(build("test", **sizes), optax.sgd(0.1), layout)


def absent_state(step):
    """The shapes of its state, and where they would lie."""
    return jax.tree.map(
        lambda one, lying: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=lying),
        step.state_shapes,
        step.shardings,
    )


@pytest.mark.parametrize(
    ("sizes", "layout", "refusal"),
    [
        (
            dict(ffn=128),
            "data=8",
            (
                *("step.state_array_differs", "params.blocks.mlp.down"),
                *("float32 (2, 128, 32)", "float32 (2, 64, 32)"),
            ),
        ),
        (
            dict(layers=4),
            "data=8",
            ("step.state_array_differs", (4, 4, 8, 32), (2, 4, 8, 32)),
        ),
        ({}, "fsdp=8", ("step.state_on_other_mesh", "fsdp=8", "data=8")),
        (
            {},
            "data=8,precision=bf16,param_dtype=bf16_stochastic",
            ("step.state_array_differs", "bfloat16", "float32"),
        ),
    ],
)
def test_a_state_of_another_model_or_layout_is_refused(sizes, layout, refusal, refuses):
    state, step = absent_state(sgd_step(layout, **sizes)), sgd_step("data=8")
    batch = {
        name: np.zeros(one.shape, one.dtype)
        for name, one in batch_shapes(step.model, 8, seq=4).items()
    }
    for use in (step.evaluate, step.loss_and_gradients):
        with refuses(*refusal):
            use(state, batch)
    if "param_dtype" not in layout:  # Its optimizer state has a master copy.
        with refuses(*refusal):
            step(state, batch)


def test_shapes_of_a_batch_come_from_the_declared_inputs(refuses):
    model = build("test")
    assert batch_shapes(model, 8, seq=16) == batch_shapes(8, 16)
    with refuses("batch.missing_size", "batch=8", "seq"):
        batch_shapes(model, 8)


class Weighted(nnx.Module):
    """A mean whose weights are parameters, and dropout along the tokens."""

    def __init__(self, rngs):
        self.gain = nnx.Param(jnp.ones((4,)))

    def embed(self, batch, scope):
        return batch["x"] * self.gain[...]

    def head(self, x, batch, scope):
        weights = jax.nn.softplus(x.mean(-1))
        return (weights * x.sum(-1)).sum(), weights.sum()


class Block(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.full((4,), 0.5))

    def __call__(self, x, scope):
        return x * self.scale[...]


class TokensFirst(Block):
    def __call__(self, x, scope):
        turned = jnp.swapaxes(x * self.scale[...], 0, 1)
        return jnp.swapaxes(scope.dropout(turned, 0.5, "turned"), 0, 1)


def weighted(block):
    inputs = {"x": Input(("batch", "seq", "embed"))}
    return from_nnx(ends=Weighted, block=block, num_layers=2, inputs=inputs)


def test_weights_that_are_parameters_have_their_gradient_or_are_refused(refuses):
    model = weighted(Block)
    x = np.random.default_rng(0).standard_normal((8, 3, 4), np.float32)
    wanted = jax.jit(jax.grad(lambda params: loss(model, params, {"x": x})))
    step = make_train_step(model, optax.sgd(1.0), "data=2,fsdp=2,tensor=2")
    state = step.init(0)
    _, found = step.loss_and_gradients(state, {"x": x})
    wanted = jax.device_get(wanted(jax.device_get(state.params)))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    step = make_train_step(model, optax.sgd(1.0), "data=4,stage=2")
    with refuses("model.weight_sum_has_gradient", "stage=1", "microbatches=1"):
        step.compile({"x": x})


@pytest.mark.parametrize("line", ["data=1", "data=2", "stage=2"])
@pytest.mark.parametrize("seq", [8, 3])
def test_a_mask_without_the_examples_first_is_refused_on_every_layout(
    line, seq, refuses
):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(weighted(TokensFirst), ADAM, layout, devices=devices)
    batch = {"x": jax.ShapeDtypeStruct((8, seq, 4), jnp.float32)}
    with refuses("model.dropout_wrong_examples", "scope.dropout('turned')"):
        step.compile(batch)


def given_bytes(step, batch):
    arguments = step.audit_subject(batch, gradients_only=True).arguments
    return sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(arguments))


def compiled_bytes(step, batch):
    return audit(step.gradient_program, batch).memory.argument_bytes


@pytest.mark.parametrize("argument_bytes", [given_bytes, slow(compiled_bytes)])
def test_a_program_of_gradients_alone_takes_no_optimizer_state(argument_bytes):
    def bytes_in(param_dtype):
        line = f"fsdp=8,precision=bf16,param_dtype={param_dtype}"
        step = make_train_step(mlp_of(2), optax.sgd(1.0), line)
        return argument_bytes(step, batch_shapes(step.model, 8, seq=16))

    # Rounded at random there is no master copy, which gradients do not need.
    assert bytes_in("bf16") == bytes_in("bf16_stochastic")
