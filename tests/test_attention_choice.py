"""Which attention runs where: the program and the planner choose alike, and say why."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import Layout, Scope, make_train_step
from meshpar.hardware.attention_kernels import (
    OBSTACLES,
    AttentionRequest,
    attention_choice,
    obstacle_words,
)
from meshpar.machine.mesh import absent_mesh, use_mesh
from meshpar.model.tracing import batch_shapes
from meshpar.models.layers.attention import attend
from meshpar.models.llama import LlamaConfig, llama
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import SHAPES
from meshpar.train.step import TrainStep

TPU = AttentionRequest(platform="tpu", half=True, queries=256, keys=256, head_dim=128)
A100, H100 = ({"platform": "gpu", "capability": one} for one in (8.0, 9.0))


@pytest.mark.parametrize(
    "change, obstacle, words",
    [
        ({}, "", "attention runs in one kernel (splash)"),
        ({"documents": True, "window": True}, "", "one kernel (splash)"),
        ({"method": "ulysses"}, "", "one kernel (splash)"),
        ({"half": False}, "dtype", "without splash: the kernel takes bf16"),
        ({"method": "ring", "chunks": 2}, "", "one kernel (splash)"),
        ({"method": "ring", "chunks": 4}, "length", "128 tokens at a time, not 64"),
        ({"method": "ring", "window": True}, "window", "no sliding window"),
        ({"method": "ring", "chunks": 2, "in_order": True}, "order", "own order"),
        ({"method": "ulysses", "in_order": True}, "", "one kernel (splash)"),
        ({"method": "allgather"}, "method", "attention=allgather merges softmaxes"),
        ({"method": "ring", "platform": "gpu"}, "method", "attention=ring merges"),
        ({"keys": 200}, "length", "a multiple of 128 tokens at a time, not 200"),
        ({"head_dim": 100}, "head_dim", "not 100"),
        ({"hidden": True}, "hidden", "keys that all queries leave out"),
        ({"padded": True}, "padding", "padded to divide over context"),
        ({"idle_axis": "tensor"}, "mesh_axis", "mesh axis 'tensor' splits neither"),
        ({"platform": "gpu"}, "", "one kernel (cudnn)"),
        ({"platform": "gpu", "documents": True}, "documents", "without cudnn: it"),
        ({"platform": "gpu", "window": True}, "window", "no sliding window"),
        (
            {"platform": "gpu", "head_dim": 100},
            "head_dim",
            "cudnn: it takes heads of a",
        ),
        ({"platform": "gpu", "head_dim": 256}, "large_heads", "9.0 on, not 256"),
        ({**A100, "head_dim": 192}, "large_heads", "heads of up to 128 values"),
        ({**H100, "head_dim": 256}, "", "one kernel (cudnn)"),
        ({**H100, "head_dim": 264}, "large_heads", "not 264"),
        ({"head_dim": 256}, "", "one kernel (splash)"),
        ({"platform": "gpu", "absent": True}, "absent", "no such device is here"),
        ({"platform": "cpu"}, "", ""),
    ],
)
def test_a_kernel_is_taken_within_its_limits_or_the_limit_is_named(
    change, obstacle, words
):
    choice = attention_choice(dataclasses.replace(TPU, **change))
    assert choice.obstacle == obstacle
    assert words in choice.words and "{" not in choice.words
    assert bool(choice.kernel) == (not obstacle and change.get("platform") != "cpu")
    path = f"jit(step)/transpose(jvp({choice.scope_name}))/while/body/dot_general"
    assert obstacle_words(path) == (choice.words if obstacle else "")


def test_a_path_of_others_says_nothing():
    assert not obstacle_words("jit(step)/no.such.name/dot_general")
    assert not obstacle_words("jit(no)/no/dot_general")
    assert set(OBSTACLES) >= {"dtype", "method", "length", "head_dim"}


def runs_kernel(*, head_dim, seq, dtype, **options):
    """Whether the program has a Pallas call, as traced for TPUs."""
    shape = jax.ShapeDtypeStruct((1, seq, 2, head_dim), dtype)
    scope = Scope(platform="tpu")
    traced = jax.make_jaxpr(lambda *x: attend(*x, scope, causal=True, **options))
    return "pallas_call" in str(traced(shape, shape, shape))


@pytest.mark.parametrize("head_dim, seq", [(64, 256), (128, 200), (100, 256)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_planner_counts_the_kernel_that_the_program_takes(head_dim, seq, precision):
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    workload = dataclasses.replace(SHAPES["llama3-8b"], head_dim=head_dim)
    found = estimate(
        workload,
        cluster_of("tpu v5e:2x2"),
        f"fsdp=4,precision={precision}",
        global_batch=4,
        seq=seq,
    )
    taken = runs_kernel(head_dim=head_dim, seq=seq, dtype=dtype)
    assert found.run.fused_attention == taken
    assert taken == ((head_dim, seq, precision) == (64, 256, "bf16"))
    assert found.as_json()["attention"] == found.run.attention.words
    assert found.run.attention.words


@pytest.mark.slow
def test_logits_under_a_ring_run_in_tiles_where_training_runs_the_kernel():
    """They have tokens in the sequence's own order, and the kernels' ring zigzag."""
    sizes = dict(layers=1, embed=64, heads=1, kv_heads=1, ffn=64, vocab=64)
    layout = Layout.parse("context=2,precision=bf16")
    step = make_train_step(
        llama(LlamaConfig(**sizes)), optax.sgd(0.1), layout, mesh=absent_mesh(layout)
    )
    step = TrainStep(step.options.without_devices("tpu"))
    programs = dataclasses.replace(step._programs, compiler_options={})
    batch = batch_shapes(step.model, 2, seq=512)

    def has_kernel(program, batch):
        with use_mesh(step.mesh):
            traced = jax.make_jaxpr(program)(programs.reading_shapes, batch)
        return "pallas_call" in str(traced)

    assert has_kernel(programs.gradients, batch)
    assert not has_kernel(programs.logits, {"tokens": batch["tokens"]})


def test_packed_documents_and_windows_take_the_kernel_too():
    numbers = jnp.zeros((1, 256), jnp.int32)
    shape = {"head_dim": 64, "seq": 256, "dtype": jnp.bfloat16}
    assert runs_kernel(**shape, segments=numbers)
    assert runs_kernel(**shape, window=100)
    assert not runs_kernel(**shape, seen=jnp.ones((1, 256), bool))
