"""Remat by name: what is kept, what is refused, and what it costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Input, Layout, Parameter, Scope, lint, make_train_step
from meshpar.audit.report import audit
from meshpar.layout.layout import ResidualNames
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import BlockGroup
from meshpar.model.tracing import batch_shapes, loss
from meshpar.models.presets import build
from meshpar.parallel.blocks import restore_vjp, vjp_without
from meshpar.parallel.remat import model_residual_names, rematerialised
from tests import pipelined
from tests.marks import slow
from tests.states import zeros_of
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler

SIZES = dict(layers=4, hidden=32, heads=4, vocab=64, max_seq=32)
GPT2 = build(**SIZES)
NAMES = (
    "attention_normed",
    "attention_qkv",
    "attention_mixed",
    "attention_out",
    "mlp_normed",
    "mlp_up",
    "mlp_hidden",
)


def step_of(line, model=GPT2):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(model, optax.sgd(1.0), layout, devices=devices)


def test_the_names_are_those_that_the_blocks_give():
    assert model_residual_names(GPT2) == NAMES
    llama = model_residual_names(build("test"))
    assert llama == tuple("mlp_gate_up" if name == "mlp_up" else name for name in NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "remat=save:attention_out/mlp_up",
        "data=2,remat=offload:mlp_hidden",
        "remat=save:mlp_up+offload:attention_qkv/attention_out,precision=bf16",
        "remat=offload:attention_qkv+save:mlp_up",
    ],
)
def test_a_line_with_names_is_parsed_and_printed_exactly(text):
    assert str(Layout.parse(text)) == text


def test_the_names_of_a_layout_are_plain_data():
    layout = Layout(remat="save:a/b+offload:c")
    assert layout.residual_names == ResidualNames(save=("a", "b"), offload=("c",))
    assert Layout(remat="full").residual_names is None


@pytest.mark.parametrize(
    ("remat", "refusal"),
    [
        ("save:", ("layout.no_residuals_named", "'save:'")),
        ("save:a//b", ("layout.no_residuals_named", "'save:a//b'")),
        ("keep:a", ("layout.no_residuals_named", "'keep:a'")),
        ("save:a+save:b", ("layout.repeated_remat_way", "'save'")),
        ("save:a/b+offload:b", ("layout.repeated_residual", "'b'")),
        ("save:a/a", ("layout.repeated_residual", "'a'")),
        ("ful", ("layout.unknown_value", "remat=ful", "none", "save:NAME/NAME")),
    ],
)
def test_another_text_is_refused(remat, refusal, refuses):
    with refuses(*refusal):
        Layout(remat=remat)


def test_an_unknown_name_is_refused_with_the_known_ones(refuses):
    known = ("'mlp_up'", "attention_mixed", "attention_normed", "mlp_up")
    with refuses("layout.unknown_residual", "'mlp_upp'", *known):
        step_of("remat=save:mlp_upp")
    report = lint(GPT2, Layout(remat="save:mlp_upp"), seq=16)
    assert [finding.path for finding in report.findings] == ["remat"]


def masked(params, x, scope):
    """A block that reads more than tokens."""
    return scope.save(x * params["w"] * scope.batch["mask"][..., None], "masked")


def test_a_model_that_needs_more_than_tokens_is_checked_when_it_is_traced(refuses):
    batch = {**batch_of(), "mask": np.ones((8, 16), np.float32)}
    step = step_of("remat=save:other", groups_of(masked, masked))
    with refuses("layout.unknown_residual", "'other'", "known: masked"):
        step(step.state_shapes, batch)


def test_a_model_that_needs_more_than_tokens_has_its_names_where_it_is_traced():
    batch = {**batch_of(), "mask": np.ones((8, 16), np.float32)}
    step = step_of("remat=save:masked", groups_of(masked, masked))
    assert np.isfinite(step(zeros_of(step), batch)[1]["loss"])


def groups_of(*blocks):
    """GPT-2's ends around a group of one block each."""
    weight = Parameter(
        shape=(32,),
        dtype=jnp.float32,
        logical_axes=(None,),
        initial=lambda key: 1 + jax.random.normal(key, (32,)),
        num_layers=1,
    )
    ends = {key: value for key, value in GPT2.parameters.items() if key != "blocks"}
    groups = {f"group_{index}": block for index, block in enumerate(blocks)}
    return dataclasses.replace(
        GPT2,
        inputs={**GPT2.inputs, "mask": Input(("batch", "seq"), optional=True)},
        parameters={**ends, **{name: {"w": weight} for name in groups}},
        groups=tuple(
            BlockGroup(name=name, num_layers=1, block=block)
            for name, block in groups.items()
        ),
    )


def named(name):
    return lambda params, x, scope: x + scope.save(jnp.tanh(x * params["w"]), name)


