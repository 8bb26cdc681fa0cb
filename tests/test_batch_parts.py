"""Blocks in parts of the batch train the same model, and hide their communication."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from meshpar import absent_mesh, audit, batch_shapes, make_train_step
from meshpar.hardware import platforms
from meshpar.model import block_run
from meshpar.model.block_run import num_batch_parts
from meshpar.model.parameter import is_parameter
from meshpar.model.scope import Scope
from meshpar.model.tracing import loss
from meshpar.models.presets import build
from meshpar.parallel.reduction import random_key
from meshpar.rules.presets import DATA_PARALLEL, TENSOR_SEQUENCE
from tests import pipelined
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler
from tests.test_train_step import (
    BATCH,
    SEQ,
    assert_close,
    batch_of,
    gradients_of,
    model_of,
    plain,
    small_ids,
)
from tests.zoo.batch_statistics import BATCH_NORM


@pytest.fixture
def parts_on_cpu(monkeypatch):
    """Lets CPUs take parts, of one token at least; the numbers of parts that ran."""
    taken = []
    split = block_run._part

    def seen(tree, at, num_parts):
        taken.append(num_parts)
        return split(tree, at, num_parts)

    cpu = replace(platforms.PLATFORMS["cpu"], max_batch_parts=4)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", cpu)
    monkeypatch.setattr(platforms, "LEAST_TOKENS", 1)
    monkeypatch.setattr(block_run, "_part", seen)
    return taken


FULL_REMAT = "data=2,tensor=2,sequence_parallel=true,remat=full"


def test_parts_of_a_small_block_have_the_gradients_of_one_device(parts_on_cpu):
    pipelined.assert_equal_to_plain(pipelined.mlp_of(2), FULL_REMAT)
    assert set(parts_on_cpu) == {4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "num_parts"),
    [
        (FULL_REMAT, 4),
        ("fsdp=4,tensor=2,sequence_parallel=true", 2),
        ("data=2,stage=2,tensor=2,microbatches=2,sequence_parallel=true", 2),
    ],
)
def test_parts_have_the_loss_and_gradients_of_one_device(line, num_parts, parts_on_cpu):
    value, gradients = plain("llama", False)
    got_loss, got_gradients = gradients_of(model_of("llama"), line, batch_of())
    assert set(parts_on_cpu) == {num_parts}
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    if "stage" not in line:
        assert_close(got_gradients, gradients)


@pytest.mark.slow
def test_each_example_draws_the_same_numbers_in_parts(parts_on_cpu):
    model = build(layers=2, hidden=32, heads=4, vocab=64, max_seq=SEQ, dropout=0.3)
    scope = Scope(
        examples=jnp.arange(BATCH, dtype=jnp.uint32),
        random=random_key(jnp.uint32(3), jnp.int32(0)),
        training=True,
    )
    expected = float(loss(model, pipelined.params_of(model), small_ids(), scope))
    line = "data=2,tensor=2,sequence_parallel=true"
    got, _ = gradients_of(model, line, small_ids())
    assert set(parts_on_cpu) == {4}
    assert got == pytest.approx(expected, rel=1e-5)


def scope_on(platform="gpu", rules=TENSOR_SEQUENCE):
    return Scope(rules=rules, platform=platform)


def parts(examples, seq, scope, *, mesh="tensor=8"):
    stream = jax.ShapeDtypeStruct((examples, seq, 64), jnp.float32)
    with jax.sharding.use_abstract_mesh(absent_mesh(mesh)):
        return num_batch_parts(stream, scope)


def test_parts_divide_the_examples_and_keep_their_tokens():
    assert parts(8, 2048, scope_on("tpu")) == 4
    assert parts(6, 2048, scope_on("tpu")) == 3
    assert parts(7, 2048, scope_on("tpu")) == 1
    assert parts(8, 512, scope_on("tpu")) == 2
    assert parts(8, 4096, scope_on()) == 4
    assert parts(8, 2048, scope_on()) == 2
    assert parts(2, 4096, scope_on()) == 1
    assert parts(1, 65536, scope_on()) == 1
    assert parts(8, 2048, scope_on("cpu")) == 1
    assert parts(8, 2048, scope_on(rules=DATA_PARALLEL)) == 1
    assert parts(8, 2048, scope_on(rules=None)) == 1
    assert parts(8, 2048, scope_on(), mesh="fsdp=8") == 1


def test_a_block_that_sums_over_the_batch_is_not_taken_apart(parts_on_cpu):
    def run(params, stream, scope):
        return stream - scope.batch_sum(jnp.sum(stream)), {"rows": jnp.float32(1)}

    x = jnp.ones((4, 8, 2))
    with jax.sharding.use_abstract_mesh(absent_mesh("tensor=8")):
        scope = scope_on("cpu")
        assert num_batch_parts(x, scope) == 4
        y, sums = block_run.in_parts(run, {}, x, scope)
        assert float(y[0, 0, 0]) == 1 - x.size and sums == {"rows": 1}
        _, sums = block_run.in_parts(
            lambda p, x, s: (x, run(p, x, Scope())[1]), {}, x, scope
        )
    assert sums == {"rows": 4}


@pytest.mark.parametrize("collective", [lax.pmean, lax.all_gather])
def test_a_block_with_a_collective_over_the_batch_is_not_taken_apart(
    collective, parts_on_cpu
):
    """A user's own, which no `batch_sum` tells of: each part would have another."""

    def run(params, stream, scope):
        seen = collective(jnp.mean(stream), "data")
        return stream - jnp.mean(seen), {}

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    both = jax.shard_map(
        lambda x: block_run.in_parts(run, {}, x, scope_on("cpu"))[0],
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        x = jax.random.normal(jax.random.key(0), (8, 8, 2))
        assert jnp.allclose(jax.jit(both)(x), x - jnp.mean(x), atol=1e-6)
    assert not parts_on_cpu


def test_a_block_with_a_batch_norm_is_not_taken_apart(parts_on_cpu):
    """Its statistics are of the batch; parts would have each its own, and their sum."""
    model = BATCH_NORM.model(1)
    group = model.groups[0]
    scope = replace(
        scope_on("cpu"), training=True, state=_ones(model.state[group.name])
    )
    x = jnp.ones((4, 8))
    with jax.sharding.use_abstract_mesh(absent_mesh("tensor=8")):
        assert num_batch_parts(x, scope) == 4
        group.run(_ones(model.parameters[group.name]), x, scope)
    assert not parts_on_cpu


def _ones(tree):
    """One layer's arrays of those declared, all ones."""
    return jax.tree.map(lambda one: jnp.ones(one.shape), tree, is_leaf=is_parameter)


def share_hidden(axes, seq, target):
    """Return the hidden share of the seconds on `tensor`, for 256 sequences."""
    line = f"{axes},sequence_parallel=true,remat=full,precision=bf16"
    step = make_train_step(
        build("llama3-8b"), optax.adamw(1e-3), line, mesh=absent_mesh(line)
    )
    report = audit(step, batch_shapes(256, seq), target=target, timeout_s=3000)
    rows = [total for total in report.overlap() if total.mesh_axes == ("tensor",)]
    exposed_s = sum(total.exposed_s for total in rows)
    return 1 - exposed_s / sum(total.wire_s for total in rows)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "seq", "least"),
    [
        ("data=8,tensor=8", 2048, 0.7),
        ("data=8,tensor=8", 8192, 0.6),
        ("fsdp=8,tensor=8", 2048, 0.55),
        ("fsdp=8,tensor=8", 8192, 0.6),
    ],
)
def test_gpus_hide_sequence_parallelism_behind_matmuls(axes, seq, least):
    assert share_hidden(axes, seq, "gpu:h100:8x8") >= least


@needs_tpu_compiler
@pytest.mark.slow
def test_tpus_hide_sequence_parallelism_of_long_sequences():
    assert share_hidden("fsdp=8,tensor=8", 8192, "tpu:v5p:4x4x4") >= 0.6
