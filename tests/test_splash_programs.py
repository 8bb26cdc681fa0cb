"""What XLA compiles of splash attention for absent TPUs: one kernel on each shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import Layout, Scope, make_train_step
from meshpar.audit.report import audit
from meshpar.hardware.splash_kernels import splash_flops, splash_scope
from meshpar.machine.mesh import absent_mesh, use_mesh
from meshpar.model.tracing import traced_batch
from meshpar.models.layers.attention import attend
from meshpar.models.llama import LlamaConfig, llama
from meshpar.rules.presets import default_rules
from tests.test_audit_targets import needs_tpu_compiler

SEQ, HEADS, KV_HEADS, HEAD_DIM, BATCH = 1408, 4, 2, 64, 4


def attention_report(target="tpu:v5e:2x2", *, packed):
    """Of the gradients of attention alone, over data=2, tensor=2, all of it GSPMD's."""
    layout = "data=2,tensor=2"
    mesh = absent_mesh(layout)
    split = NamedSharding(mesh, P("data", None, "tensor"))
    scope = Scope(rules=default_rules(layout), platform="tpu")

    def array(heads):
        shape = (BATCH, SEQ, heads, HEAD_DIM)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)

    def loss(q, k, v, segments):
        attended = attend(q, k, v, scope, causal=True, segments=segments)
        return jnp.sum(attended.astype(jnp.float32) ** 2)

    numbers = jax.ShapeDtypeStruct(
        (BATCH, SEQ), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    arrays = array(HEADS), array(KV_HEADS), array(KV_HEADS)
    with use_mesh(mesh):
        return audit(
            jax.grad(loss, argnums=(0, 1, 2)),
            *arrays,
            numbers if packed else None,
            mesh=mesh,
            target=target,
        )


@pytest.mark.slow
@needs_tpu_compiler
def test_packed_attention_is_a_kernel_of_each_shard_that_is_counted_and_moves_nothing():
    report = attention_report(packed=True)
    assert not report.rows and not report.complaints()
    assert not report.uncounted and not report.notes
    # Forward 2 matmuls, backward 5, of the tiles that a causal mask leaves of 11 by 11.
    pairs = BATCH // 2 * HEADS // 2 * 66 * 128**2
    assert report.flops == 7 * 2 * HEAD_DIM * pairs


def test_each_kernel_of_attention_counts_its_own_matmuls():
    """Forward two; back three of the queries, and four of the keys and values.

    One kernel for all of these has five.
    """
    sizes = {"pairs": 10, "query_dim": 4, "value_dim": 3}
    scope, fused = splash_scope(**sizes), splash_scope(**sizes, fused=True)
    flops = {
        kernel: splash_flops(f"{scope}/splash_mha_{kernel}_no_residuals/pallas_call")
        for kernel in ("fwd", "dq", "dkv")
    }
    assert flops == {"fwd": 20 * (4 + 3), "dq": 20 * (8 + 3), "dkv": 20 * (8 + 6)}
    path = f"{fused}/splash_mha_dkv_no_residuals/pallas_call"
    assert splash_flops(path) == 20 * (12 + 6)


def model():
    return llama(
        LlamaConfig(
            layers=2,
            embed=256,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            ffn=512,
            vocab=512,
        )
    )


def step_flops(layout, seq, pairs):
    """Of a device, without what a pipeline makes for nobody.

    Args:
        layout: Of the step.
        seq: Tokens of each of 16 examples.
        pairs: Of queries and keys of a head whose scores a device makes.
    """
    tokens = 16 * seq // (layout.fsdp * layout.context)
    weights = 2 * (256 * 8 * HEAD_DIM + 256 * 256 + 3 * 256 * 512) + 256 * 512
    examples, heads = 16 // layout.fsdp, HEADS // layout.tensor
    attention = 2 * 7 * 2 * HEAD_DIM * examples * heads * pairs
    return 6 * tokens * weights // layout.tensor + attention


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(
    "line, seq, pairs",
    [
        ("fsdp=2,tensor=2", 256, 256**2),
        # Half of the heads, and each whole sequences.
        ("context=2,tensor=2,attention=ulysses", 256, 256**2 // 2),
        # Its own 256 tokens, and two pairs of chunks of the other device.
        ("context=2,tensor=2", 512, 256**2 + 2 * 128**2),
    ],
)
def test_a_step_has_the_kernel_on_every_shard_and_nothing_else(line, seq, pairs):
    layout = Layout.parse(f"{line},precision=bf16")
    step = make_train_step(model(), optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    report = audit(step, traced_batch(step.model, 16, seq), target="tpu:v5e:2x2")
    assert not report.complaints() and not report.uncounted and not report.notes
    assert report.flops == step_flops(layout, seq, pairs)


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(
    "line, seq, scores",
    [
        # Scores of a device: of all its examples and heads.
        ("fsdp=2,tensor=2", 512, 8 * 2 * 512**2),
        ("context=4", 1024, 16 * 4 * (256**2 + 3 * 2 * 128**2)),
    ],
)
def test_a_backward_with_attentions_output_and_log_sums_attends_no_second_time(
    line, seq, scores
):
    """Two blocks attend once each; the ring's keys do not go round again, either."""

    def audited(remat):
        layout = Layout.parse(f"{line},remat={remat},precision=bf16")
        mesh = absent_mesh(layout)
        step = make_train_step(model(), optax.adamw(1e-3), layout, mesh=mesh)
        return audit(step, traced_batch(step.model, 16, seq), target="tpu:v5e:2x2")

    full, kept = audited("full"), audited("save:attention_mixed")
    forward = 2 * 2 * 2 * HEAD_DIM * scores
    # XLA may spare one more matmul of a block, a tenth of it.
    assert forward <= full.flops - kept.flops < 1.15 * forward
    hops = [
        sum(
            row.collective.executions
            for row in report.rows
            if row.collective.kind == "collective-permute"
        )
        for report in (full, kept)
    ]
    assert hops[0] > hops[1] if "context" in line else hops == [0, 0]


@pytest.mark.slow
@needs_tpu_compiler
def test_what_keeps_a_step_from_the_kernel_stands_among_the_notes():
    layout = Layout.parse("fsdp=2,tensor=2,precision=bf16")
    step = make_train_step(model(), optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    report = audit(step, traced_batch(step.model, 16, 200), target="tpu:v5e:2x2")
    assert report.notes == (
        "attention runs without splash: it takes a multiple of 128 tokens at a time, "
        "not 200",
    )
