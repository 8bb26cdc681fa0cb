"""Cross-entropy of a head's matmul, in chunks of tokens that bound the logits.

    loss_sum = sum over tokens of weight * (log(sum(exp(logits))) - logits[target])
    logits = table @ x

The logits of all tokens would be the largest array of a step: batch x seq x vocab in
fp32. Here a loop makes the logits of a chunk of tokens, and at once their gradient and
its products for the input and the table, so that neither outlives its chunk and nothing
is computed twice: the loss is a sum, whose one cotangent scales both gradients later.
Reference: Hsu et al. 2024 (Liger kernels), section 3.2; Wijmans et al. 2024 (cut
cross-entropy).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer, Shaped

from meshpar.collectives import asked, on_parts, sum_dtype
from meshpar.errors import InputError
from meshpar.model.block_run import PERPLEXITY
from meshpar.model.scope import Scope
from meshpar.parallel.remat import equal_chunks
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.parallel.tensor import AnyArray, as_index, in_vocab, shard_index
from meshpar.rules.rules import array_split, degree

_WHOLE = ("batch", "seq", "embed")
_RESIDUAL = ("batch", "residual_seq", "embed")
_LOGITS = ("batch", "seq", "vocab")


def head_cross_entropy(
    x: Float[Array, "batch seq embed"],
    table: Float[AnyArray, "vocab embed"],
    targets: Integer[AnyArray, "batch seq"],
    weights: Shaped[AnyArray, "batch seq"],
    scope: Scope,
    *,
    logits_bytes: int = LOGITS_BYTES,
    terms: bool = False,
) -> tuple[Any, ...]:
    """Return summed cross-entropy of logits `x @ table.T`, and summed weights.

    Each device makes the logits of its part of the vocabulary, in fp32, for as many
    tokens at a time as `logits_bytes` hold. Over the vocabulary's mesh axes: two
    all-reduces of each chunk's tokens (maximum; sum of exponentials and the target's
    logit) and, when differentiated, one all-reduce of batch x seq x embed values. Where
    the same axes split the residual stream's sequence, an all-gather before and a
    reduce-scatter instead.

    Args:
        x: (batch, seq, embed), the head's normed input.
        table: (vocab, embed).
        targets: (batch, seq), whole numbers from 0 to vocab - 1. One outside makes the
            loss NaN, unless its weight is 0.
        weights: (batch, seq), 0 where a token does not count.
        scope: Where the function runs.
        logits_bytes: Most bytes of a device's logits at a time; 0 is no limit.
        terms: Whether to return, as a third value, the terms of a language model's
            head: `accuracy`, the summed weights of tokens whose target has the largest
            logit, and `perplexity`.

    Raises:
        InputError: `logits_bytes` is less than the logits of one token.
    """
    if scope.order is not None and scope.order.probing:
        return jnp.sum(x * weights[..., None]), jnp.sum(weights)
    split = _head_split(x, table, scope)
    logical_axes = _RESIDUAL if split.gathered else _WHOLE
    weights = weights.astype(jnp.float32)
    plan = _Plan(
        split=split,
        num_chunks=_num_chunks(x, table, split, logits_bytes),
        platform=scope.platform,
        counts_hits=terms,
    )
    x = scope.constrain(x, logical_axes)
    loss_sum, *hits = _loss_sum(plan, x, table, targets, weights)
    sums = loss_sum, jnp.sum(weights)
    return (*sums, {"accuracy": hits[0], PERPLEXITY: loss_sum}) if terms else sums


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Splits of tokens and vocabulary over automatic mesh axes.

    Args:
        tokens: Mesh axes that split the sequence throughout.
        gathered: Mesh axes that split the sequence until the head gathers it.
        vocab: Mesh axes that split the vocabulary.
    """

    tokens: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()

    @property
    def x(self) -> PartitionSpec:
        return PartitionSpec(None, (*self.tokens, *self.gathered) or None)

    @property
    def per_token(self) -> PartitionSpec:
        return PartitionSpec(None, self.tokens or None)

    @property
    def table(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None)

    @property
    def mesh_axes(self) -> set[str]:
        return {*self.tokens, *self.gathered, *self.vocab}


def _head_split(x: jax.Array, table: AnyArray, scope: Scope) -> _Split:
    if scope.rules is None:
        return _Split()
    _, tokens, vocab = array_split(scope.rules, _LOGITS, (*x.shape[:2], table.shape[0]))
    residual = tokens
    if "residual_seq" in scope.rules.table:
        residual = array_split(scope.rules, _RESIDUAL, x.shape)[1]
    # Otherwise GSPMD gathers the sequence.
    gathered = vocab if residual == (*tokens, *vocab) else ()
    return _Split(tokens=tokens, gathered=gathered, vocab=vocab)


