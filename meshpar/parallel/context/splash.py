"""Splash attention: one TPU kernel for scores, softmax and mixed values of a device.

The kernel is JAX's (`jax.experimental.pallas.ops.tpu.splash_attention`), and leaves out
the tiles that a causal mask or a window hides. Its limits stand in
`meshpar.hardware.attention_choice`. A Pallas kernel is split by nobody: it runs where
all mesh axes are manual.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from meshpar.hardware.attention_choice import SPLASH_LANES
from meshpar.hardware.splash_flops import scope_of
from meshpar.parallel.context.mask import Mask

LARGEST_BLOCK = 1024
"""Queries or keys of a kernel's tile at most: with 2,048 its scores exceed what XLA gives
a kernel of a v5e's VMEM (jax 0.10.2); the larger the tile, the less is read."""

# Dims: B batch, T queries, S keys, N heads, K kv heads, H head_dim.


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    mask: Mask,
    interpret: bool = False,
) -> jax.Array:
    """Attention to whole sequences, which keeps no scores for its backward.

    Communicates nothing. Scores and softmax are made in fp32. The backward is two
    kernels, of queries and of keys and values, which make the scores once more each.

    Args:
        q: (batch, queries, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.
        segments: (batch, tokens) int32 of queries and keys alike: a query sees keys of
            its own number alone, and none if that is below 0. None where all are one.
        mask: Which keys a query sees by their places, a prefix not among it; where
            there are segments, each query its own.
        interpret: Whether to run the kernel as JAX operations, where there is no TPU.

    Returns:
        (batch, queries, heads, head_dim), the dtype of `q`; zeros for a query of a
        segment below 0.
    """
    queries, heads = q.shape[1:3]
    kernel, pairs = _kernel(mask, queries, k.shape[1], heads, interpret)
    scaled_BNTH = jnp.swapaxes(q * np.asarray(q.shape[-1] ** -0.5, q.dtype), 1, 2)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    all_pairs = q.shape[0] * pairs
    with jax.named_scope(scope_of(all_pairs, q.shape[-1], v.shape[-1])):
        if segments is None:
            mixed_BNTH = jax.vmap(kernel)(scaled_BNTH, k_BKSH, v_BKSH)
        else:
            ids = kernels.SegmentIds(segments, segments)
            mixed_BNTH = jax.vmap(kernel)(scaled_BNTH, k_BKSH, v_BKSH, ids)
    mixed = jnp.swapaxes(mixed_BNTH, 1, 2)
    if segments is None:
        return mixed
    return jnp.where((segments >= 0)[:, :, None, None], mixed, 0)


def block_size(tokens: int) -> int:
    """Tokens of a tile: the most lanes up to `LARGEST_BLOCK` that divide a sequence."""
    sizes = range(SPLASH_LANES, min(tokens, LARGEST_BLOCK) + 1, SPLASH_LANES)
    return max(size for size in sizes if tokens % size == 0)


@functools.lru_cache(maxsize=64)
def _kernel(
    mask: Mask, queries: int, keys: int, heads: int, interpret: bool
) -> tuple[Any, int]:
    """The kernel, and the pairs of queries and keys of all heads that it makes."""
    block_q, block_kv = block_size(queries), block_size(keys)
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
    # Its tables are constants, whatever is traced when they are first made.
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([_mask(mask, queries, keys)] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            interpret=interpret,
        )
        kernel = jax.tree.map(np.asarray, kernel)
    return kernel, heads * _tiles(kernel, queries, keys, sizes) * block_q * block_kv


def _tiles(kernel: Any, queries: int, keys: int, sizes: Any) -> int:
    """Tiles of a head that the kernel makes; those it skips are 0 in its table."""
    table = kernel.fwd_mask_info.block_mask
    if table is None:
        return (queries // sizes.block_q) * (keys // sizes.block_kv)
    return int(np.count_nonzero(table)) // len(table)


def _mask(mask: Mask, queries: int, keys: int) -> Any:
    shape = (queries, keys)
    if mask.window is not None:
        before = mask.window - 1
        after = 0 if mask.causal else before
        return masks.LocalMask(shape, (before, after), offset=0)
    return masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
