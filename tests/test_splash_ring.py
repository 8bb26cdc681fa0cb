"""The ring of splash kernels equals a dense softmax of the whole sequence.

On CPUs the kernels are interpreted. fp32, of the largest value of each array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.context.splash_ring import Ring, splash_ring
from tests.marks import slow
from tests.test_splash_attention import BOUND, dense

CHUNK, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 8


def packed(seq):
    """Documents that cross devices, and padding: all that some device has."""
    found = np.zeros((1, seq), np.int32)
    found[0, seq // 3 :] = 1
    found[0, seq // 2 :] = 2
    found[0, -seq // 4 :] = -1
    return found


def errors(ranks, *, causal, documents, num_parts=1):
    """Of the output and the three gradients."""
    seq = 2 * CHUNK * ranks
    order = TokenOrder(mesh_axis="context", num_ranks=ranks, zigzag=True)
    ring = Ring(order=order, causal=causal, num_parts=num_parts, interpret=True)
    rng = np.random.default_rng(0)
    q, k, v, dy = (
        jnp.asarray(rng.normal(size=(1, seq, heads, HEAD_DIM)), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    segments = packed(seq) if documents else None

    def local(*arrays):
        q, k, v, dy = (order.own(x, 1) for x in arrays)
        own = None if segments is None else order.own(jnp.asarray(segments), 1)
        options = {"rank": order.rank(), "ring": ring}
        y, vjp = jax.vjp(lambda *x: splash_ring(*x, own, **options), q, k, v)
        return tuple(jax.lax.all_gather(x, "context") for x in (y, *vjp(dy)))

    mesh = Mesh(
        np.array(jax.devices()[:ranks]), ("context",), axis_types=(AxisType.Auto,)
    )
    found = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(),) * 4, out_specs=P(), check_vma=False
        )
    )(q, k, v, dy)

    @jax.jit
    def whole(q, k, v):
        mask = Mask(causal=causal)
        y, vjp = jax.vjp(lambda *x: dense(*x, segments, mask), q, k, v)
        return y, *vjp(dy)

    return [
        float(jnp.abs(order.natural(one, 1) - other).max() / jnp.abs(other).max())
        for one, other in zip(found, whole(q, k, v), strict=True)
    ]


@pytest.mark.parametrize(
    "ranks, causal, documents",
    [
        (4, True, True),
        slow(2, True, False),
        slow(2, False, True),
        slow(8, True, False),
    ],
)
def test_the_ring_equals_a_dense_softmax(ranks, causal, documents):
    found = errors(ranks, causal=causal, documents=documents)
    assert max(found) < BOUND, found


@pytest.mark.slow
def test_heads_may_take_the_ring_in_parts():
    assert max(errors(2, causal=True, documents=True, num_parts=2)) < BOUND


def test_a_causal_ring_in_the_sequences_own_order_is_refused(refuses):
    order = TokenOrder(mesh_axis="context", num_ranks=2)
    assert Ring(order=order, causal=False).order is order
    with refuses("attention.causal_ring_without_zigzag"):
        Ring(order=order, causal=True)
