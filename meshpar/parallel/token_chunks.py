"""Token-wise functions that run on a chunk of tokens at a time, to bound memory.

The hidden values of an MLP are its largest arrays, and its backward has several. If
the backward recomputes them anyway, a loop makes those of one chunk of tokens after
another, forward and backward, so that their memory does not grow with a device's share
of the sequence. Weights' gradients are added up over the chunks in fp32.
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
from meshpar.parallel.moves import array_split, degree, ruled_degree
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
    """Return `function(weights, x)`, run in chunks of tokens if that saves memory.

    It runs in chunks if its backward is recomputed anyway (`Scope.recomputed`) and its
    widest array would take more than `HIDDEN_BYTES` on a device. Nothing is computed
    more often, and no more bytes are sent, in as many collectives as there are chunks.
    If mesh axes split the sequence, as under sequence parallelism, it runs at once:
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
    if not scope.recomputed:
        return 1
    if scope.rules is not None:
        names = [name for name in ("seq", "residual_seq") if name in scope.rules.table]
        if any(ruled_degree(scope.rules, name) > 1 for name in names):
            return 1
    seq = x.shape[1]
    num_shards = math.prod(map(degree, array_split(scope, axes, widest)))
    bytes_here = math.prod(widest) * x.dtype.itemsize // num_shards
    return equal_chunks(min(-(-bytes_here // sizes.HIDDEN_BYTES), seq), seq)


def equal_chunks(least: int, num_tokens: int) -> int:
    """Return the number of chunks for tokens: the first from `least` that divides.

    Equal chunks need no padding. If no number below `2 * least` divides, it is `least`.

    Example:
        >>> equal_chunks(5, 12), equal_chunks(5, 11)
        (6, 5)
    """
    more = range(least, 2 * least)
    return next((num for num in more if num_tokens % num == 0), least)