@pytest.mark.slow
def test_a_name_need_not_be_given_in_every_group_of_blocks():
    model = groups_of(named("dense"), named("router"))
    values = []
    for remat in ("none", "save:router"):
        step = step_of(f"data=2,remat={remat}", model)
        state = pipelined.state_of(step, model)
        values.append(float(step(state, batch_of())[1]["loss"]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_names_of_every_group_of_blocks_are_known(refuses):
    model = groups_of(named("dense"), named("router"))
    with refuses("layout.unknown_residual", "'routre'", "known: dense, router"):
        step_of("remat=save:routre", model)


def test_offload_is_refused_on_a_cpu_and_where_microbatches_wait(refuses):
    with refuses("layout.offload_on_cpu", "remat=save:mlp_up/mlp_hidden"):
        step_of("remat=save:mlp_up+offload:mlp_hidden")
    with refuses("layout.offload_in_ticks", "stage=1", "microbatches=1"):
        step_of("microbatches=2,remat=offload:mlp_up")


@functools.cache
def expected():
    params = jax.device_get(jax.jit(GPT2.init)(3))
    value_and_grad = jax.value_and_grad(lambda params: loss(GPT2, params, batch_of()))
    return jax.device_get(jax.jit(value_and_grad)(params))


def batch_of():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((8, 16)))


@pytest.mark.parametrize(
    "line",
    [
        "fsdp=2,tensor=2,sequence_parallel=true,remat=save:hidden",
        slow("stage=2,tensor=2,microbatches=2,remat=save:hidden"),
    ],
)
def test_keeping_a_name_of_a_small_block_changes_no_number(line):
    pipelined.assert_equal_to_plain(pipelined.mlp_of(4), line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "data=2,remat=save:attention_out/mlp_up",
        "fsdp=2,tensor=2,sequence_parallel=true,remat=save:attention_qkv",
        "stage=2,tensor=2,microbatches=2,remat=save:attention_mixed/mlp_hidden",
    ],
)
def test_keeping_some_names_changes_no_number(line):
    step = step_of(line)
    state = step.init(3)
    value, gradients = step.loss_and_gradients(state, batch_of())
    assert float(value) == pytest.approx(float(expected()[0]), rel=1e-5)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(
            got, wanted, rtol=1e-3, atol=1e-5
        ),
        step.in_layer_order(gradients),
        expected()[1],
    )


def two_matmuls(params, x, scope):
    return jnp.sin(scope.save(x @ params, "hidden")) @ params.T


@pytest.mark.parametrize("remat", ["save:hidden", "offload:hidden"])
def test_a_named_residual_is_kept_where_it_is_asked_for(remat):
    run = functools.partial(rematerialised(two_matmuls, remat), lambda _: Scope())
    weight, x = jnp.arange(12.0).reshape(3, 4) / 7, jnp.ones((2, 3))

    def forward(weight, x):
        value, residuals = vjp_without(
            lambda weight, x: run(weight, x, {}), (weight, x), (weight, x)
        )
        (hidden,) = residuals.kept
        assert hidden.shape == (2, 4)
        host = jax.typeof(hidden).memory_space != jax.typeof(x).memory_space
        assert host == remat.startswith("offload")
        return value, restore_vjp(residuals, (weight, x))(jnp.ones((2, 3)))

    value, gradients = jax.jit(forward)(weight, x)
    wanted, vjp = jax.vjp(lambda weight, x: two_matmuls(weight, x, Scope()), weight, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, gradients, vjp(jnp.ones((2, 3))))


def test_a_block_s_input_is_moved_to_the_host_and_nothing_else_is_kept():
    remat = "offload:block_input"
    run = functools.partial(rematerialised(two_matmuls, remat), lambda _: Scope())
    weight, x = jnp.arange(12.0).reshape(3, 4) / 7, jnp.ones((2, 3))

    def forward(weight, x):
        value, residuals = vjp_without(
            lambda weight, x: run(weight, x, {}), (weight, x), weight
        )
        (kept,) = residuals.kept
        assert kept.shape == x.shape
        assert jax.typeof(kept).memory_space != jax.typeof(x).memory_space
        return value, restore_vjp(residuals, weight)(jnp.ones((2, 3)))

    value, gradients = jax.jit(forward)(weight, x)
    wanted, vjp = jax.vjp(lambda weight, x: two_matmuls(weight, x, Scope()), weight, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, gradients, vjp(jnp.ones((2, 3))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("tpu:v5e:2x2", marks=needs_tpu_compiler),
        pytest.param("gpu:h100:1x4", marks=needs_gpu_compiler),
    ],
)
def test_an_accelerators_memory_is_less_by_what_moves_to_the_host(target):
    # Large beside a TPU's own memory (VMEM, 128 MiB), which small arrays go to.
    model = build(layers=16, hidden=256, heads=2, vocab=256, max_seq=256)
    used = {}
    for way in ("save", "offload"):
        layout = Layout.parse(f"data=2,tensor=2,remat={way}:mlp_up")
        step = make_train_step(model, optax.sgd(1.0), layout, mesh=absent_mesh(layout))
        report = audit(step, batch_shapes(64, 256), target=target)
        assert not report.problem
        used[way] = report.memory.peak_bytes
    kept = 16 * 64 // 2 * 256 * 4 * 256 // 2 * 4  # layers, batch, seq, mlp, fp32
    assert used["save"] - used["offload"] == pytest.approx(kept, rel=0.3)
