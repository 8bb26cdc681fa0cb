"""ZeRO 0 to 3: what devices hold, what moves, and that no number changes."""

import functools
from collections import Counter

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, audit, lint, make_train_step
from meshpar.audit.hlo import parse_program
from meshpar.models.presets import build
from meshpar.testing.equivalence import quick_compile_options
from tests.marks import slow
from tests.pipelined import mlp_of

MODEL = mlp_of(2)
NUM_PARAMETERS = MODEL.num_parameters
BATCH, SEQ = 8, 16
DEGREES = [slow(2), 4, slow(8)]


def batch_of(seed, batch=BATCH):
    tokens = np.random.default_rng(seed).integers(0, 64, (batch, SEQ + 1))
    weights = np.ones((batch, SEQ), np.float32)
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


def step_of(line, **options):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(
        MODEL,
        optax.adam(1e-3),
        layout,
        devices=devices,
        compiler_options=quick_compile_options("cpu"),
        **options,
    )


def carried_bytes(compiled):
    """What the compiled loop over microbatches carries from one to the next."""
    return max(
        instruction.bytes
        for computation in parse_program(compiled.as_text()).computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
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
@pytest.mark.parametrize("zero", [1, slow(2), slow(3)])
@pytest.mark.parametrize("axis", ["fsdp", slow("data")])
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
    ("zero", "split"),
    [slow(0, ()), slow(1, "mp"), (2, "mgp"), slow(3, "mgp")],
)
def test_states_take_the_bytes_of_the_zero_paper(zero, split, degree):
    """2 bytes of parameters, 2 of gradients and 12 of Adam with its master copy.

    But ZeRO-1 and 2 have whole parameters during a step only.
    """
    line = f"fsdp={degree},zero={zero},microbatches=2,precision=bf16,param_dtype=bf16"
    if zero == 3:
        line += ",fsdp_gather=microbatch"
    part = {name: degree if name in split else 1 for name in "pgm"}
    batch = batch_of(0, 2 * degree)
    wide, narrow = (
        step_of(line, gradient_dtype=dtype).compile(batch) for dtype in ("fp32", "bf16")
    )
    arguments = narrow.memory_analysis().argument_size_in_bytes
    states = arguments - sum(array.size * 4 // degree for array in batch.values())
    expected = NUM_PARAMETERS * (2 / part["p"] + 12 / part["m"])
    assert states == pytest.approx(expected, rel=0.01)
    # All that `gradient_dtype` changes there is the gradients: 4 bytes a value, or 2.
    gradients = carried_bytes(wide) - carried_bytes(narrow)
    expected = NUM_PARAMETERS * 2 / part["g"]
    # XLA may keep one of them out of what its loop carries, or carry a small one twice.
    assert 0.9 * expected <= gradients <= 1.1 * expected


@functools.cache
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


@pytest.mark.parametrize("axis", ["fsdp", slow("data")])
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


def test_a_size_that_does_not_divide_is_split_along_another_dim():
    model = build(
        layers=2, hidden=36, heads=2, kv_heads=2, ffn=64, vocab=64, gated=True
    )
    report = lint(model, Layout.parse("fsdp=8"))
    notes = {note.path: note.message for note in report.notes}
    assert "'embed' does not divide" in notes["blocks.mlp.down"]
    assert {note.kind for note in report.notes} == {"moved", "replicated"}
    rows = {row.path: row.mesh_axes for row in report.parameters}
    assert rows["blocks.mlp.down"] == (None, "fsdp", None)
