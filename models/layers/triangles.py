"""Layers of a pair representation: triangle products and attention, and a transition.

Reference: Jumper et al. 2021 (AlphaFold 2), supplement, algorithms 11 to 15.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Scope
from meshpar.models.layers.attention import normal
from meshpar.models.layers.norm import LayerNorm
from meshpar.parallel.grids.pairs import (
    PAIRS,
    Line,
    shared_lines,
    triangle_attention,
    triangle_product,
    whole_lines,
)

PAIR_STREAM = ("batch", "pair_rows", "pair_columns", "embed")
"""Logical axes of the stream: a vector for every two residues."""


class TriangleProduct(nnx.Module):
    """`gate * out(norm(sum_k left_ik right_jk))`, or incoming (algorithms 11 and 12).

    Args:
        embed: Width of a pair's vector.
        channels: Of the product, which all devices that share the pairs divide.
        outgoing: Whether along rows, else along columns.
        epsilon: Of the norms.
        init_std, out_std: Standard deviation of the initial weights, and of those of
            the output.
    """

    def __init__(
        self,
        embed: int,
        channels: int,
        *,
        outgoing: bool,
        epsilon: float,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.outgoing = outgoing
        self.norm = LayerNorm(embed, epsilon=epsilon, rngs=rngs)
        # Left and right, each with its gate.
        self.sides = normal(
            (embed, 4, channels), init_std, ("embed", None, None), rngs=rngs
        )
        self.sides_bias = _gates_open((4, channels), (2, 3))
        self.product_norm = LayerNorm(channels, epsilon=epsilon, rngs=rngs)
        self.out = normal((channels, embed), out_std, (None, "embed"), rngs=rngs)
        self.gate = normal((embed, embed), init_std, ("embed", None), rngs=rngs)
        self.gate_bias = _gates_open((embed,), ())

    def __call__(self, z: jax.Array, scope: Scope) -> jax.Array:
        """(batch, rows, columns, embed) -> alike, before it is constrained."""
        normed = scope.constrain(self.norm(z), PAIR_STREAM)
        sides = jnp.einsum("BIJD,DSC->BIJSC", normed, self.sides[...])
        sides = scope.constrain(sides + self.sides_bias[...], (*PAIRS, None))
        both = sides[..., :2, :] * jax.nn.sigmoid(sides[..., 2:, :])
        left, right = both[..., 0, :], both[..., 1, :]
        product = triangle_product(left, right, scope, outgoing=self.outgoing)
        out = jnp.einsum("BIJC,CD->BIJD", self.product_norm(product), self.out[...])
        gate = jnp.einsum("BIJD,DE->BIJE", normed, self.gate[...])
        gate = scope.constrain(gate + self.gate_bias[...], PAIR_STREAM)
        return jax.nn.sigmoid(gate) * scope.constrain(out, PAIR_STREAM)


class TriangleAttention(nnx.Module):
    """Gated attention along rows, or columns (algorithms 13 and 14).

    Args:
        embed: Width of a pair's vector.
        heads, head_dim: Of attention.
        line: What it goes along.
        epsilon: Of the norm.
        init_std, out_std: Standard deviation of the initial weights, and of those of
            the output.
    """

    def __init__(
        self,
        embed: int,
        *,
        heads: int,
        head_dim: int,
        line: Line,
        epsilon: float,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.line = line
        self.norm = LayerNorm(embed, epsilon=epsilon, rngs=rngs)
        # Queries, keys, values and gates.
        self.qkvg = normal(
            (embed, 4, heads, head_dim),
            init_std,
            ("embed", None, None, None),
            rngs=rngs,
        )
        self.gate_bias = _gates_open((heads, head_dim), ())
        self.bias = normal((embed, heads), init_std, ("embed", None), rngs=rngs)
        self.out = normal(
            (heads, head_dim, embed), out_std, (None, None, "embed"), rngs=rngs
        )

    def __call__(self, z: jax.Array, scope: Scope) -> jax.Array:
        """(batch, rows, columns, embed) -> alike, before it is constrained."""
        normed = scope.constrain(self.norm(z), PAIR_STREAM)
        lines = whole_lines(normed, scope, self.line)
        qkvg = jnp.einsum("BIJD,DSHE->SBIJHE", lines, self.qkvg[...])
        bias = jnp.einsum("BIJD,DH->BIJH", lines, self.bias[...])
        gated = triangle_attention(*qkvg, self.gate_bias[...], bias, scope, self.line)
        out = jnp.einsum("BIJHE,HED->BIJD", gated, self.out[...])
        return shared_lines(out, scope, self.line)


class Transition(nnx.Module):
    """`down(relu(up(norm(z))))` of each pair by itself (algorithm 15)."""

    def __init__(
        self,
        embed: int,
        hidden: int,
        *,
        epsilon: float,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.norm = LayerNorm(embed, epsilon=epsilon, rngs=rngs)
        self.up = normal((embed, hidden), init_std, ("embed", None), rngs=rngs)
        self.up_bias = nnx.Param(jnp.zeros((hidden,)), out_sharding=(None,))
        self.down = normal((hidden, embed), out_std, (None, "embed"), rngs=rngs)

    def __call__(self, z: jax.Array, scope: Scope) -> jax.Array:
        """(batch, rows, columns, embed) -> alike, before it is constrained."""
        normed = scope.constrain(self.norm(z), PAIR_STREAM)
        hidden = jnp.einsum("BIJD,DF->BIJF", normed, self.up[...]) + self.up_bias[...]
        return jnp.einsum("BIJF,FD->BIJD", jax.nn.relu(hidden), self.down[...])


def _gates_open(shape: tuple[int, ...], rows: tuple[int, ...]) -> nnx.Param:
    """Biases of 1 in those rows of gates, else of 0; of 1 everywhere without any."""
    value = jnp.ones(shape)
    if rows:  # not by a scatter, which cannot be born in shards
        each = [jnp.full(shape[1:], float(row in rows)) for row in range(shape[0])]
        value = jnp.stack(each)
    return nnx.Param(value, out_sharding=(None,) * len(shape))
