"""What mixes no tokens, a chunk of tokens at a time where all at once is large.

The hidden values of an MLP are its largest arrays, and its backward has several. Where
the backward makes them again anyway, a loop makes those of one chunk of tokens after
another, forward and backward, so that they take as much memory however long a device's
share of the sequence is. Weights' gradients are added up over the chunks in fp32.
Reference: Bekman et al. 2025 (Arctic long sequence training), on tiled MLPs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.scope import Scope
from meshpar.parallel import sizes
from meshpar.parallel.moves import degree, ruled_degree, split_of
from meshpar.rules.rules import LogicalAxes


def in_token_chunks(
    function: Callable[[Any, jax.Array], jax.Array],
    weights: Any,
    x: jax.Array,
    scope: Scope,
    *,
    widest: tuple[int, ...],
    widest_axes: LogicalAxes,
) -> jax.Array:
    """`function(weights, x)`, which mixes no tokens, in chunks of them where it helps.

    It does where its backward is recomputed anyway (`Scope.recomputed`) and its widest
    array would take more than `HIDDEN_BYTES` on a device. Nothing is computed more
    often, and no more bytes are sent, in as many collectives as there are chunks. Where
    mesh axes at work split the sequence, as under sequence parallelism, it runs whole:
    its hidden values are split over them.

    Args:
        function: (weights, (batch, tokens, ...)) -> (batch, tokens, ...).
        weights: Tree of arrays.
        x: (batch, seq, ...).
        scope: Where the function runs.
        widest: Shape of the largest array that the function makes, (batch, seq, ...).
        widest_axes: Its logical axes.
    """
    num_chunks = _num_chunks(x, scope, widest, widest_axes)
    if num_chunks == 1:
        return function(weights, x)
    batch, seq = x.shape[:2]
    padded = jnp.pad(x, ((0, 0), (0, -seq % num_chunks), *((0, 0),) * (x.ndim - 2)))
    chunks = jnp.moveaxis(padded.reshape(batch, num_chunks, -1, *x.shape[2:]), 1, 0)
    # In fp32, so that the gradients of all chunks are added up in it.
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(wide: Any, chunk: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide, weights)
        return function(narrow, chunk)

    _, found = lax.scan(lambda _, chunk: (None, one(wide, chunk)), None, chunks)
    whole = jnp.moveaxis(found, 0, 1)
    return whole.reshape(batch, -1, *whole.shape[3:])[:, :seq]


def _num_chunks(
    x: jax.Array, scope: Scope, widest: tuple[int, ...], axes: LogicalAxes
) -> int:
    if not scope.recomputed or _splits_tokens(scope):
        return 1
    seq = x.shape[1]
    num_shards = math.prod(map(degree, split_of(scope, axes, widest)))
    bytes_here = math.prod(widest) * x.dtype.itemsize // num_shards
    return equal_chunks(min(-(-bytes_here // sizes.HIDDEN_BYTES), seq), seq)


def equal_chunks(least: int, num_tokens: int) -> int:
    """How many chunks tokens are cut into: the first number from `least` that divides.

    Chunks of equal size need no padding; not at the price of chunks half as large.

    Example:
        >>> equal_chunks(5, 12), equal_chunks(5, 11)
        (6, 5)
    """
    more = range(least, 2 * least)
    return next((num for num in more if num_tokens % num == 0), least)


def _splits_tokens(scope: Scope) -> bool:
    rules = scope.rules
    if rules is None:
        return False
    known = [name for name in ("seq", "residual_seq") if name in rules.table]
    return any(ruled_degree(rules, name) > 1 for name in known)
