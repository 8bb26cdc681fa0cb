"""Self-attention with grouped key and value heads (Ainslie et al. 2023)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from meshpar import Scope
from meshpar.hardware.attention_kernels import (
    AttentionChoice,
    AttentionRequest,
    attention_choice,
)
from meshpar.hardware.platforms import platform_named
from meshpar.layout.context_method import merges_softmaxes
from meshpar.layout.layout import ATTENTION_MIXED
from meshpar.model.token_cache import refuse_uncached
from meshpar.models.field_types import check_kv_heads
from meshpar.models.layers.biased_attention import attend_with_bias
from meshpar.models.layers.causal_attention import causal_attention, full_attention
from meshpar.models.layers.norm import RMSNorm
from meshpar.models.layers.recomputed import recomputed
from meshpar.models.layers.rope import apply_rope
from meshpar.parallel.context.attention import kernel_ring, shard_attention
from meshpar.parallel.context.mask import Mask, blockwise
from meshpar.parallel.context.splash import splash_attention
from meshpar.parallel.reduction import scaled
from meshpar.parallel.tensor import AnyArray, column_parallel, row_parallel

_HEADS = ("batch", "seq", "heads", "head_dim")
_KV_HEADS = ("batch", "seq", "kv_heads", "head_dim")
_PER_TOKEN = ("batch", "seq")


class Attention(nnx.Module):
    """Self-attention; one matmul makes queries, keys and values.

    Each of the `kv_heads` groups holds its queries, then its key, then its value, so
    that a split over kv heads splits all three alike and the backward has one partial
    sum, not three.

    Args:
        embed: Size of the residual stream.
        heads, kv_heads: Query heads, and the key/value heads they share.
        head_dim: Size of a head.
        init_std, out_std: Standard deviation of the input and output projections.
        frequencies: Rotary frequencies, or None for no rotary embedding.
        bias, out_bias: Whether the input and output projections have one.
        qk_norm_epsilon: RMS-normalise queries and keys with it; None for no norm.
        causal: Whether a token sees none that follow it.
        window: A token sees those less than so many places away; None for no limit.
        qk_norm_around_one: Whether those norms' parameters are `scale - 1`.
        score_scale: What scores are multiplied by; `head_dim ** -0.5` when None.
        bias_distance: Of `attend_with_bias`, where a bias table is given.

    Raises:
        InputError: `heads` is not a multiple of `kv_heads`.
    """

    def __init__(
        self,
        embed: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
        frequencies: np.ndarray | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_epsilon: float | None = None,
        causal: bool = True,
        window: int | None = None,
        qk_norm_around_one: bool = False,
        score_scale: float | None = None,
        bias_distance: int = 128,
    ) -> None:
        check_kv_heads(heads, kv_heads)
        self.heads, self.group = heads, heads // kv_heads
        self.causal, self.window = causal, window
        self.bias_distance = bias_distance
        # Scores are divided by the root of the head's size: the rest is the queries'.
        self.query_factor = (
            None if score_scale is None else score_scale * math.sqrt(head_dim)
        )
        self.frequencies = None if frequencies is None else tuple(frequencies)
        groups = (kv_heads, self.group + 2, head_dim)
        group_axes = ("kv_heads", None, "head_dim")
        draw = functools.partial(normal, rngs=rngs)
        self.qkv = draw((embed, *groups), init_std, ("embed", *group_axes))
        self.out = draw(
            (heads, head_dim, embed), out_std, ("heads", "head_dim", "embed")
        )
        self.bias = _zeros(groups, group_axes) if bias else None
        self.out_bias = _zeros((embed,), ("embed",)) if out_bias else None
        norm = functools.partial(
            RMSNorm,
            rngs=rngs,
            logical_axis="head_dim",
            around_one=qk_norm_around_one,
        )
        normed = qk_norm_epsilon is not None
        self.q_norm = norm(head_dim, epsilon=qk_norm_epsilon) if normed else None
        self.k_norm = norm(head_dim, epsilon=qk_norm_epsilon) if normed else None

    def __call__(
        self,
        x: Float[AnyArray, "batch seq embed"],
        scope: Scope,
        seen: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> Float[AnyArray, "batch seq embed"]:
        """(batch, seq, embed) -> (batch, seq, embed), before it is constrained.

        Args:
            x: The normed residual stream.
            scope: Where the function runs.
            seen: (batch, seq), False for tokens that none attends to; all when absent.
            bias: (batch, buckets, heads), a table for `attend_with_bias`.
        """
        # B batch, T seq, D embed, K kv heads, G queries per kv head + 2, H head_dim.
        axes = ("batch", "seq", "kv_heads", None, "head_dim")
        qkv_BTKGH = column_parallel("BTD,DKGH->BTKGH", x, self.qkv[...], axes, scope)
        if self.bias is not None:
            qkv_BTKGH = qkv_BTKGH + self.bias[...]
        qkv_BTKGH = scope.save(scope.constrain(qkv_BTKGH, axes), "attention_qkv")
        q, k, v = self._split(qkv_BTKGH, scope)
        if bias is None:
            mixed = attend(
                q,
                k,
                v,
                scope,
                causal=self.causal,
                window=self.window,
                seen=seen,
                segments=scope.batch.get("segment_ids"),
            )
        else:
            mixed = attend_with_bias(
                q,
                k,
                v,
                scope,
                table=bias,
                causal=self.causal,
                distance=self.bias_distance,
                seen=seen,
            )
        out = row_parallel("BTNH,NHD->BTD", mixed, self.out[...], _HEADS, scope)
        return out if self.out_bias is None else out + self.out_bias[...]

    def _split(
        self, qkv_BTKGH: jax.Array, scope: Scope
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, seq, _, _, head_dim = qkv_BTKGH.shape
        q = qkv_BTKGH[:, :, :, : self.group].reshape(batch, seq, self.heads, head_dim)
        k, v = qkv_BTKGH[:, :, :, self.group], qkv_BTKGH[:, :, :, self.group + 1]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.frequencies is not None:
            positions = scope.batch.get("positions", scope.positions(seq)[None])
            frequencies = np.array(self.frequencies)
            rope = recomputed(functools.partial(apply_rope, frequencies=frequencies))
            q, k = rope(q, positions), rope(k, positions)
        if self.query_factor not in (None, 1.0):
            q = scaled(q, self.query_factor)
        return (
            scope.constrain(q, _HEADS),
            scope.constrain(k, _KV_HEADS),
            scope.constrain(v, _KV_HEADS),
        )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scope: Scope,
    *,
    causal: bool,
    window: int | None = None,
    seen: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attention of every query to the keys, on the device that has its head.

    Where devices share a sequence, it communicates as
    `meshpar.parallel.context.attention.shard_attention`.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim).
        v: As `k`.
        scope: Where the function runs.
        causal: Whether a query sees no key that follows it.
        window: A query sees keys less than so many places away; None for no limit.
        seen: (batch, keys), False for keys that no query sees; all when absent.
        segments: (batch, seq), the number of each token's document, of queries and
            keys alike: a query sees keys of its own, and none of a number below 0.
    """
    if scope.cache is not None:
        refuse_uncached(causal, seen=seen, segments=segments)
        scale = 1 / math.sqrt(q.shape[-1])
        return scope.cache.attend(q, k, v, scope, window=window, scale=scale)
    kv_axes = _KV_HEADS
    if not scope.same_layout(_HEADS, _KV_HEADS, q.shape, k.shape):
        # A device's queries need their own keys and values at hand: one each.
        kv_axes, group = _HEADS, q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(part, group, axis=2) for part in (k, v))
        k, v = scope.constrain(k, _HEADS), scope.constrain(v, _HEADS)
    arrays, axes = (q, k, v), (_HEADS, kv_axes, kv_axes)
    mask = Mask(causal=causal, window=window)
    hidden, packed = seen is not None, segments is not None
    choice = attention_choice(_asked(q, k, mask, scope, hidden=hidden, packed=packed))
    fused = _fused(choice, mask)
    masked = packed or (causal and hidden)
    # Splash attention and tiles name it inside, with what else their backward needs.
    named = choice.kernel != "cudnn"
    if fused and choice.runs_in_hops:
        kernel = functools.partial(kernel_ring, mask=mask, order=scope.order)
        more = {"rank": scope.order.rank()} | ({"segments": segments} if packed else {})
    elif scope.order is not None or (
        not fused
        and blockwise(q, k, mask, platform_named(scope.platform), masked=masked)
    ):
        kernel, more = _blockwise(mask, scope, seen, segments, q.shape[:2])
        kernel = functools.partial(kernel, whole=fused)
    elif fused:
        kernel, more = fused, {"segments": segments} if packed else {}
    else:
        kernel, named = causal_attention if causal else full_attention, False
        more = {} if seen is None else {"seen": seen}
    more_axes = [(*_PER_TOKEN[: x.ndim],) for x in more.values()]
    mapped = scope.map_shards(
        lambda q, k, v, *of: kernel(q, k, v, **dict(zip(more, of, strict=True))),
        (*axes, *more_axes),
        _HEADS,
        whole_mesh=choice.kernel == "splash",
    )
    with jax.named_scope(choice.scope_name or "attention"):
        mixed = mapped(*arrays, *more.values())
    mixed = scope.constrain(mixed, _HEADS)
    return mixed if named else scope.save(mixed, ATTENTION_MIXED)


