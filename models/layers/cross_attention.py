"""Attention of one sequence to another (Vaswani et al. 2017, section 3.2.3)."""

from __future__ import annotations

import math

import jax
from flax import nnx

from meshpar import Scope
from meshpar.models.layers.attention import attend, normal
from meshpar.parallel.reduction import scaled
from meshpar.parallel.tensor import column_parallel, row_parallel


class CrossAttention(nnx.Module):
    """Queries of one stream, keys and values of another, which are one matmul.

    Args:
        embed: Size of both streams.
        heads: Of queries, keys and values.
        head_dim: Size of a head.
        init_std, out_std: Standard deviation of the input and output projections.
        score_scale: What scores are multiplied by; `head_dim ** -0.5` when None.
    """

    def __init__(
        self,
        embed: int,
        *,
        heads: int,
        head_dim: int,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
        score_scale: float | None = None,
    ) -> None:
        self.query_factor = (
            None if score_scale is None else score_scale * math.sqrt(head_dim)
        )
        self.q = normal(
            (embed, heads, head_dim),
            init_std,
            ("embed", "heads", "head_dim"),
            rngs=rngs,
        )
        self.kv = normal(
            (embed, heads, 2, head_dim),
            init_std,
            ("embed", "heads", None, "head_dim"),
            rngs=rngs,
        )
        self.out = normal(
            (heads, head_dim, embed), out_std, ("heads", "head_dim", "embed"), rngs=rngs
        )

    def __call__(
        self,
        x: jax.Array,
        other: jax.Array,
        scope: Scope,
        seen: jax.Array | None = None,
    ) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed), before it is constrained.

        Args:
            x: The normed stream that asks.
            other: (batch, keys, embed), the one that is read; no keys where a cache has
                them.
            scope: Where the function runs.
            seen: (batch, keys), False for what is not read; all is when absent. A
                cache knows by itself.
        """
        # B batch, T seq, S keys, D embed, N heads, P key and value, H head_dim.
        heads = ("batch", "seq", "heads", "head_dim")
        pairs = ("batch", "seq", "heads", None, "head_dim")
        q = column_parallel("BTD,DNH->BTNH", x, self.q[...], heads, scope)
        q = scope.save(q, "cross_q")
        if self.query_factor not in (None, 1.0):
            q = scaled(q, self.query_factor)
        kv_BSNPH = column_parallel("BSD,DNPH->BSNPH", other, self.kv[...], pairs, scope)
        kv_BSNPH = scope.save(kv_BSNPH, "cross_kv")
        k, v = (scope.constrain(kv_BSNPH[:, :, :, at], heads) for at in (0, 1))
        if scope.cache is not None:
            scale = 1 / math.sqrt(q.shape[-1])
            mixed = scope.cache.attend_to_source(q, k, v, scope, scale=scale)
        else:
            mixed = attend(q, k, v, scope, causal=False, seen=seen)
        return row_parallel("BTNH,NHD->BTD", mixed, self.out[...], heads, scope)
