"""Attention, positions, experts and random keys that a loss uses under any layout.

`attend` replaces softmax attention and `positions` replaces `jnp.arange`. Under
`context`, where each device has a part of every sequence, they use the whole sequence.
`experts` replaces a mixture of experts, whose experts `expert` splits. Outside of
meshpar they compute the usual values. A key draws for each example by itself, so that
no layout changes what is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as jax_random

from meshpar.errors import InputError
from meshpar.model.scope import Scope

_ATTENTION = "meshpar.models.layers.attention"
_EXPERTS = "meshpar.models.layers.routed_mlp"
_SCOPE: ContextVar[Scope] = ContextVar("_SCOPE")
_PLAIN = Scope(platform="")  # outside a step


@contextlib.contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Let the functions of this module run under a scope, while a loss is traced.

    Raises:
        InputError: A Linen module declares kernels of which a device has a part.
    """
    token = _SCOPE.set(scope)
    try:
        yield
    except Exception as error:
        # Named by its class, so that a model without Linen does not import it.
        if type(error).__name__ != "ScopeParamShapeError" or not scope.expert_axes:
            raise
        raise InputError(
            f"Linen compares each self.param with its shape on one device ({error}), "
            "but a device has a part of the experts; keep their kernels in a dict "
            "beside the Linen variables, and give them to the module as arguments",
            key="model.experts_in_linen",
        ) from error
    finally:
        _SCOPE.reset(token)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Return softmax attention with scores scaled by `head_dim ** -0.5`.

    Under `context` the devices that share a sequence exchange keys and values as the
    layout's `attention` says; on GPUs and TPUs it runs in a fused kernel where there is
    one.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, seq, kv_heads, head_dim); `kv_heads` divides `heads`.
        v: As `k`.
        causal: Whether a query sees no key that follows it.
        window: A query sees keys less than so many places away; None for no limit.
        segment_ids: (batch, seq), the number of each token's document: a query sees
            keys of its own, and none of a number below 0. None for one document a row.

    Returns:
        (batch, seq, heads, head_dim), split as `q`.

    Example:
        >>> import jax.numpy as jnp
        >>> attend(*jnp.ones((3, 2, 8, 4, 16)), causal=True).shape
        (2, 8, 4, 16)
    """
    scope = _SCOPE.get(_PLAIN)
    library = importlib.import_module(_ATTENTION)
    return library.attend(
        q, k, v, scope, causal=causal, window=window, segments=segment_ids
    )


def positions(seq: int) -> jax.Array:
    """Return the positions of this device's `seq` tokens in the sequence: int32 (seq,).

    Equal to `jnp.arange(seq)` except under `context`, where a device has a part of
    each sequence. Do not put `jax.jit` around a loss that calls it: the positions of
    the first layout would stay in its cached trace.

    Example:
        >>> positions(3).tolist()
        [0, 1, 2]
    """
    return _SCOPE.get(_PLAIN).positions(seq)


def experts(
    x: jax.Array,
    router: jax.Array | tuple[jax.Array, jax.Array],
    kernels: Any,
    *,
    top_k: int | None = None,
    function: Callable[[Any, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Return the weighted sum of the results of each token's experts.

        y = sum over choices k of weight_k * expert_k(x)
        expert(x) = down(silu(gate(x)) * up(x)), or `function`

    No token is dropped. Under `expert` each device has a part of the kernels, if their
    first logical axis is `experts`; tokens go to their experts and back by all-to-all,
    two of the choices of all tokens in the forward and two in the backward.

    Args:
        x: (..., embed), the tokens.
        router: (..., num_experts), logits: each token goes to its `top_k` largest,
            weighted by the softmax over those. Or, from your own router, a tuple of
            the number of each chosen expert, and its weight, both (..., choices).
            A number outside 0 .. num_experts - 1 chooses no expert.
        kernels: (gate, up, down): (num_experts, embed, hidden) twice, and
            (num_experts, hidden, embed). With `function`, any tree of arrays whose
            first dim is the experts.
        top_k: Choices of a token; None if `router` has them.
        function: `function(kernels of one expert, rows) -> rows`, both (n, embed):
            each row by itself, from no other arrays. The backward runs it again.

    Returns:
        As `x`.

    Raises:
        InputError: Shapes do not fit together, or `function` reads other arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> kernels = *jnp.ones((2, 4, 16, 32)), jnp.ones((4, 32, 16))
        >>> x, logits = jnp.ones((2, 8, 16)), jnp.ones((2, 8, 4))
        >>> experts(x, logits, kernels, top_k=2).shape
        (2, 8, 16)
    """
    return importlib.import_module(_EXPERTS).route_tokens(
        x, router, kernels, _SCOPE.get(_PLAIN), top_k=top_k, function=function
    )


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
