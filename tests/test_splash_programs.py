"""What XLA compiles of splash attention for absent TPUs: one kernel on each shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import Scope
from meshpar.audit.report import audit
from meshpar.mesh import absent_mesh, use_mesh
from meshpar.models.layers.attention import attend
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


@needs_tpu_compiler
def test_packed_attention_is_a_kernel_of_each_shard_that_is_counted_and_moves_nothing():
    report = attention_report(packed=True)
    assert not report.rows and not report.complaints()
    assert not report.uncounted and not report.notes
    # Forward 2 matmuls, queries' gradient 3, keys' and values' 4, of the tiles that a
    # causal mask leaves of 11 by 11.
    pairs = BATCH // 2 * HEADS // 2 * 66 * 128**2
    assert report.flops == 9 * 2 * HEAD_DIM * pairs
