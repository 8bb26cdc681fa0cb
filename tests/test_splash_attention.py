"""Splash attention equals a dense softmax; compiled for absent TPUs it is one kernel.

On CPUs its kernel is interpreted. fp32, of the largest value of each array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.hardware.splash_kernels import partial_bytes
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.context.splash import backward_sizes, splash_attention
from tests.marks import slow

BATCH, SEQ, HEADS, BOUND = 2, 384, 4, 1e-5
CAUSAL = Mask()


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch):
    """Three by three of them."""
    monkeypatch.setattr("meshpar.hardware.splash_kernels.LARGEST_BLOCK", 128)


def dense(q, k, v, segments, mask):
    """Written out, with all scores at once."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    seen = np.broadcast_to(i >= j if mask.causal else True, (len(q), queries, keys))
    if mask.window is not None:
        seen = seen & (abs(i - j) < mask.window)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
        seen = seen & (segments[:, None] >= 0)
    p = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    p = jnp.where(seen.any(-1)[:, None, :, None], p, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def packed():
    """Documents that end inside of tiles, and padding at the end of one example."""
    found = np.zeros((BATCH, SEQ), np.int32)
    found[0, 100:] = 1
    found[0, 140:300] = 2
    found[0, 300:] = -1
    found[1, 256:] = 5
    return found


def arrays(kv_heads, head_dim, keys=SEQ):
    rng = np.random.default_rng(0)
    shapes = (SEQ, HEADS), (keys, kv_heads), (keys, kv_heads), (SEQ, HEADS)
    return [
        rng.normal(size=(BATCH, *shape, head_dim)).astype(np.float32)
        for shape in shapes
    ]


def errors(mask, kv_heads, head_dim=64, *, segments=None, keys=SEQ):
    """Of the output and the three gradients."""
    *inputs, dy = arrays(kv_heads, head_dim, keys)

    def value_and_gradients(attend):
        def run(*inputs):
            y, vjp = jax.vjp(attend, *inputs)
            return y, *vjp(dy)

        return jax.jit(run)(*inputs)

    found = value_and_gradients(
        lambda q, k, v: splash_attention(q, k, v, segments, mask=mask, interpret=True)
    )
    wanted = value_and_gradients(lambda q, k, v: dense(q, k, v, segments, mask))
    return [
        float(jnp.abs(one - other).max() / jnp.abs(other).max())
        for one, other in zip(found, wanted, strict=True)
    ]


@pytest.mark.parametrize(
    "mask, kv_heads",
    [
        slow(CAUSAL, 4),
        (CAUSAL, 1),
        slow(Mask(causal=False), 2),
        slow(Mask(window=100), 2),
        slow(Mask(window=70, causal=False), 2),
    ],
)
def test_the_kernel_equals_a_dense_softmax(mask, kv_heads):
    assert max(errors(mask, kv_heads)) < BOUND


@pytest.mark.parametrize(
    "mask", [slow(CAUSAL), Mask(window=50), slow(Mask(causal=False))]
)
def test_documents_see_themselves_alone_and_padding_nothing(mask):
    assert max(errors(mask, 2, segments=packed())) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask, kernels",
    [(Mask(causal=False), 1), (CAUSAL, 2), (Mask(window=50), 2)],
)
def test_large_partial_sums_come_in_pieces_of_keys_or_from_no_kernel(
    mask, kernels, monkeypatch
):
    """Keys that all queries see in pieces; under a mask two kernels make none."""
    one_block = partial_bytes(SEQ, 128, group=2, head_dim=64, key_block=128)
    monkeypatch.setattr(
        "meshpar.hardware.splash_kernels.LARGEST_PARTIAL_BYTES", one_block
    )
    monkeypatch.setattr("meshpar.parallel.context.splash.PARTIAL_BYTES", 0)
    assert max(errors(mask, 2, segments=packed())) < BOUND
    q, k = (jax.ShapeDtypeStruct((1, n, SEQ, 64), jnp.float32) for n in (2, 1))
    sizes = backward_sizes(q, k, mask)
    assert sizes.num_backward == kernels
    assert sizes.keys == (128 if kernels == 1 else SEQ)


def test_there_may_be_other_keys_than_queries():
    assert max(errors(Mask(causal=False), 2, keys=256)) < BOUND
