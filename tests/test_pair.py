"""Pairs that devices share train as whole ones, and are never gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, Rules, Scope, audit, lint, make_mesh, make_train_step
from meshpar.models.presets import build, configure
from meshpar.parallel.grids.pairs import (
    triangle_attention,
    triangle_product,
    whole_lines,
)
from tests.kept_gradients import KEEPING
from tests.states import normal_values, with_parameters
from tests.test_afno import audited
from tests.test_zoo import BOUND, errors, flat
from tests.zoo import pairs
from tests.zoo.beside import deviating, plain_loss_and_gradients, plain_run, step_of

ENTRIES = {
    "both": pairs.BOTH,
    "whole": pairs.WHOLE,
    "rows_over_two": pairs.ROWS_OVER_TWO,
}
plain = plain_run(pairs.BOTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [
        ("both", "data=2,context=2,tensor=2"),
        ("both", "context=2,tensor=4,remat=full"),
        ("both", "tensor=8"),
        ("both", "fsdp=2,context=4"),
        ("both", "fsdp=2,context=2,tensor=2,remat=selective"),
        ("rows_over_two", "data=2,context=2,tensor=2,microbatches=2"),
        ("whole", "data=8"),
        ("whole", "fsdp=8"),
        ("whole", "data=2,stage=2,microbatches=4"),
        ("whole", "fsdp=2,stage=2,tensor=2,microbatches=4,schedule=1f1b"),
    ],
)
@pytest.mark.filterwarnings("ignore::meshpar.IdleMeshAxisWarning")
def test_a_model_of_pairs_trains_as_plain_flax_and_optax_train_it(name, layout):
    assert not deviating(ENTRIES[name], layout, plain())


@pytest.mark.slow
def test_a_step_has_plain_gradients_and_gathers_some_bias_at_a_time_and_no_pairs(
    monkeypatch,
):
    layout = "data=2,context=2,tensor=2"
    step = step_of(pairs.BOTH, layout, layers=1, optimizer=KEEPING)
    report, program = audited(step, pairs.batch(), monkeypatch)
    assert not report.surprises
    gathered = [row for row in report.rows if row.collective.kind == "all-gather"]
    assert {row.reason for row in gathered} == {
        "asked by a triangle: some of all pairs' bias"
    }
    own_pairs = 4 * pairs.RESIDUES**2 // 4 * pairs.EMBED
    bytes_of_pairs = own_pairs * len(pairs.batch()["tokens"]) // 2
    assert all(row.collective.payload_bytes <= bytes_of_pairs for row in gathered)
    assert not deviating_gradients(step, program)


def deviating_gradients(step, program):
    """What of a step is not within the bound of the plain modules."""
    params = normal_values(step.state_shapes.params, scale=0.25)
    state = with_parameters(step, params)
    state, metrics = program(state, step.place(pairs.batch()))
    value, wanted = plain_loss_and_gradients(pairs.BOTH, flat(params))
    deviations = {"loss": abs(float(metrics["loss"]) / value - 1)}
    deviations |= errors(flat(step.in_layer_order(state.opt_state[0])), wanted)
    return {what: error for what, error in deviations.items() if not error <= BOUND}


def temp_bytes(layout, residues):
    layout = Layout.parse(layout)
    step = make_train_step(
        build("tiny-pair", residues=residues),
        optax.sgd(1e-3),
        layout,
        devices=jax.devices()[: layout.num_devices],
    )
    pairs = (1, residues, residues)
    batch = {
        "tokens": jax.ShapeDtypeStruct(pairs[:2], jnp.int32),
        "distances": jax.ShapeDtypeStruct(pairs, jnp.int32),
        "weights": jax.ShapeDtypeStruct(pairs, jnp.float32),
    }
    return audit(step, batch).compiled_memory.temp_bytes


@pytest.mark.slow
def test_a_devices_memory_goes_with_its_share_of_the_pairs():
    """Twice the residues are four times the pairs, and as many on each of 4 P."""
    base = temp_bytes("context=2,remat=full", 32)
    assert temp_bytes("context=2,remat=full", 64) < 1.1 * 4 * base
    assert temp_bytes("context=2,tensor=4,remat=full", 64) < 1.2 * base


@pytest.mark.parametrize(
    "size, channels, split, refusal",
    [
        (8, 6, {"pair_columns": "tensor"}, ("layout.indivisible", 6, 4)),
        (
            4,
            8,
            {"pair_rows": "context", "pair_columns": "tensor"},
            ("layout.indivisible", 4, 8, "context x tensor"),
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(refuses, size, channels, split, refusal):
    rules = Rules({"batch": None, "pair_rows": None, "pair_columns": None, **split})
    z, scope = jnp.ones((1, size, size, channels)), Scope(rules=rules)
    with jax.set_mesh(make_mesh(Layout(context=2, tensor=4))), refuses(*refusal):
        triangle_product(z, z, scope, outgoing=True)
        whole_lines(z, scope, "row")


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"layers": 0}, ("value.below_one", "layers=0", 1)),
        ({"ffn": -1}, ("value.negative", "ffn=-1", 0, 4, "embed")),
        ({"channels": 1.5}, ("value.not_whole_number", "channels=1.5")),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(refuses, changes, refusal):
    with refuses(*refusal):
        configure("tiny-pair", **changes)


@pytest.mark.parametrize("preset", ["tiny-pair", "evoformer-pair"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    found = lint(build(preset), Layout.parse("fsdp=2,context=2,tensor=2"))
    assert found.findings == ()


def test_attention_in_turns_is_attention_at_once():
    """More devices than a head has values: the bias comes in several turns."""
    rng = np.random.default_rng(0)
    split = {"pair_rows": ("context", "tensor"), "pair_columns": None, "batch": None}
    q, k, v, gate = rng.normal(size=(4, 1, 16, 16, 2, 2)).astype(np.float32)
    gate_bias = rng.normal(size=(2, 2)).astype(np.float32)
    bias = rng.normal(size=(1, 16, 16, 2)).astype(np.float32)
    scores = np.einsum("bijhd,bikhd->bijkh", q, k) / 2**0.5 + bias[:, None]
    wanted = jnp.einsum("bijkh,bikhd->bijhd", jax.nn.softmax(scores, axis=3), v)
    wanted = wanted * jax.nn.sigmoid(gate + gate_bias)
    with jax.set_mesh(make_mesh(Layout(context=2, tensor=4))):
        scope = Scope(rules=Rules(split))
        found = jax.jit(
            lambda *arrays: triangle_attention(*arrays, scope, "row"),
        )(q, k, v, gate, gate_bias, bias)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_what_all_devices_have_is_summed_in_fp32():
    """XLA:CPU aborts on sums of 16 bits in a region that is manual over some axes."""
    rng = np.random.default_rng(1)
    split = {"pair_rows": "context", "pair_columns": None, "batch": None}
    *qkvg, start = rng.normal(size=(5, 1, 8, 8, 2, 2)).astype(jnp.bfloat16)
    gate_bias = np.zeros((2, 2), jnp.bfloat16)
    bias = np.zeros((1, 8, 8, 2), jnp.bfloat16)

    def of(scope):
        def total(gate_bias):
            out = triangle_attention(*qkvg, gate_bias, bias, scope, "row")
            return jnp.sum(out.astype(jnp.float32) * start)

        return jax.jit(jax.grad(total))(gate_bias)

    with jax.set_mesh(make_mesh(Layout(context=4, tensor=2))):
        found = of(Scope(rules=Rules(split), platform="cpu"))
    np.testing.assert_allclose(
        found.astype(np.float32), of(Scope()).astype(np.float32), rtol=2e-2, atol=2e-2
    )