def _blockwise(
    mask: Mask,
    scope: Scope,
    seen: jax.Array | None,
    segments: jax.Array | None,
    queries: tuple[int, ...],
) -> tuple[Callable[..., jax.Array], dict[str, jax.Array]]:
    """Attention in tiles, and the arrays that it takes beside queries and keys."""
    more: dict[str, jax.Array] = {}
    if scope.order is not None:
        more["rank"] = scope.order.rank()
    if segments is not None:
        more |= {"q_segments": segments, "k_segments": segments}
    if seen is not None:
        here = more.get("k_segments", 0)
        more["k_segments"] = jnp.where(seen.astype(bool), here, -1).astype(jnp.int32)
        more.setdefault("q_segments", jnp.zeros(queries, jnp.int32))
    return functools.partial(
        shard_attention, mask=mask, order=scope.order, platform=scope.platform
    ), more


def _asked(
    q: jax.Array, k: jax.Array, mask: Mask, scope: Scope, *, hidden: bool, packed: bool
) -> AttentionRequest:
    """Return the features that a fused kernel needs here."""
    order = scope.order
    ranks = 1 if order is None else order.num_ranks
    method = "" if order is None or ranks == 1 else order.text
    kernel = platform_named(scope.platform).fused_attention
    halves = (jnp.bfloat16,) if kernel == "splash" else (jnp.bfloat16, jnp.float16)
    return AttentionRequest(
        platform=scope.platform,
        half=q.dtype in halves,
        queries=q.shape[1] * ranks,
        keys=k.shape[1] * ranks,
        head_dim=q.shape[-1],
        method=method,
        in_order=mask.causal and order is not None and not order.zigzag,
        chunks=order.num_chunks if order and merges_softmaxes(method) else 1,
        documents=packed,
        window=mask.window is not None,
        hidden=hidden,
        padded=bool(order is not None and order.lengths),
        # Where the GPU is not there, tracing finds no cuDNN to ask.
        absent=kernel == "cudnn" and jax.default_backend() != scope.platform,
        probing=order is not None and order.probing,
        capability=_capability(scope.platform),
        idle_axis=next(iter(scope.idle_axes(_HEADS, q.shape)), ""),
    )


