"""Tensor parallel: what GSPMD cannot be left to do over the vocabulary's mesh axes.

Matmuls need nothing here: the rules lay out the weights and `Scope.constrain` the
activations, and GSPMD inserts one all-reduce per row-parallel output (or, with the
residual stream split along its sequence, one all-gather and one reduce-scatter).
Reference: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model import Scope, spec_axes
from meshpar.rules import auto_mesh_shape


def vocab_lookup(table: jax.Array, tokens: jax.Array, scope: Scope) -> jax.Array:
    """Rows of an embedding table that may be split over the vocabulary.

    Each device looks up the tokens in its part of the table and takes zeros for the
    rest; one all-reduce of batch x seq x embed values over the vocabulary's mesh axes
    adds them up. The backward moves nothing: each device scatters into its own part.

    Args:
        table: (vocab, embed).
        tokens: (batch, seq), whole numbers below vocab.

    Returns:
        (batch, seq, embed).
    """
    if scope.rules is None:
        return table[tokens]
    sizes = auto_mesh_shape()
    spec = scope.rules.spec(("vocab", "embed"), table.shape, mesh_shape=sizes)
    mesh_axes = spec_axes(spec)
    if not mesh_axes:
        return table[tokens]
    replicated = jax.sharding.PartitionSpec()
    return jax.shard_map(
        lambda rows, ids: lax.psum(_own_rows(rows, ids, mesh_axes), mesh_axes),
        in_specs=(spec, replicated),
        out_specs=replicated,
        axis_names=set(mesh_axes),
        check_vma=False,
    )(table, tokens)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy and summed weights, logits split over the vocabulary or not.

    The target's logit is found by comparing indices, not by a gather, so that GSPMD
    keeps every device on its own part of the vocabulary: three all-reduces of
    batch x seq values (maximum, sum of exponentials, target's logit), backward none.

    Args:
        logits: fp32 (batch, seq, vocab).
        targets: (batch, seq), whole numbers below vocab.
        weights: (batch, seq), 0 where a token does not count.
    """
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - highest
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    vocab_index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    hit = vocab_index == targets[..., None]
    target_logit = jnp.sum(jnp.where(hit, shifted, 0.0), axis=-1)
    losses = (log_total - target_logit) * weights
    return jnp.sum(losses), jnp.sum(weights.astype(jnp.float32))


def _own_rows(
    rows: jax.Array, tokens: jax.Array, mesh_axes: tuple[str, ...]
) -> jax.Array:
    sizes = [lax.axis_size(axis) for axis in mesh_axes]
    shard = sum(
        lax.axis_index(axis) * math.prod(sizes[position + 1 :])
        for position, axis in enumerate(mesh_axes)
    )
    local = tokens - shard * rows.shape[0]
    mine = (local >= 0) & (local < rows.shape[0])
    found = rows[jnp.where(mine, local, 0)]
    return jnp.where(mine[..., None], found, 0)
