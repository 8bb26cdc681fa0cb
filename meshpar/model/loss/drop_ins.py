"""Attention and positions that a loss of `from_loss` calls under any layout.

`attend` replaces softmax attention and `positions` replaces `jnp.arange`. Under
`context`, where each device has a part of every sequence, they use the whole sequence;
outside of meshpar they compute the usual values.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from meshpar.model.scope import Scope

_LIBRARY = "meshpar.models.layers.attention"
_SCOPE: ContextVar[Scope] = ContextVar("_SCOPE")


@contextlib.contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Let the functions of this module run under a scope, while a loss is traced."""
    token = _SCOPE.set(scope)
    try:
        yield
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
    scope = _SCOPE.get(Scope())
    library = importlib.import_module(_LIBRARY)
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
    return _SCOPE.get(Scope()).positions(seq)
