"""What a block's `update_state` reads, on every layout: sums, state, and parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Layout, batch_shapes, from_nnx, make_train_step
from meshpar.model.lora import LoRA
from meshpar.model.parameter import initial_values
from meshpar.model.tracing import loss_and_state
from meshpar.models.presets import build
from tests.marks import slow
from tests.test_nnx_refusals import INPUTS, SIZE, Ends

X = np.random.default_rng(0).normal(size=(8, SIZE)).astype(np.float32)
QUICK = {"xla_backend_optimization_level": 0}


def draw(rngs, *shape, axes=None):
    values = nnx.initializers.normal(0.3)(rngs.params(), shape)
    return nnx.Param(values, out_sharding=axes or (None,) * len(shape))


class Averaging(nnx.Module):
    """Keeps a running mean of one weight, and another's sums over its columns."""

    def __init__(self, rngs):
        self.v = draw(rngs, SIZE, SIZE, axes=("embed", "mlp"))
        self.w = draw(rngs, SIZE, SIZE)
        self.mean = nnx.Variable(jnp.ones((SIZE, SIZE)))
        self.columns = nnx.Variable(jnp.zeros(SIZE))

    def __call__(self, x, scope):
        return x + jnp.tanh(x @ self.v[...]) @ self.w[...]

    def update_state(self, sums):
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * self.w[...]
        self.columns[...] = self.v[...].sum(axis=0)


class Counting(Averaging):
    """Sums that are Python's numbers: of an auxiliary loss, and for the state."""

    def __call__(self, x, scope):
        return super().__call__(x, scope), {"z": float(len(x)), "rows": len(x)}

    def update_state(self, sums):
        self.columns[...] += sums["rows"]


def model(block=Averaging, **options):
    return from_nnx(ends=Ends, block=block, num_layers=3, inputs=INPUTS, **options)


def step_of(model, layout):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    return make_train_step(
        model, optax.sgd(0.1), layout, devices=devices, compiler_options=QUICK
    )


def expected(params):
    return {
        "mean": 0.5 + 0.5 * np.asarray(params["w"]),
        "columns": np.asarray(params["v"]).sum(axis=1),
    }


def check(found, params):
    for name, value in expected(params).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=2,tensor=2",
        *map(slow, ("data=1", "data=2,zero=1", "fsdp=2,stage=2,microbatches=2")),
    ],
)
def test_an_update_of_the_state_reads_the_parameters_before_the_step(layout):
    step = step_of(model(), layout)
    state = step.init(0)
    params = step.in_layer_order(jax.device_get(state.params))["blocks"]
    state, _ = step(state, {"x": X})
    check(step.in_layer_order(jax.device_get(state.model_state))["blocks"], params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["fsdp=2,stage=2,microbatches=2", *map(slow, ("data=1", "data=2,tensor=2"))],
)
def test_sums_that_are_pythons_numbers_count_as_arrays_do(layout):
    step = step_of(model(Counting, auxiliary={"z": 0.5}), layout)
    state = step.init(0)
    params, first = initial_values(model(), 0)
    plain, _ = loss_and_state(model(), params, {"x": X}, state=first)
    state, metrics = step(state, {"x": X})
    np.testing.assert_allclose(metrics["loss"], plain + 3 * 0.5, rtol=1e-6)
    columns = jax.device_get(state.model_state["blocks"]["columns"])
    np.testing.assert_array_equal(columns[:3], np.full((3, SIZE), len(X)))


def test_an_update_of_the_state_on_one_device_reads_the_parameters():
    params, state = initial_values(model(), 0)
    _, new = loss_and_state(model(), params, {"x": X}, state=state)
    check(new["blocks"], params["blocks"])


def test_an_update_of_the_state_reads_the_parameters_that_lora_adds_to():
    adapted = LoRA(rank=1, alpha=1.0, targets=("blocks.v",)).model(model())
    params, state = initial_values(adapted, 0)
    _, new = loss_and_state(adapted, params, {"x": X}, state=state)
    check(new["blocks"], model().init(0)["blocks"])


def test_nothing_is_gathered_that_an_update_of_the_state_does_not_read():
    class Unread(Averaging):
        def update_state(self, sums):
            self.mean[...] = 0.5 * self.mean[...]

    def gathers(block):
        step = step_of(model(block), "fsdp=2")
        batch = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
        with jax.set_mesh(step.mesh):
            traced = jax.jit(step.functions.update).trace(step.state_shapes, batch)
        return str(traced.jaxpr).count("all_gather[")

    assert gathers(Averaging) == gathers(Unread) + 2


@pytest.mark.slow
def test_an_update_of_the_state_that_reads_split_experts_is_refused(refuses):
    def update_from(params, state, sums):
        return jax.tree.map(lambda x: x + params["mlp"]["down"].sum(), state)

    model = build("tiny-moe")
    [group] = model.groups
    group = replace(group, update_state=None, update_from=update_from)
    step = step_of(replace(model, groups=(group,)), "expert=2")
    refusal = ("model.state_update_reads_split", "'blocks'", "'mlp.down'", "'expert'")
    with jax.set_mesh(step.mesh), refuses(*refusal):
        jax.eval_shape(step.functions.update, step.state_shapes, batch_shapes(2, 8))
