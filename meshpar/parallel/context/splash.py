"""Splash attention: one TPU kernel for scores, softmax and mixed values of a device.

The kernels are JAX's (`jax.experimental.pallas.ops.tpu.splash_attention`): a forward
with its log-sum-exp, and a backward. They skip the tiles that a causal mask or a window
hides. XLA does not partition a Pallas kernel: it runs where all mesh axes are manual.
Their limits stand in `meshpar.hardware.attention_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from meshpar.hardware.attention_kernels import SPLASH_LANES, splash_scope
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.reduction import scaled

LARGEST_BLOCK = 1024
"""Queries or keys of a kernel's tile at most, of heads up to 128; of larger ones half
as many. The more, the less is read, but 2,048 exceed the VMEM that XLA gives a kernel
on a v5e, and 1,024 with heads of 256 that on a v4 (jax 0.10.2)."""

# Dims: B batch, N heads, K kv heads, T queries, S keys, H head_dim.


class Side(NamedTuple):
    """Queries or keys, and their documents.

    Args:
        arrays: (batch, heads, tokens, ...) each.
        segments: (batch, tokens) int32, the number of each token's document, or None.
    """

    arrays: tuple[jax.Array, ...]
    segments: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Splash:
    """The kernels for one mask.

    Args:
        mask: Which keys a query sees by their places.
        interpret: Whether to run them as JAX operations, where there is no TPU.
    """

    mask: Mask
    interpret: bool = False

    def __call__(self, queries: Side, keys: Side) -> jax.Array:
        """Return BNTH of q BNTH, scaled, and of k and v BKSH; JAX differentiates it."""
        (q,), (k, v) = queries.arrays, keys.arrays
        kernel, scope = self._made(q, k, v)
        with scope:
            return _mapped(kernel, (q, k, v), queries, keys)

    def forward(self, queries: Side, keys: Side) -> tuple[jax.Array, jax.Array]:
        """Return the same, and fp32 BNT of the log-sum-exp of each query's scores."""
        (q,), (k, v) = queries.arrays, keys.arrays
        kernel, scope = self._made(q, k, v, residuals=True)
        with scope:
            output, (lse,) = _mapped(kernel, (q, k, v), queries, keys)
        return output, lse

    def backward(
        self, queries: Side, keys: Side
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gradients of q, k and v from these pairs of queries and keys alone.

        Args:
            queries: q; and for all keys the output, log-sum-exp and output's gradient.
            keys: k and v.
        """
        (q, output, lse, dy), (k, v) = queries.arrays, keys.arrays
        kernel, scope = self._made(q, k, v)
        options = kernel.kwargs

        def one(
            q: Any, k: Any, v: Any, y: Any, lse: Any, dy: Any, ids: Any = None
        ) -> tuple:
            # The public gradient is of a softmax over the keys at hand alone.
            tables = kernel.dq_mask_info, kernel.dkv_mask_info
            found = kernels._splash_attention_bwd(
                False,
                options["mask_value"],
                options["is_mqa"],
                options["block_sizes"],
                None,
                options["mask_function"],
                None,
                options["interpret"],
                (q, k, v, ids, None, y, lse, *tables),
                dy,
            )
            return found[3:6]

        arrays = (q, k, v, output, lse, dy)
        with scope:
            return _mapped(one, arrays, queries, keys)

    def _made(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, residuals: bool = False
    ) -> tuple[Any, AbstractContextManager]:
        """Return the kernel, and the scope that names its work."""
        lengths, heads = (q.shape[2], k.shape[2]), q.shape[1]
        queries, keys = (block_size(length, q.shape[-1]) for length in lengths)
        options = (self.mask, self.interpret, residuals)
        kernel, pairs = _kernel(lengths, (queries, keys), heads, *options)
        scope = splash_scope(q.shape[0] * pairs, q.shape[-1], v.shape[-1])
        return kernel, jax.named_scope(scope)


def block_size(tokens: int, head_dim: int) -> int:
    """Return a tile's tokens: most lanes up to `LARGEST_BLOCK` that divide `tokens`."""
    most = LARGEST_BLOCK if head_dim <= 128 else LARGEST_BLOCK // 2
    sizes = range(SPLASH_LANES, min(tokens, most) + 1, SPLASH_LANES)
    return max(size for size in sizes if tokens % size == 0)


def _mapped(
    function: Callable, arrays: tuple[jax.Array, ...], queries: Side, keys: Side
) -> Any:
    """Map `function` over the examples, with their documents last if there are any."""
    if queries.segments is None or keys.segments is None:
        return jax.vmap(function)(*arrays)
    ids = kernels.SegmentIds(queries.segments, keys.segments)
    return jax.vmap(function)(*arrays, ids)


@functools.lru_cache(maxsize=64)
def _kernel(
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    heads: int,
    mask: Mask,
    interpret: bool,
    residuals: bool,
) -> tuple[Any, int]:
    """Return the kernel, and the pairs of queries and keys that it computes."""
    block_q, block_kv = blocks
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    one: masks.Mask
    if mask.window is not None:
        before = mask.window - 1
        after = 0 if mask.causal else before
        one = masks.LocalMask(lengths, (before, after), offset=0)
    else:
        one = masks.CausalMask(lengths) if mask.causal else masks.FullMask(lengths)
    # Its tables are constants, whatever is traced when they are first made.
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([one] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            save_residuals=residuals,
            interpret=interpret,
        )
        kernel = jax.tree.map(np.asarray, kernel)
    # Tiles that the kernel skips are 0 in its table.
    table = kernel.fwd_mask_info.block_mask
    tiles = (lengths[0] // block_q) * (lengths[1] // block_kv)
    if table is not None:
        tiles = int(np.count_nonzero(table)) // len(table)
    return kernel, heads * tiles * block_q * block_kv


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    mask: Mask,
    interpret: bool = False,
) -> jax.Array:
    """Return attention to whole sequences, which keeps no scores for its backward.

    Communicates nothing. Scores and softmax are computed in fp32. The backward is two
    kernels, for queries and for keys and values, which compute the scores again each.

    Args:
        q: (batch, queries, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.
        segments: (batch, tokens) int32 of queries and keys alike: a query sees only
            keys of its own number, and none if that is below 0. None for one document.
        mask: Which keys a query sees by their places, its own among them; no prefix.
        interpret: True to run the kernel as JAX operations, without a TPU.

    Returns:
        (batch, queries, heads, head_dim), the dtype of `q`; zeros for a query of a
        segment below 0.
    """
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (over_root(q), k, v))
    q_BNTH, *keys = heads_first
    kernel = Splash(mask=mask, interpret=interpret)
    mixed = kernel(Side((q_BNTH,), segments), Side(tuple(keys), segments))
    return without_padding(jnp.swapaxes(mixed, 1, 2), segments)


def over_root(q: jax.Array) -> jax.Array:
    """Return queries over the root of their size, as the kernel takes them."""
    return scaled(q, q.shape[-1] ** -0.5)


def without_padding(mixed_BTNH: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Return zeros for tokens of a segment below 0, which the kernel does not mask."""
    if segments is None:
        return mixed_BTNH
    return jnp.where((segments >= 0)[:, :, None, None], mixed_BTNH, 0)
