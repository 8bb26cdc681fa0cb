"""Tensor parallel: vocabulary lookup, cross-entropy, column- and row-parallel matmuls.

The rules lay out the weights and `Scope.constrain` the activations, and GSPMD inserts
one all-reduce per row-parallel output (or, with the residual stream split along its
sequence, one all-gather and one reduce-scatter, which GPUs run in chunks:
`collective_matmul`).
Reference: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer, Shaped

from meshpar.collectives import asked, on_parts, sum_dtype
from meshpar.errors import InputError
from meshpar.model.scope import Scope
from meshpar.parallel.collective_matmul import (
    TokenMatmul,
    gathered_matmul,
    scattered_matmul,
    token_matmul,
)
from meshpar.rules.rules import LogicalAxes, array_split, spec_axes

AnyArray = Array | np.ndarray
"""An array, which outside of a program may be NumPy's."""


def vocab_lookup(
    table: Float[AnyArray, "vocab embed"],
    tokens: Integer[AnyArray, "batch seq"],
    scope: Scope,
) -> Float[Array, "batch seq embed"]:
    """Look up rows of an embedding table that may be split over the vocabulary.

    Each device looks up the tokens in its part of the table and takes zeros for the
    rest; one all-reduce of batch x seq x embed values over the vocabulary's mesh axes
    adds them up. The backward moves nothing: each device scatters into its own part.

    Args:
        table: (vocab, embed).
        tokens: (batch, seq), whole numbers from 0 to vocab - 1.
        scope: Where the function runs.

    Returns:
        (batch, seq, embed); NaN for a token outside the vocabulary, on every layout.

    Raises:
        InputError: The rules split `embed` over a mesh axis of GSPMD.
    """
    split = array_split(scope.rules, ("vocab", "embed"), table.shape)
    refuse_split_embed(split[1], "embedding rows are looked up")
    wide = sum_dtype(table.dtype, scope.platform)
    return _lookup(table, tokens, PartitionSpec(*split), wide)


def refuse_split_embed(mesh_axes: tuple[str, ...], where: str) -> None:
    """Refuse rules that split a token's values where each device needs all of them.

    Args:
        mesh_axes: Mesh axes of GSPMD that the rules map `embed` to.
        where: Words for the operation that needs all values.

    Raises:
        InputError: `mesh_axes` is not empty.
    """
    if mesh_axes:
        raise InputError(
            f"logical axis 'embed' is mapped to {'/'.join(mesh_axes)}, but {where} "
            "whole, all values of a token on each device; map 'embed' to None, and "
            "'mlp' and 'heads' to it",
            key="rules.split_embed",
        )


