"""Matmuls in chunks of tokens compute the same, and hide what they send."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import absent_mesh, audit, batch_shapes, make_mesh, make_train_step
from meshpar.hardware import platforms
from meshpar.model.scope import Scope
from meshpar.models.presets import build
from meshpar.parallel import collective_matmul
from meshpar.parallel.pipeline.split_backward import split_program
from meshpar.parallel.tensor import column_parallel, row_parallel
from meshpar.rules.presets import TENSOR, TENSOR_SEQUENCE
from meshpar.trace.walk import equations
from tests import pipelined
from tests.pipelined import assert_equal_to_plain
from tests.test_audit_targets import needs_gpu_compiler
from tests.test_train_step import (
    assert_close,
    batch_of,
    gradients_of,
    model_of,
    plain,
)


@pytest.fixture
def chunks_on_cpu(monkeypatch):
    """Lets CPUs run matmuls in chunks, of one token at least; those that did."""
    seen = []
    made = collective_matmul.TokenMatmul

    def recorded(**fields):
        seen.append(made(**fields))
        return seen[-1]

    cpu = replace(platforms.PLATFORMS["cpu"], chunks_matmuls=True)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", cpu)
    monkeypatch.setattr(collective_matmul, "LEAST_TOKENS", 1)
    monkeypatch.setattr(collective_matmul, "TokenMatmul", recorded)
    return seen


HIDDEN = ("batch", "seq", "mlp")


def two_matmuls(x, up, down, scope):
    """An MLP, whose second matmul takes what the first returns."""
    axes = ("batch", "seq", None, "mlp")
    both = column_parallel("BTD,DPF->BTPF", x, up, axes, scope)
    hidden = jnp.tanh(both[:, :, 0]) * both[:, :, 1]
    return row_parallel("BTF,FD->BTD", hidden, down, HIDDEN, scope)


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("tensor", [2, 8])
def test_chunks_have_the_values_and_gradients_of_one_device(
    tensor, recomputed, chunks_on_cpu
):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 16, 6), (6, 2, 24), (24, 6), (2, 16, 6))
    x, up, down, of_y = map(jax.random.normal, keys, shapes)

    def value(scope, x, up, down):
        y = scope.constrain(
            two_matmuls(x, up, down, scope), ("batch", "residual_seq", "embed")
        )
        return jnp.sum(y * of_y), y

    gradients_in = jax.value_and_grad(value, argnums=(1, 2, 3), has_aux=True)
    (_, expected), gradients = gradients_in(Scope(), x, up, down)
    scope = Scope(rules=TENSOR_SEQUENCE, recomputed=recomputed)
    devices = jax.devices()[:tensor]
    with jax.set_mesh(make_mesh(f"tensor={tensor}", devices=devices)):
        run = jax.jit(lambda *arrays: gradients_in(scope, *arrays))
        text = run.lower(x, up, down).compile().as_text()
        (_, got), got_gradients = run(x, up, down)
    assert {how.keeps for how in chunks_on_cpu} == {recomputed}
    assert "collective-permute" in text and "all-gather" not in text
    assert jnp.allclose(got, expected, atol=1e-5)
    for one, other in zip(got_gradients, gradients, strict=True):
        assert jnp.allclose(one, other, atol=1e-5)


def chunks(shapes, axes, scope, *, mesh="tensor=8", dims="BTD,DF->BTF"):
    with jax.sharding.use_abstract_mesh(absent_mesh(mesh)):
        return collective_matmul.token_matmul(dims, shapes, axes, scope, column=True)


def test_matmuls_run_in_chunks_where_these_overlap_and_are_large_enough():
    gpu = Scope(rules=TENSOR_SEQUENCE, platform="gpu")
    large, weight = (1, 4096, 64), (64, 128)
    assert chunks((large, weight), HIDDEN, gpu).mesh_axis == "tensor"
    assert chunks(((1, 1024, 64), weight), HIDDEN, gpu) is None
    assert chunks(((1, 4097, 64), weight), HIDDEN, gpu) is None
    assert chunks((large, weight), HIDDEN, gpu, mesh="fsdp=8") is None
    assert chunks((large, weight), ("batch", "seq", None), gpu) is None
    for scope in (
        replace(gpu, platform="tpu"),
        replace(gpu, rules=TENSOR),
        replace(gpu, rules=None),
    ):
        assert chunks((large, weight), HIDDEN, scope) is None


def test_a_small_block_in_chunks_has_the_gradients_of_one_device(chunks_on_cpu):
    line = "data=2,tensor=2,sequence_parallel=true,remat=full"
    value, gradients = plain("llama", False)
    got_loss, got_gradients = gradients_of(model_of("llama"), line, batch_of())
    assert len(chunks_on_cpu) >= 4 and all(how.keeps for how in chunks_on_cpu)
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpt2", "data=2,tensor=4,sequence_parallel=true"),
        ("llama", "fsdp=4,tensor=2,sequence_parallel=true,remat=full,fsdp_prefetch=on"),
        ("llama", "data=4,tensor=2,sequence_parallel=true,remat=selective"),
        ("llama", "data=4,tensor=2,sequence_parallel=true,remat=dots"),
        ("llama", "data=2,context=2,tensor=2,sequence_parallel=true"),
    ],
)
def test_chunks_have_the_loss_and_gradients_of_one_device(name, line, chunks_on_cpu):
    value, gradients = plain(name, False)
    got_loss, got_gradients = gradients_of(model_of(name), line, batch_of())
    assert chunks_on_cpu
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "data=2,stage=2,tensor=2,microbatches=2",
        "data=2,stage=2,tensor=2,microbatches=4,schedule=zero_bubble_h1",
        "stage=2,tensor=2,fsdp=2,microbatches=2,schedule=zero_bubble_v,chunks=2,"
        "remat=full",
    ],
)
def test_chunks_in_stages_train_as_one_device_does(line, chunks_on_cpu):
    assert_equal_to_plain(pipelined.model_of(4), f"{line},sequence_parallel=true")
    assert chunks_on_cpu


def test_a_split_backward_leaves_matmuls_of_weights_for_later(chunks_on_cpu):
    scope = Scope(rules=TENSOR_SEQUENCE)

    def forward_and_backward(dy, *arrays):
        return jax.vjp(lambda *arrays: two_matmuls(*arrays, scope), *arrays)[1](dy)

    shapes = (2, 16, 6), (2, 16, 6), (6, 2, 24), (24, 6)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with jax.set_mesh(make_mesh("tensor=8")):
        program = jax.make_jaxpr(forward_and_backward)(*arguments)
    cut = split_program(program, [True, False, False], [False, True, True, True])
    names = [one.primitive.name for one in equations(cut.second)]
    assert names.count("dot_general") == 2 and "ppermute" not in names
    assert len(chunks_on_cpu) == 2


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "batch", "least"),
    [
        ("fsdp=8,tensor=8", 16, 0.7),
        ("data=2,stage=4,tensor=8,microbatches=8", 16, 0.7),
        ("data=2,stage=4,tensor=8,microbatches=16", 64, 0.7),
    ],
)
def test_gpus_hide_the_chunks_of_one_or_two_sequences(axes, batch, least):
    line = f"{axes},sequence_parallel=true,remat=full,precision=bf16"
    step = make_train_step(
        build("llama3-8b", layers=8), optax.adamw(1e-3), line, mesh=absent_mesh(line)
    )
    report = audit(step, batch_shapes(batch, 4096), target="gpu:h100:8x8")
    sends = [
        total
        for total in report.overlap()
        if total.mesh_axes == ("tensor",) and total.kind == "collective-permute"
    ]
    exposed_s = sum(total.exposed_s for total in sends)
    assert exposed_s <= (1 - least) * sum(total.wire_s for total in sends)
