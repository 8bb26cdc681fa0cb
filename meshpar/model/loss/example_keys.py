"""A random key that draws for each example by itself, so that no layout changes it.

A function of a whole batch takes one key and draws arrays such as (batch, seq, embed)
from it. Under a layout each device has some of the examples, and would draw other
numbers for them. Keys of this module carry the index of each example at hand: an array
whose leading dim holds the examples (or examples times tokens) is drawn example by
example; any other array is the same for all.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as jax_random

from meshpar.model.scope import Scope

Shapes = frozenset[tuple[int, ...]]
"""Shapes of arrays."""

_BASE = "threefry2x32"
_BASE_WORDS = 2
_BITS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def key_data(scope: Scope, name: str) -> jax.Array | None:
    """Return the data of a key for the examples at hand: uint32 (2 + examples,).

    A function of (seed, step, layer, `name`) and of each example's index.

    Args:
        scope: Scope of the function that draws.
        name: Name of the place, another one for each in a function.

    Returns:
        The data, for `example_key`; None where nothing is drawn: outside training.
    """
    if not scope.training or scope.random is None or scope.examples is None:
        return None
    key = jax.random.fold_in(scope.random, zlib.crc32(name.encode()))
    key = jax.random.fold_in(key, jnp.asarray(scope.layer).astype(jnp.uint32))
    examples = scope.examples.astype(jnp.uint32)
    return jnp.concatenate([jax.random.key_data(key), examples])


def example_key(data: jax.Array, shared: Shapes = frozenset()) -> jax.Array:
    """Return the key of some data: a scalar that `jax.random` and Flax take as any.

    Args:
        data: From `key_data`.
        shared: Shapes of arrays that are drawn once for all examples, though their
            leading dim could hold them.

    Example:
        >>> scope = Scope(
        ...     training=True, random=jax.random.key(0), examples=jnp.arange(4)
        ... )
        >>> whole = jax.random.normal(example_key(key_data(scope, "noise")), (4, 3))
        >>> half = Scope(
        ...     training=True, random=jax.random.key(0), examples=jnp.arange(2, 4)
        ... )
        >>> part = jax.random.normal(example_key(key_data(half, "noise")), (2, 3))
        >>> bool((part == whole[2:]).all())
        True
    """
    return jax.random.wrap_key_data(data, impl=_implementation(data.shape[-1], shared))


@functools.cache
def _implementation(num_words: int, shared: Shapes) -> Any:
    """Return the functions of keys of so many words, as `jax.random` takes them."""
    num_examples = num_words - _BASE_WORDS

    def base(data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data[:_BASE_WORDS], impl=_BASE)

    def with_examples(keys: jax.Array, data: jax.Array) -> jax.Array:
        words = jax.random.key_data(keys)
        examples = data[_BASE_WORDS:]
        shape = (*words.shape[:-1], num_examples)
        return jnp.concatenate([words, jnp.broadcast_to(examples, shape)], axis=-1)

    def split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return with_examples(jax.random.split(base(data), shape), data)

    def fold_in(data: jax.Array, number: Any) -> jax.Array:
        return with_examples(jax.random.fold_in(base(data), number), data)

    def random_bits(data: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        key, dtype = base(data), _BITS[width]
        if not shape or shape in shared or shape[0] % num_examples:
            return jax.random.bits(key, shape, dtype)
        own = (shape[0] // num_examples, *shape[1:])
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, data[_BASE_WORDS:])
        drawn = jax.vmap(lambda key: jax.random.bits(key, own, dtype))(keys)
        return drawn.reshape(shape)

    def seed(_: jax.Array) -> jax.Array:
        raise TypeError("a key of examples is made by `example_key`, not from a seed")

    return jax_random.define_prng_impl(
        key_shape=(num_words,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"meshpar_examples_{num_examples}_{hash(shared)}",
        tag=f"me{num_examples}",
    )
