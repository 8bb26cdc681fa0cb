"""Attention to all keys equals JAX's, and leaves out the keys that are not seen."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import Scope
from meshpar.models.layers.attention import attend
from meshpar.models.layers.causal_attention import full_attention
from tests.marks import slow


def arrays(kv_heads, keys):
    shapes = (2, 7, 4, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def value_and_grad(attention, given, seen):
    def summed(given):
        y = attention(*given, seen)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), gradients = jax.jit(jax.value_and_grad(summed, has_aux=True))(given)
    return y, gradients


def plain(q, k, v, seen):
    mask = None if seen is None else seen[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


LENGTHS = [(7, None), (5, [5, 2]), (9, [1, 9])]
QUICK = list(zip(LENGTHS, (1, 2, 4), strict=True))
"""Every number of key/value heads, and every number of keys, once."""


@pytest.mark.parametrize(
    "keys, lengths, kv_heads",
    [
        (*lengths, kv_heads)
        if (lengths, kv_heads) in QUICK
        else slow(*lengths, kv_heads)
        for lengths, kv_heads in itertools.product(LENGTHS, (1, 2, 4))
    ],
)
def test_values_and_gradients_are_those_of_jax(keys, lengths, kv_heads):
    given = arrays(kv_heads, keys)
    seen = None if lengths is None else np.arange(keys) < np.array(lengths)[:, None]
    found, wanted = (
        value_and_grad(attention, given, seen) for attention in (full_attention, plain)
    )
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=2e-6),
        found,
        wanted,
    )


def test_an_example_without_any_key_is_zero_in_values_and_gradients():
    given = arrays(4, 5)
    found = value_and_grad(full_attention, given, np.zeros((2, 5), bool))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found))


def test_a_causal_mask_and_unseen_keys_hold_together():
    q, k, v = arrays(4, 7)
    seen = np.arange(7) < np.array([[3], [7]])
    both = seen[:, None, None, :] & np.tri(7, dtype=bool)
    attended = jax.jit(lambda *qkv: attend(*qkv, Scope(), causal=True, seen=seen))
    wanted = jax.jit(lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=both))
    np.testing.assert_allclose(attended(q, k, v), wanted(q, k, v), atol=2e-6)
