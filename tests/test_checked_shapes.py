"""That annotations of shapes are run while tests are."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from meshpar import Scope
from meshpar.models.layers.causal_attention import causal_attention
from meshpar.parallel.tensor import vocab_lookup

TABLE = jnp.zeros((8, 4))


def test_a_shape_that_is_not_what_an_annotation_says_is_refused():
    with pytest.raises(TypeCheckError, match="tokens"):
        vocab_lookup(TABLE, jnp.zeros((2,), jnp.int32), Scope())


def test_a_dtype_that_is_not_what_an_annotation_says_is_refused():
    with pytest.raises(TypeCheckError, match="tokens"):
        vocab_lookup(TABLE, jnp.zeros((2, 3)), Scope())


def test_sizes_that_differ_where_one_name_stands_twice_are_refused():
    keys = jnp.zeros((1, 3, 2, 4))
    with pytest.raises(TypeCheckError, match="'v'"):
        causal_attention(jnp.zeros((1, 3, 4, 4)), keys, jnp.zeros((1, 3, 1, 4)))
