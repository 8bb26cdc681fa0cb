"""Our attention equals JAX's in values and gradients, and keeps one array of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import audit
from meshpar.models.layers.causal_attention import causal_attention
from tests.marks import slow
from tests.test_audit_targets import needs_gpu_compiler


def inputs(kv_heads, dtype, seq=7):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (4, kv_heads, kv_heads, 4)
    return [
        jax.random.normal(key, (2, seq, heads, 8), dtype)
        for key, heads in zip(keys, sizes, strict=True)
    ]


def plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def value_and_gradients(attention, *arrays, dy):
    def run(*arrays):
        y, vjp = jax.vjp(attention, *arrays)
        return y, *vjp(dy)

    return jax.jit(run)(*arrays)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_equals_the_attention_of_jax(kv_heads):
    """In both dtypes; one program has ours and JAX's."""
    given = [inputs(kv_heads, dtype) for dtype in (jnp.float32, jnp.bfloat16)]

    @jax.jit
    def run(given):
        return [
            [
                value_and_gradients(one, *arrays, dy=dy)
                for one in (causal_attention, plain)
            ]
            for *arrays, dy in given
        ]

    for (found, wanted), bound in zip(run(given), (1e-6, 2e-2), strict=True):
        assert_equal(found, wanted, bound)


def assert_equal(found, wanted, bound):
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        got, want = (np.asarray(array, np.float32) for array in (got, want))
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


def test_a_token_sees_none_after_it():
    q, k, v, _ = inputs(2, jnp.float32)
    attention = jax.jit(causal_attention)
    before = attention(q, k, v)
    after = attention(q, *(np.concatenate([x[:, :4], x[:, 4:] + 9], 1) for x in (k, v)))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])


def test_it_keeps_its_inputs_and_the_softmax_in_their_dtype():
    *arrays, _ = inputs(2, jnp.bfloat16)
    run = jax.jit(lambda *arrays: jax.vjp(causal_attention, *arrays)[1])
    kept = jax.tree.leaves(jax.eval_shape(run, *arrays))
    sizes = sorted(array.size for array in kept)
    assert sizes == sorted([*(array.size for array in arrays), 2 * 4 * 7 * 7])
    assert {array.dtype for array in kept} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
def test_some_heads_at_a_time_change_no_number(monkeypatch, heads_at_once):
    *arrays, dy = inputs(4, jnp.float32)
    wanted = value_and_gradients(causal_attention, *arrays, dy=dy)
    scores = 2 * 7 * 7 * 4  # batch, seq, seq, fp32
    monkeypatch.setattr("meshpar.parallel.sizes.SCORE_BYTES", heads_at_once * scores)
    anew = lambda *arrays: causal_attention(*arrays)  # noqa: E731
    found = value_and_gradients(anew, *arrays, dy=dy)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@needs_gpu_compiler
@pytest.mark.parametrize(("kv_heads", "most"), [slow(4, 2.8), slow(1, 4.5)])
def test_a_gpu_copies_no_scores_into_another_layout(kv_heads, most, monkeypatch):
    """In softmaxes of 16 bits: the one kept, an fp32 gradient of it (2), that cast (1).

    In four parts the last two are of a quarter each, with the scores they are made of.
    """
    batch, seq, heads = 2, 512, 8
    part = 4 * batch * seq * seq * heads // kv_heads
    monkeypatch.setattr("meshpar.parallel.sizes.SCORE_BYTES", part)

    def gradients(q, k, v):
        def total(q, k, v):
            return jnp.sum(causal_attention(q, k, v).astype(jnp.float32) ** 2)

        return jax.grad(jax.checkpoint(total), argnums=(0, 1, 2))(q, k, v)

    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    q, k = (
        jax.ShapeDtypeStruct(
            (batch, seq, num, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P())
        )
        for num in (heads, kv_heads)
    )
    report = audit(jax.jit(gradients), q, k, k, target="gpu:h100:1x1")
    softmax_bytes = 2 * batch * heads * seq * seq
    assert report.memory.temp_bytes < most * softmax_bytes