def _num_chunks(x: jax.Array, table: AnyArray, split: _Split, logits_bytes: int) -> int:
    num_tokens = math.prod(x.shape[:2]) // degree(split.tokens)
    token_bytes = 4 * table.shape[0] // degree(split.vocab)
    if not logits_bytes or not num_tokens:
        return 1
    if logits_bytes < token_bytes:
        raise InputError(
            f"logits_bytes={logits_bytes} is less than the {token_bytes} bytes of one "
            "token's fp32 logits on a device; raise it, or set 0 for no limit",
            key="model.logits_bytes_too_small",
        )
    least = -(-num_tokens // (logits_bytes // token_bytes))
    return equal_chunks(least, num_tokens)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Static arguments of the loss; methods take this device's parts.

    Args:
        split: How tokens and vocabulary are split.
        num_chunks: Chunks that a device's tokens are cut into.
        platform: Kind of device the program is for.
        counts_hits: Whether the weights of tokens predicted right are summed too.
    """

    split: _Split
    num_chunks: int
    platform: str
    counts_hits: bool = False

    def loss(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return the sums of (x, table, targets, weights): loss, hits if counted."""
        x, table, targets, weights = arrays
        totals, _ = self._over_chunks(
            lambda chunk: (self._sums(chunk), None),
            self._gather(x),
            table,
            targets,
            weights,
        )
        return jax.tree.map(self._sum_tokens, totals)

    def _sums(self, chunk: Chunk) -> tuple[jax.Array, ...]:
        return (chunk.loss(), chunk.hits()) if self.counts_hits else (chunk.loss(),)

    def loss_and_gradients(self, *arrays: jax.Array) -> tuple[Any, ...]:
        """Return the sums, and the loss's gradients for x, table (fp32) and weights."""
        x, table, targets, weights = arrays
        whole = self._gather(x)
        summed = sum_dtype(x.dtype, self.platform)
        dx_dtype = summed if self.split.vocab else x.dtype

        def work(chunk: Chunk) -> tuple:
            losses, dlogits = chunk.losses(), chunk.logits_gradient()
            dx = matmul("CV,VD->CD", dlogits, table, dx_dtype)
            dtable = matmul("CV,CD->VD", dlogits, chunk.x, jnp.float32)
            return (self._sums(chunk), dtable), (losses, dx)

        (totals, dtable), (losses, dx) = self._over_chunks(
            work, whole, table, targets, weights
        )
        dx = self._sum_vocab(dx.reshape(whole.shape)).astype(x.dtype)
        dtable, totals = jax.tree.map(self._sum_tokens, (dtable, totals))
        return totals, dx, dtable, losses.reshape(weights.shape)

    def _gather(self, x: jax.Array) -> jax.Array:
        if not self.split.gathered:
            return x
        with asked("head_input_gather"):
            return lax.all_gather(x, self.split.gathered, axis=1, tiled=True)

    def _sum_vocab(self, dx: jax.Array) -> jax.Array:
        if not self.split.vocab:
            return dx
        if not self.split.gathered:
            with asked("head_input_gradient"):
                return lax.psum(dx, self.split.vocab)
        with asked("head_input_gradient_scatter"):
            return lax.psum_scatter(
                dx, self.split.vocab, scatter_dimension=1, tiled=True
            )

    def _sum_tokens(self, value: jax.Array) -> jax.Array:
        if not self.split.tokens:
            return value
        with asked("token_sum"):
            return lax.psum(value, self.split.tokens)

    def _over_chunks(
        self, work: Any, x: jax.Array, table: jax.Array, *arrays: Any
    ) -> Any:
        """Sum the first result of `work` over chunks, and join the second.

        The second result is None, or has the tokens of the chunk first.
        """
        num_tokens = math.prod(x.shape[:2])
        tokens = (x.reshape(num_tokens, x.shape[2]), *(a.reshape(-1) for a in arrays))

        def make_chunk(arrays: tuple) -> Chunk:
            x, targets, weights = arrays
            return Chunk(
                x=x,
                table=table,
                targets=targets,
                weights=weights,
                vocab_axes=self.split.vocab,
            )

        if self.num_chunks == 1:
            return work(make_chunk(tokens))

        def body(sums: Any, arrays: tuple) -> tuple[Any, Any]:
            more, joined = work(make_chunk(arrays))
            return jax.tree.map(jnp.add, sums, more), joined

        def cut(array: jax.Array) -> jax.Array:
            """(tokens, ...) -> (chunks, tokens of a chunk, ...), padded with zeros."""
            missing = -array.shape[0] % self.num_chunks
            if missing:
                array = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
            return array.reshape(self.num_chunks, -1, *array.shape[1:])

        chunks = tuple(map(cut, tokens))
        first = jax.tree.map(lambda array: array[0], chunks)
        shapes = jax.eval_shape(lambda arrays: work(make_chunk(arrays))[0], first)
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        sums, joined = lax.scan(body, zeros, chunks)
        return sums, jax.tree.map(
            lambda array: array.reshape(-1, *array.shape[2:])[:num_tokens], joined
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(plan: _Plan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    split = plan.split
    return on_parts(
        plan.loss,
        *arrays,
        specs=(split.x, split.table, split.per_token, split.per_token),
        out_specs=PartitionSpec(),
        mesh_axes=split.mesh_axes,
    )


def _loss_forward(plan: _Plan, *arrays: jax.Array) -> tuple[tuple, tuple]:
    split, (_, table, _, _) = plan.split, arrays
    totals, *kept = on_parts(
        plan.loss_and_gradients,
        *arrays,
        specs=(split.x, split.table, split.per_token, split.per_token),
        out_specs=(PartitionSpec(), split.x, split.table, split.per_token),
        mesh_axes=split.mesh_axes,
    )
    return totals, (*kept, jnp.zeros((), table.dtype))


def _loss_backward(plan: _Plan, kept: tuple, scales: tuple[jax.Array, ...]) -> tuple:
    scale = scales[0]
    dx, dtable, losses, table_like = kept
    return (
        (dx * scale).astype(dx.dtype),
        (dtable * scale).astype(table_like.dtype),
        None,
        losses * scale,
    )


_loss_sum.defvjp(_loss_forward, _loss_backward)


class Chunk:
    """Cross-entropy of some tokens over this device's part of the vocabulary."""

    def __init__(
        self,
        *,
        x: jax.Array,
        table: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        vocab_axes: tuple[str, ...],
    ) -> None:
        # C tokens of the chunk, V vocab (local), D embed.
        self.x, self._weights = x, weights
        num_rows = table.shape[0]
        logits_CV = matmul("CD,VD->CV", x, table, jnp.float32)
        highest = jnp.max(logits_CV, axis=-1)
        with asked("vocab_loss"):
            highest = lax.pmax(highest, vocab_axes) if vocab_axes else highest
        shifted_CV = logits_CV - highest[:, None]
        row = as_index(targets) - num_rows * shard_index(vocab_axes)
        # By comparing indices instead of a gather, as in `tensor.cross_entropy`.
        index = lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)
        hit_CV = index == row[:, None]
        self._exp_CV, self._hit_CV = jnp.exp(shifted_CV), hit_CV
        sums = (
            jnp.sum(self._exp_CV, axis=-1),
            jnp.sum(jnp.where(hit_CV, shifted_CV, 0.0), axis=-1),
        )
        if vocab_axes:
            with asked("vocab_loss"):
                sums = tuple(lax.psum(jnp.stack(sums), vocab_axes))
        self._total, self._target = sums
        vocab = num_rows * math.prod(lax.axis_size(axis) for axis in vocab_axes)
        self._known = in_vocab(targets, vocab) | (weights == 0)

    def losses(self) -> jax.Array:
        """Return the unweighted loss of each token, the gradient for its weight."""
        return jnp.where(self._known, jnp.log(self._total) - self._target, 0.0)

    def loss(self) -> jax.Array:
        """Return the weighted sum; NaN if a counted target is out of the vocabulary."""
        weighted = self.losses() * self._weights
        return jnp.sum(jnp.where(self._known, weighted, jnp.nan))

    def hits(self) -> jax.Array:
        """Return the sum of the weights of tokens whose target's logit is the largest.

        Equals the largest, that is: a target that shares its logit counts.
        """
        is_hit = self._known & (self._target >= 0)
        return jnp.sum(jnp.where(is_hit, self._weights, 0.0))

    def logits_gradient(self) -> jax.Array:
        """Return (softmax - one-hot) * weight, in the dtype of `x`."""
        scale = jnp.where(self._known, self._weights, 0.0)[:, None]
        softmax_CV = self._exp_CV / self._total[:, None]
        return ((softmax_CV - self._hit_CV) * scale).astype(self.x.dtype)


def matmul(dims: str, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(dims, left, right, preferred_element_type=dtype)