def _capability(platform: str) -> float:
    """Return the compute capability of the local GPU, or 0 without one."""
    kernel = platform_named(platform).fused_attention
    if kernel != "cudnn" or jax.default_backend() != platform:
        return 0.0
    return float(getattr(jax.devices()[0], "compute_capability", 0))


def _fused(choice: AttentionChoice, mask: Mask) -> Callable[..., jax.Array] | None:
    """The chosen kernel, which never keeps the scores; None where there is none."""
    if choice.kernel == "splash":
        return functools.partial(splash_attention, mask=mask)
    if choice.kernel == "cudnn":
        return functools.partial(
            jax.nn.dot_product_attention, is_causal=mask.causal, implementation="cudnn"
        )
    return None


def depth_scaled_std(init_std: float, num_layers: int) -> float:
    """Standard deviation of a residual branch's output (Radford et al. 2019, 2.3)."""
    return init_std / math.sqrt(2 * num_layers)


def normal(
    shape: tuple[int, ...],
    std: float,
    logical_axes: tuple[str | None, ...],
    *,
    rngs: nnx.Rngs,
) -> nnx.Param:
    """A parameter drawn from a normal distribution of mean 0."""
    value = nnx.initializers.normal(std)(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, out_sharding=logical_axes)


def _zeros(shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=logical_axes)