def cross_entropy(
    logits: Float[Array, "*tokens vocab"],
    targets: Integer[AnyArray, "*tokens"],
    weights: Shaped[AnyArray, "*tokens"],
    scope: Scope,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return summed cross-entropy and summed weights of logits that may be split.

    The target's logit is found by comparing indices, not by a gather, so that GSPMD
    keeps every device on its own part of the vocabulary: three all-reduces of
    batch x seq values (maximum, sum of exponentials, target's logit), backward none.

    Args:
        logits: fp32 (batch, seq, vocab), or with fewer dims of tokens.
        targets: (batch, seq), whole numbers from 0 to vocab - 1. One outside makes the
            loss NaN, unless its weight is 0.
        weights: (batch, seq), 0 where a token does not count.
        scope: Where the function runs.
    """
    with asked("vocab_loss"):
        losses = _token_losses(logits, targets, weights)
    return jnp.sum(losses), jnp.sum(weights.astype(jnp.float32))


def _token_losses(logits: jax.Array, targets: AnyArray, weights: AnyArray) -> jax.Array:
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - highest
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    vocab_index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    hit = vocab_index == as_index(targets)[..., None]
    target_logit = jnp.sum(jnp.where(hit, shifted, 0.0), axis=-1)
    losses = (jnp.log(total) - target_logit) * weights
    known = in_vocab(targets, logits.shape[-1]) | (weights == 0)
    return jnp.where(known, losses, jnp.nan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(
    table: jax.Array, tokens: jax.Array, spec: PartitionSpec, wide: Any
) -> jax.Array:
    mesh_axes, vocab = spec_axes(spec), table.shape[0]

    # NaN stands in here, not outside, where GSPMD for TPUs splits the selection over
    # `embed`: two all-gathers more.
    def local(rows: jax.Array, tokens: jax.Array) -> jax.Array:
        index, mine = _own_rows(rows.shape[0], tokens, mesh_axes)
        known = in_vocab(tokens, vocab)[..., None]
        if not mesh_axes:
            return jnp.where(known, rows[index], jnp.nan)
        own_rows = jnp.where(mine, rows[index], 0)
        # XLA:CPU aborts on a bf16 all-reduce here; one term of the sum is not zero, so
        # that no dtype rounds it.
        with asked("vocab_lookup"):
            summed = lax.psum(own_rows.astype(wide), mesh_axes)
        return jnp.where(known, summed.astype(rows.dtype), jnp.nan)

    return on_parts(
        local,
        table,
        tokens,
        specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        mesh_axes=set(mesh_axes),
    )


def _lookup_backward(
    spec: PartitionSpec, wide: Any, kept: tuple, gradient: jax.Array
) -> tuple[jax.Array, None]:
    # Written out because every device already has the whole gradient: transposing the
    # sum would all-reduce it once more.
    mesh_axes, (table, tokens) = spec_axes(spec), kept

    def local(rows: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        index, mine = _own_rows(rows.shape[0], tokens, mesh_axes)
        # Without the barrier XLA fills the table with zeros before the backward of the
        # blocks, which then runs beside it.
        zero, gradient = lax.optimization_barrier((jnp.float32(0), gradient))
        zeros = jnp.broadcast_to(zero, rows.shape)
        mine_only = jnp.where(mine, gradient, 0).astype(jnp.float32)
        return zeros.at[index].add(mine_only).astype(rows.dtype)

    scattered = on_parts(
        local,
        table,
        tokens,
        gradient,
        specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=spec,
        mesh_axes=set(mesh_axes),
    )
    return scattered, None


_lookup.defvjp(
    lambda table, tokens, spec, wide: (
        _lookup(table, tokens, spec, wide),
        (table, tokens),
    ),
    _lookup_backward,
)


def in_vocab(ids: Integer[AnyArray, "*ids"], vocab: int) -> Bool[AnyArray, "*ids"]:
    """Return True for each id of the vocabulary."""
    ids = as_index(ids)
    return (ids >= 0) & (ids < vocab)


def as_index(ids: Integer[AnyArray, "*ids"]) -> Int32[AnyArray, "*ids"]:
    """Convert token ids to int32; the vocabulary size may not fit their dtype."""
    return ids.astype(jnp.int32)


def _own_rows(
    num_rows: int, tokens: AnyArray, mesh_axes: tuple[str, ...]
) -> tuple[jax.Array, AnyArray]:
    """Return each token's row in this part, and True if it has one: (batch, seq, 1)."""
    local = as_index(tokens) - shard_index(mesh_axes) * num_rows
    mine = (local >= 0) & (local < num_rows)
    return jnp.where(mine, local, 0), mine[..., None]


def shard_index(mesh_axes: tuple[str, ...]) -> jax.Array | int:
    """Return this device's index among those that split a dim, first axis slowest."""
    sizes = [lax.axis_size(axis) for axis in mesh_axes]
    return sum(
        lax.axis_index(axis) * math.prod(sizes[position + 1 :])
        for position, axis in enumerate(mesh_axes)
    )


_WHOLE = ("batch", "seq", "embed")


def column_parallel(
    dims: str,
    x: Float[AnyArray, "batch seq embed"],
    weight: Float[AnyArray, "*weight"],
    out_axes: LogicalAxes,
    scope: Scope,
) -> Float[Array, "batch seq *out"]:
    """Return `einsum(dims, x, weight)` with the whole sequence of `x` on every device.

    If the residual stream is split along its sequence, GSPMD all-gathers batch x seq x
    embed values over those mesh axes, and again in the backward, so that only the split
    stream is kept; the gradient of `x` takes a reduce-scatter of as many values.
    Reference: Korthikanti et al. 2022, section 4.2.2.

    Args:
        dims: Subscripts of the einsum; `x` is (batch, seq, embed).
        x: The input, laid out as the residual stream.
        weight: The matrix, split along its output dims and not along `embed`.
        out_axes: Logical axes of the result.
        scope: Where the function runs.
    """
    if scope.rules is None:
        return jnp.einsum(dims, x, weight)
    how = _in_chunks(dims, x, weight, out_axes, scope, column=True)
    if how is not None:
        return gathered_matmul(how, x, weight)
    return scope.constrain(_matmul(dims, scope.rules, x, weight), out_axes)


def row_parallel(
    dims: str,
    x: Float[AnyArray, "batch seq *hidden"],
    weight: Float[AnyArray, "*weight"],
    axes: LogicalAxes,
    scope: Scope,
) -> Float[Array, "batch seq embed"]:
    """Return `einsum(dims, x, weight)`, to be constrained as the residual stream.

    GSPMD sums the partial products over the mesh axes that split the contracted dims:
    an all-reduce of batch x seq x embed values, or a reduce-scatter if the residual
    stream is split along its sequence. GPUs send those in chunks (`collective_matmul`).

    Args:
        dims: Subscripts of the einsum; `x` is (batch, seq, ...).
        x: The input, with the whole sequence on every device.
        weight: The matrix, split along its contracted dims and not along `embed`.
        axes: Logical axes of `x`.
        scope: Where the function runs.
    """
    how = _in_chunks(dims, x, weight, axes, scope, column=False)
    if how is None:
        return jnp.einsum(dims, x, weight)
    return scattered_matmul(how, x, weight)


def _in_chunks(
    dims: str,
    x: AnyArray,
    weight: AnyArray,
    whole_axes: LogicalAxes,
    scope: Scope,
    *,
    column: bool,
) -> TokenMatmul | None:
    """Return how a matmul runs in chunks of tokens; None if it runs at once."""
    if not scope.sequence_axes:
        return None
    shapes = x.shape, weight.shape
    return token_matmul(dims, shapes, whole_axes, scope, column=column)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(dims: str, rules: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(dims, rules.constrain(x, _WHOLE), weight)


def _backward(
    dims: str, rules: Any, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, Any]:
    x, weight = kept
    x = rules.constrain(x, _WHOLE)
    _, vjp = jax.vjp(lambda x, weight: jnp.einsum(dims, x, weight), x, weight)
    return vjp(dy)


_matmul.defvjp(
    # Written out, as a remat policy of dots would not see a matmul inside `_matmul`.
    lambda dims, rules, x, weight: (
        jnp.einsum(dims, rules.constrain(x, _WHOLE), weight),
        (x, weight),
    ),
    _backward,
)
