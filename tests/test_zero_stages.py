"""ZeRO 0 to 3: what devices hold, what moves, and that no number changes."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from meshpar import InputError, Layout, audit, lint, make_train_step
from meshpar.parallel.zero import is_stored
from meshpar.testing.quick_compile import quick_compile_options
from meshpar.train.optimizer_state import LARGE_BYTES
from meshpar.train.precision import stochastic_round
from models.presets import build

MODEL = build(layers=2, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=64, gated=True)
NUM_PARAMETERS = MODEL.num_parameters
BATCH, SEQ = 8, 16
DEGREES = [
    pytest.param(2, marks=pytest.mark.slow),
    4,
    pytest.param(8, marks=pytest.mark.slow),
]


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(0, 64, (BATCH, SEQ + 1))
    weights = np.ones((BATCH, SEQ), np.float32)
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


def step_of(line, optimizer=None, model=MODEL, **options):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    optimizer = optimizer or optax.adam(1e-3)
    options = {"compiler_options": quick_compile_options("cpu"), **options}
    return make_train_step(model, optimizer, layout, devices=devices, **options)


def gradient_bytes(step):
    """Of one device, while a step adds gradients up."""
    placement = step.placement
    return sum(
        np.prod(sharding.shard_shape(shape.shape)) * 2
        for shape, sharding in zip(
            jax.tree.leaves(step.state_shapes.params),
            (
                NamedSharding(step.mesh, stored.gradient_spec)
                for stored in jax.tree.leaves(placement.stored, is_leaf=is_stored)
            ),
            strict=True,
        )
    )


def after_five_steps(line):
    step = step_of(line)
    state, losses = step.init(0), []
    for seed in range(5):
        state, metrics = step(state, batch_of(seed))
        losses.append(float(metrics["loss"]))
    return np.array(losses), step.in_layer_order(state.params)


@pytest.fixture(scope="module")
def zero_0():
    """Five steps of ZeRO-0 on each number of devices asked for, made once."""
    made = {}

    def of(degree):
        if degree not in made:
            made[degree] = after_five_steps(f"fsdp={degree},zero=0")
        return made[degree]

    return of


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_five_steps_are_those_of_zero_0(axis, zero, degree, zero_0):
    if (axis, zero) == ("data", 3):
        pytest.skip("devices that split parameters are called fsdp")
    losses, params = after_five_steps(f"{axis}={degree},zero={zero}")
    expected_losses, expected = zero_0(degree)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for one, other in zip(
        jax.tree.leaves(params), jax.tree.leaves(expected), strict=True
    ):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(
    ("zero", "split"), [(0, ()), (1, ("m",)), (2, ("m", "g")), (3, ("m", "g", "p"))]
)
def test_states_take_the_bytes_of_the_zero_paper(zero, split, degree):
    """2 bytes of parameters, 2 of gradients and 12 of Adam with its master copy."""
    line = f"fsdp={degree},zero={zero},microbatches=2,precision=bf16,param_dtype=bf16"
    if zero == 3:
        line += ",fsdp_gather=microbatch"
    step = step_of(line, gradient_dtype="bf16")
    part = {name: degree if name in split else 1 for name in "pgm"}
    batch = batch_of(0)
    arguments = step.compile(batch).memory_analysis().argument_size_in_bytes
    states = arguments - sum(array.size * 4 // degree for array in batch.values())
    expected = NUM_PARAMETERS * (2 / part["p"] + 12 / part["m"])
    assert states == pytest.approx(expected, rel=0.01)
    expected = NUM_PARAMETERS * 2 / part["g"]
    assert gradient_bytes(step) == pytest.approx(expected, rel=0.01)


def moved(line):
    """Kind -> bytes on the wire of parameters and gradients, over the batch axes."""
    report = audit(step_of(line), batch_of(0))
    assert not [row for row in report.rows if row.surprise]
    wire = Counter()
    for row in report.rows:
        if "gradient_norm" in row.collective.op_path:
            continue
        if row.collective.payload_bytes > 64:
            row = row.collective
            wire[row.kind] += row.wire_bytes * row.executions
    return wire


@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_zero_1_and_2_move_no_more_than_one_all_reduce(axis):
    all_reduce = moved(f"{axis}=4,zero=0")
    assert set(all_reduce) == {"all-reduce"}
    for zero in (1, 2):
        wire = moved(f"{axis}=4,zero={zero}")
        assert set(wire) == {"reduce-scatter", "all-gather"}
        assert wire["reduce-scatter"] == wire["all-gather"]
        assert wire.total() <= all_reduce.total()


def test_zero_3_moves_half_as_much_again():
    all_reduce, wire = moved("fsdp=4,zero=0"), moved("fsdp=4")
    blocks = sum(
        parameter.num_layers * np.prod(parameter.shape)
        for parameter in MODEL.flat_parameters().values()
        if parameter.num_layers
    )
    # The ends are gathered once, for both passes.
    ends = NUM_PARAMETERS - blocks
    expected = (3 * blocks + 2 * ends) / (2 * NUM_PARAMETERS)
    assert wire.total() == pytest.approx(expected * all_reduce.total(), rel=0.01)
    assert wire["all-gather"] == pytest.approx(
        wire["reduce-scatter"] * (2 * blocks + ends) / NUM_PARAMETERS, rel=0.01
    )


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "lion": optax.lion(1e-4),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "masked": optax.masked(
        optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 2, tree)
    ),
    "two optimizers": optax.multi_transform(
        {"matrix": optax.adamw(1e-3), "vector": optax.sgd(1e-2, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 2 else "vector", tree),
    ),
    "scheduled": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_any_optimizer_follows_its_parameter(name):
    """As on one device after two steps, and nothing large is whole."""
    step = step_of("fsdp=4,zero=2", OPTIMIZERS[name])
    alone = step_of("data=1", OPTIMIZERS[name])
    params = []
    for one in (step, alone):
        state = one.init(0)
        for seed in range(2):
            state, _ = one(state, batch_of(seed))
        params.append(one.in_layer_order(state.params))
    for one, other in zip(*map(jax.tree.leaves, params), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
    for leaf, sharding in zip(
        jax.tree.leaves(step.state_shapes.opt_state),
        jax.tree.leaves(step.shardings.opt_state),
        strict=True,
    ):
        assert leaf.size <= 256 or not sharding.is_fully_replicated, (leaf, sharding)


@pytest.mark.parametrize("line", ["fsdp=4", "data=2,zero=1", "tensor=2"])
def test_large_state_of_no_parameter_is_refused_where_states_are_split(line):
    model = build("test", vocab=4096)
    size = model.num_parameters
    assert size * 4 < LARGE_BYTES
    flat = optax.flatten(optax.adam(1e-3))
    step_of(line, flat, model)
    model = build("test", vocab=8192)
    size = model.num_parameters
    match = re.escape(
        f"optimizer state '0.mu' of shape ({size},) lies at no parameter's path, so "
        f"its {size * 4:,} bytes would be whole on every device (limit 1,048,576)"
    )
    with pytest.raises(InputError, match=match):
        step_of(line, flat, model)
    step_of("data=2", flat, model)


def test_gradients_that_are_not_finite_change_nothing_and_are_counted():
    step = step_of("fsdp=4,zero=1")
    state = step.init(0)
    before = jax.device_get((state.params, state.opt_state))
    weights = np.full((BATCH, SEQ), np.inf, np.float32)
    state, metrics = step(state, {**batch_of(0), "weights": weights})
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.opt_state)),
        before,
    )
    assert (int(state.step), int(metrics["skipped"])) == (1, 1)
    state, metrics = step(state, batch_of(0))
    assert (int(state.step), int(metrics["skipped"])) == (2, 1)
    assert np.isfinite(metrics["loss"])


def test_a_size_that_does_not_divide_is_split_along_another_dim():
    model = build(
        layers=2, hidden=36, heads=4, kv_heads=4, ffn=64, vocab=64, gated=True
    )
    report = lint(model, Layout.parse("fsdp=8"))
    notes = {note.path: note.message for note in report.notes}
    assert "'embed' does not divide" in notes["blocks.mlp.down"]
    assert {note.kind for note in report.notes} == {"moved", "replicated"}
    rows = {row.path: row.mesh_axes for row in report.parameters}
    assert rows["blocks.mlp.down"] == (None, "fsdp", None)


def test_rounding_at_random_keeps_the_mean_and_what_needs_no_rounding():
    value = jnp.full((1 << 16,), 1 + 2**-10)  # a quarter of the way to the next bf16
    rounded = stochastic_round(value, jax.random.key(0)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1, 1 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-10, abs=2**-7 / 256 * 3)
    exact = jnp.asarray([0.0, -1.5, jnp.inf, jnp.nan, 2.0**-126])
    np.testing.assert_array_equal(
        stochastic_round(exact, jax.random.key(0)).astype(jnp.float32), exact
    )


def test_random_rounding_does_not_depend_on_the_layout():
    params = []
    for line in ("data=2", "fsdp=2,zero=3", "stage=2,microbatches=2"):
        step = step_of(
            line + ",precision=bf16,param_dtype=bf16_stochastic", optax.sgd(0)
        )
        state, _ = step(step.init(0), batch_of(0))
        params.append(jax.tree.leaves(step.in_layer_order(state.params)))
    for leaves in params[1:]:
        for one, other in zip(leaves, params[0], strict=True):
            np.testing.assert_array_equal(one, other)


def test_optimizer_state_in_the_hosts_memory_stays_there_and_changes_no_number():
    steps = [step_of("fsdp=4"), step_of("fsdp=4,optimizer_memory=host")]
    states = []
    for step in steps:
        state = step.init(0)
        for seed in range(2):
            state, _ = step(state, batch_of(seed))
        states.append(state)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(states[1].opt_state)
        if leaf.ndim
    }
    assert kinds == {"pinned_host"}
    assert jax.tree.leaves(states[1].params)[0].sharding.memory_kind != "pinned_host"
