"""Multi-head latent attention: keys and values of a narrow latent (DeepSeek-AI 2024).

As training computes it: the latent is expanded to keys and values of every head, and
one rotary key serves all heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from meshpar import Scope
from meshpar.model.token_cache import refuse_uncached
from meshpar.models.layers.attention import attend, normal
from meshpar.models.layers.norm import RMSNorm
from meshpar.models.layers.recomputed import recomputed
from meshpar.models.layers.rope import apply_rope
from meshpar.parallel.reduction import scaled
from meshpar.parallel.tensor import AnyArray, column_parallel, row_parallel

_HEADS = ("batch", "seq", "heads", "head_dim")
_LATENT = ("batch", "residual_seq", None)
_ONE_HEAD = ("batch", "seq", None, None)


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention.

    Args:
        q_rank: Of the latent of queries; 0 for none.
        kv_rank: Of the latent of keys and values.
        nope, rope: Of the parts of a query and a key without and with a position.
        value: Of a value; no more than `nope + rope`.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


class LatentAttention(nnx.Module):
    """Causal self-attention of latents.

    Args:
        embed: Size of the stream.
        heads: Of queries, keys and values.
        sizes: The other sizes.
        frequencies: Rotary frequencies of `sizes.rope`.
        epsilon: Of the latents' norms.
        amplitude: Of the rotated parts of queries and keys (`YarnScaling`).
        score_factor: What scores are multiplied by beside `(nope + rope) ** -0.5`.
        init_std, out_std: Standard deviation of the projections, and of the last one.
    """

    def __init__(
        self,
        embed: int,
        *,
        heads: int,
        sizes: LatentSizes,
        frequencies: np.ndarray,
        epsilon: float,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
        amplitude: float = 1.0,
        score_factor: float = 1.0,
    ) -> None:
        self.sizes, self.frequencies = sizes, tuple(frequencies)
        self.amplitude, self.score_factor = amplitude, score_factor
        query = sizes.nope + sizes.rope
        draw = functools.partial(normal, rngs=rngs)
        norm = functools.partial(RMSNorm, epsilon=epsilon, rngs=rngs)
        per_head = ("heads", "head_dim")
        of_queries = sizes.q_rank or embed
        if sizes.q_rank:
            self.q_down = draw((embed, sizes.q_rank), init_std, ("embed", None))
            self.q_norm = norm(sizes.q_rank, logical_axis=None)
        axes = ("embed" if not sizes.q_rank else None, *per_head)
        self.q = draw((of_queries, heads, query), init_std, axes)
        wide = sizes.kv_rank + sizes.rope
        self.kv_down = draw((embed, wide), init_std, ("embed", None))
        self.kv_norm = norm(sizes.kv_rank, logical_axis=None)
        self.kv = draw(
            (sizes.kv_rank, heads, sizes.nope + sizes.value),
            init_std,
            (None, *per_head),
        )
        self.out = draw(
            (heads, sizes.value, embed), out_std, ("heads", "head_dim", "embed")
        )

    def __call__(
        self, x: Float[AnyArray, "batch seq embed"], scope: Scope
    ) -> Float[AnyArray, "batch seq embed"]:
        """(batch, seq, embed) -> (batch, seq, embed), before it is constrained."""
        # B batch, T seq, D embed, R rank of a latent, N heads, H head_dim.
        if scope.cache is not None:
            return self._cached(x, scope)
        q, k, v = self._projected(x, scope)
        # One kernel for all: values as long as keys, the rest zeros.
        short = q.shape[-1] - v.shape[-1]
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, short)))
        segments = scope.batch.get("segment_ids")
        mixed = attend(q, k, v, scope, causal=True, segments=segments)
        mixed = mixed[..., : self.sizes.value]
        mixed = scope.constrain(mixed, _HEADS)
        return row_parallel("BTNH,NHD->BTD", mixed, self.out[...], _HEADS, scope)

    def _cached(self, x: jax.Array, scope: Scope) -> jax.Array:
        """Attention to cached latents, which are one key and value for all heads.

        What expands a latent is multiplied into the queries and the results instead
        (DeepSeek-AI 2024, section 2.1.2).
        """
        refuse_uncached(True, segments=scope.batch.get("segment_ids"))
        sizes = self.sizes
        q, narrow, shared = self._latents(x, scope)
        rope = self._rope(x.shape[1], scope)
        k_RNH, v_RNH = jnp.split(self.kv[...], [sizes.nope], axis=-1)
        of_latent = jnp.einsum("BTNH,RNH->BTNR", q[..., : sizes.nope], k_RNH)
        q_rope, k_rope = self._rotated(q, shared, rope)
        q = jnp.concatenate([of_latent, q_rope], -1)
        k = jnp.concatenate([narrow[:, :, None], k_rope], -1)
        mixed_BTNR = scope.cache.attend(
            scope.constrain(q, _HEADS),
            k,
            None,
            scope,
            window=None,
            scale=self.score_factor / math.sqrt(sizes.nope + sizes.rope),
            value_size=sizes.kv_rank,
        )
        mixed = jnp.einsum("BTNR,RNH->BTNH", mixed_BTNR, v_RNH)
        return jnp.tensordot(mixed, self.out[...], 2)

    def _latents(
        self, x: jax.Array, scope: Scope
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, the normed latent, and the key that all heads share."""
        sizes, source = self.sizes, x
        if sizes.q_rank:
            source = self.q_norm(_latent(x, self.q_down[...], scope))
        q = column_parallel("BTR,RNH->BTNH", source, self.q[...], _HEADS, scope)
        down = _latent(x, self.kv_down[...], scope)
        # Both parts' gradients lie as the latent does.
        shared = scope.constrain(down[..., sizes.kv_rank :], _LATENT)
        shared = scope.constrain(shared[:, :, None], _ONE_HEAD)
        narrow = scope.constrain(down[..., : sizes.kv_rank], _LATENT)
        return q, self.kv_norm(narrow), shared

    def _projected(
        self, x: jax.Array, scope: Scope
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        sizes = self.sizes
        q, narrow, shared = self._latents(x, scope)
        kv = column_parallel("BTR,RNH->BTNH", narrow, self.kv[...], _HEADS, scope)
        k_nope, v = kv[..., : sizes.nope], kv[..., sizes.nope :]
        rope = self._rope(x.shape[1], scope)
        q_rope, k_rope = self._rotated(q, shared, rope)
        q = jnp.concatenate([q[..., : sizes.nope], q_rope], -1)
        if self.score_factor != 1.0:
            q = scaled(q, self.score_factor)
        whole = (*k_nope.shape[:3], sizes.rope)
        k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, whole)], -1)
        return (
            scope.constrain(q, _HEADS),
            scope.constrain(k, _HEADS),
            scope.constrain(v, _HEADS),
        )

    def _rotated(
        self, q: jax.Array, shared: jax.Array, rope: functools.partial
    ) -> tuple[jax.Array, jax.Array]:
        """The parts of queries and of the shared key that have a position."""
        parts = rope(q[..., self.sizes.nope :]), rope(shared)
        return parts if self.amplitude == 1.0 else scaled(parts, self.amplitude)

    def _rope(self, seq: int, scope: Scope) -> functools.partial:
        positions = scope.batch.get("positions", scope.positions(seq)[None])
        frequencies = np.array(self.frequencies)
        rotate = recomputed(functools.partial(apply_rope, frequencies=frequencies))
        return functools.partial(rotate, positions=positions)


def _latent(x: jax.Array, weight: jax.Array, scope: Scope) -> jax.Array:
    """Return the latents of a device's tokens when the sequence is split.

    They are fewer values than the stream, and are gathered in its place.
    """
    down = jnp.einsum("BTD,DR->BTR", x, weight)
    return scope.constrain(down, _LATENT)
