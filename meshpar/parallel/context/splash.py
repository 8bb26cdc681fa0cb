"""Splash attention: one TPU kernel for scores, softmax and mixed values of a device.

The kernels are JAX's (`jax.experimental.pallas.ops.tpu.splash_attention`): a forward
with its log-sum-exp, and a backward of one kernel or two. They skip the tiles that a
causal mask or a window hides. XLA does not partition a Pallas kernel: it runs where all
mesh axes are manual. Their limits stand in `meshpar.hardware.attention_kernels`, their
FLOPs in `meshpar.hardware.splash_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from meshpar.hardware.splash_kernels import (
    SPLASH_LANES,
    fuses_backward,
    largest_block,
    largest_key_block,
    num_key_pieces,
    partial_bytes,
    splash_scope,
)
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.context.tiles import by_part, named_results
from meshpar.parallel.reduction import scaled

PARTIAL_BYTES = 128 << 20
"""Bytes of partial sums of a fused backward (`meshpar.hardware.splash_kernels`) that a
device has at once: of more heads, one part follows another. A part has at least two kv
heads, however large they are, for two cores of a chip share a kernel's work."""

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

    def forward(self, queries: Side, keys: Side) -> tuple[jax.Array, jax.Array]:
        """Return BNTH of q BNTH, scaled, and of k and v BKSH, and fp32 BNT.

        The second is the log-sum-exp of each query's scores.
        """
        (q,), (k, v) = queries.arrays, keys.arrays
        kernel = _kernel(_sizes(q, k), self.mask, self.interpret)
        with jax.named_scope(_scope(kernel.fwd_mask_info, q, k, v, kernel)):
            output, (lse,) = _mapped(kernel, (q, k, v), queries.segments, keys.segments)
        return output, lse

    def backward(
        self, queries: Side, keys: Side
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gradients of q, k and v from these pairs of queries and keys alone.

        Args:
            queries: q; and for all keys the output, log-sum-exp and output's gradient.
            keys: k and v.
        """
        heads = keys.arrays[0].shape[1]
        # (B, N, ...) -> (B K, query heads of a kv head, ...): the outer dim is the one
        # that two cores of a chip share.
        arrays = tuple(
            x.reshape(-1, x.shape[1] // heads, *x.shape[2:])
            for x in (*queries.arrays, *keys.arrays)
        )
        if queries.segments is not None and keys.segments is not None:
            ids = (queries.segments, keys.segments)
            arrays += tuple(jnp.repeat(each, heads, axis=0) for each in ids)
        sizes = backward_sizes(arrays[0], arrays[4], self.mask)
        part = functools.partial(_part_gradients, self, sizes)
        num_parts = _num_parts(sizes, arrays[0])
        cut = tuple(x.reshape(num_parts, -1, *x.shape[1:]) for x in arrays)
        of_inputs = (queries.arrays[0], *keys.arrays)
        return tuple(
            found.reshape(like.shape)
            for found, like in zip(by_part(part, cut), of_inputs, strict=True)
        )


def _part_gradients(splash: Splash, sizes: _Sizes, arrays: tuple) -> tuple:
    """Return the gradients of some kv heads, BGTH and B1SH, of one piece of keys each.

    The queries' are added up over the pieces in fp32.
    """
    q, output, lse, dy, k, v, *ids = arrays
    num_pieces = k.shape[2] // sizes.keys
    kernel = _kernel(sizes, splash.mask, splash.interpret)

    def one(k: jax.Array, v: jax.Array, *key_ids: jax.Array) -> tuple:
        with jax.named_scope(_scope(kernel.dkv_mask_info, q, k, v, kernel)):
            of_kernel = functools.partial(_gradients, kernel)
            segments = (ids[0], *key_ids) if ids else (None, None)
            return _mapped(of_kernel, (q, k, v, output, lse, dy), *segments)

    of_keys = (k, v, *ids[1:])
    if num_pieces == 1:
        return one(*of_keys)

    def add(dq: jax.Array, piece: tuple) -> tuple[jax.Array, tuple]:
        more, dk, dv = one(*piece)
        return dq + more, (dk, dv)

    dims = (2, 2, 1)  # of tokens
    pieces = tuple(
        jnp.stack(jnp.split(x, num_pieces, dim))
        for x, dim in zip(of_keys, dims, strict=False)
    )
    dq, found = lax.scan(add, jnp.zeros(q.shape, jnp.float32), pieces)
    # (pieces, B, 1, S of one, H) -> B1SH
    whole = (
        jnp.moveaxis(x, 0, 2).reshape(like.shape)
        for x, like in zip(found, (k, v), strict=True)
    )
    return dq.astype(q.dtype), *whole


class _Sizes(NamedTuple):
    """Sizes of a kernel.

    Args:
        queries, keys: Tokens of a sequence, or keys of a piece of it.
        heads: Query heads.
        head_dim: Size of a head.
        block: Queries of a tile.
        key_block: Keys of a tile.
        num_backward: Kernels of the backward, 1 or 2; 0 if this is the forward.
    """

    queries: int
    keys: int
    heads: int
    head_dim: int
    block: int
    key_block: int
    num_backward: int

    @property
    def blocks(self) -> kernels.BlockSizes:
        """JAX's options of tiles."""
        block, key_block = self.block, self.key_block
        options: dict[str, Any] = {
            "block_q": block,
            "block_kv": key_block,
            "block_kv_compute": key_block,
        }
        if self.num_backward:
            options |= {"block_q_dkv": block, "block_kv_dkv": key_block}
        if self.num_backward == 1:
            # Of twice as many keys a half at a time, whose scores fit in VMEM.
            half = block_size(key_block, largest_block(self.head_dim) // 2)
            options |= {"block_kv_dkv_compute": half, "use_fused_bwd_kernel": True}
        if self.num_backward == 2:
            options |= {"block_q_dq": block, "block_kv_dq": key_block}
        return kernels.BlockSizes(**options)


def _sizes(q: jax.Array, k: jax.Array, *, num_backward: int = 0) -> _Sizes:
    """Return the sizes of a kernel of q BNTH and k BKSH, in the largest tiles."""
    (_, heads, tokens, head_dim), keys = q.shape, k.shape[2]
    most = largest_block(head_dim)
    blocks = block_size(tokens, most), block_size(keys, most)
    return _Sizes(tokens, keys, heads, head_dim, *blocks, num_backward)


def backward_sizes(q: jax.Array, k: jax.Array, mask: Mask) -> _Sizes:
    """Return the sizes of the kernels of a backward, one if partial sums allow it."""
    (_, heads, tokens, head_dim), keys = q.shape, k.shape[2]
    masked = mask.causal or mask.window is not None
    fused = fuses_backward(
        tokens,
        keys,
        group=heads,
        head_dim=head_dim,
        masked=masked,
        window=mask.window,
    )
    if not fused:
        return _sizes(q, k, num_backward=2)
    key_block = block_size(keys, largest_key_block(keys, head_dim, masked=masked))
    found = _sizes(q, k, num_backward=1)._replace(key_block=key_block)
    if masked:
        return found
    sizes = {"group": heads, "head_dim": head_dim, "key_block": key_block}
    return found._replace(keys=keys // num_key_pieces(tokens, keys, **sizes))


def block_size(tokens: int, most: int) -> int:
    """Return a tile's tokens: as many lanes as divide `tokens`, up to `most`."""
    sizes = range(SPLASH_LANES, max(SPLASH_LANES, min(tokens, most)) + 1, SPLASH_LANES)
    return max(size for size in sizes if tokens % size == 0)


def _num_parts(sizes: _Sizes, q: jax.Array) -> int:
    """Return the parts of kv heads that a backward takes one after another."""
    if sizes.num_backward != 1:
        return 1
    each = partial_bytes(
        sizes.queries,
        sizes.keys,
        group=sizes.heads,
        head_dim=sizes.head_dim,
        key_block=sizes.key_block,
    )
    most, heads = max(2, PARTIAL_BYTES // each), len(q)
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= most)


def _mapped(function: Callable, arrays: tuple[jax.Array, ...], *ids: Any) -> Any:
    """Map `function` over the examples, with the documents of each if there are any."""
    if ids[0] is None or ids[1] is None:
        return jax.vmap(function)(*arrays)
    return jax.vmap(function)(*arrays, kernels.SegmentIds(*ids))


def _scope(info: Any, q: jax.Array, k: jax.Array, v: jax.Array, kernel: Any) -> str:
    """Return the scope that names the work of q BNTH and k, v BKSH by mask tables."""
    blocks = kernel.kwargs["block_sizes"]
    block, key_block = blocks.block_q, blocks.block_kv
    tiles = (q.shape[2] // block) * (k.shape[2] // key_block)
    # Tiles that the kernel skips are 0 in its table.
    if info.block_mask is not None:
        tiles = int(np.count_nonzero(info.block_mask)) // len(info.block_mask)
    pairs = q.shape[0] * q.shape[1] * tiles * block * key_block
    fused = blocks.use_fused_bwd_kernel
    return splash_scope(pairs, q.shape[-1], v.shape[-1], fused=fused)


@functools.lru_cache(maxsize=64)
def _kernel(sizes: _Sizes, mask: Mask, interpret: bool) -> Any:
    """Return JAX's kernel, its tables of the mask made."""
    lengths = sizes.queries, sizes.keys
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
            masks.MultiHeadMask([one] * sizes.heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes.blocks,
            save_residuals=sizes.num_backward == 0,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _gradients(
    kernel: Any, q: Any, k: Any, v: Any, output: Any, lse: Any, dy: Any, ids: Any = None
) -> tuple:
    """Return the gradients of q, k and v of one example.

    The public gradient is of a softmax over the keys at hand alone.
    """
    options, tables = kernel.kwargs, (kernel.dq_mask_info, kernel.dkv_mask_info)
    found = kernels._splash_attention_bwd(
        False,
        options["mask_value"],
        options["is_mqa"],
        options["block_sizes"],
        None,
        options["mask_function"],
        None,
        options["interpret"],
        (q, k, v, ids, None, output, lse, *tables),
        dy,
    )
    return found[3:6]


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

    Communicates nothing. Scores and softmax are computed in fp32. The backward computes
    the scores again: in one kernel, or in one for queries and one for keys and values
    (`meshpar.hardware.splash_kernels.fuses_backward`).

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
    mixed = _attend(Splash(mask=mask, interpret=interpret), *heads_first, segments)
    return without_padding(jnp.swapaxes(mixed, 1, 2), segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Splash, *arrays: Any) -> jax.Array:
    """Return BNTH, from q, k, v, and the segments."""
    return _forward(kernel, *arrays)[0]


def _forward(
    kernel: Splash, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, tuple]:
    found = kernel.forward(Side((q,), segments), Side((k, v), segments))
    output, lse = named_results(*found)
    return output, (q, k, v, segments, output, lse)


def _backward(kernel: Splash, kept: tuple, dy: jax.Array) -> tuple:
    q, k, v, segments, output, lse = kept
    queries = Side((q, output, lse, dy), segments)
    return *kernel.backward(queries, Side((k, v), segments)), None


_attend.defvjp(_forward, _backward)


def over_root(q: jax.Array) -> jax.Array:
    """Return queries over the root of their size, as the kernel takes them."""
    return scaled(q, q.shape[-1] ** -0.5)


def without_padding(mixed_BTNH: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Return zeros for tokens of a segment below 0, which the kernel does not mask."""
    if segments is None:
        return mixed_BTNH
    return jnp.where((segments >= 0)[:, :, None, None], mixed_BTNH, 0)
