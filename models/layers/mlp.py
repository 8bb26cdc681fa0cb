"""The two MLPs: gated (SwiGLU, GeGLU) and plain (GELU)."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from meshpar import Scope
from meshpar.models.layers.recomputed import recomputed
from meshpar.parallel.remat import in_token_chunks
from meshpar.parallel.tensor import AnyArray, column_parallel, row_parallel

# Both operands of the contraction over `mlp` are constrained, the hidden values too:
# otherwise GSPMD may gather the weight in the backward where it is the smaller one.
_HIDDEN = ("batch", "seq", "mlp")

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020); gate and up are one matmul.

    Args:
        embed, hidden: Sizes.
        init_std, out_std: Standard deviation of the initial weights, and of those of
            the output.
        activation: In place of `silu`.
    """

    def __init__(
        self,
        embed: int,
        hidden: int,
        *,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
        activation: Activation = "silu",
    ) -> None:
        draw = nnx.initializers.normal
        self.activation = activation
        self.gate_up = nnx.Param(
            draw(init_std)(rngs.params(), (embed, 2, hidden), jnp.float32),
            out_sharding=("embed", None, "mlp"),
        )
        self.down = nnx.Param(
            draw(out_std)(rngs.params(), (hidden, embed), jnp.float32),
            out_sharding=("mlp", "embed"),
        )

    def __call__(
        self, x: Float[AnyArray, "batch seq embed"], scope: Scope
    ) -> Float[AnyArray, "batch seq embed"]:
        """(batch, seq, embed) -> (batch, seq, embed), before it is constrained."""
        # B batch, T seq, D embed, P gate and up, F mlp.
        axes = ("batch", "seq", None, "mlp")

        def mix_tokens(weights: tuple, x: jax.Array) -> jax.Array:
            gate_up, down = weights
            both_BTPF = column_parallel("BTD,DPF->BTPF", x, gate_up, axes, scope)
            both_BTPF = scope.save(both_BTPF, "mlp_gate_up")
            hidden_BTF = scope.constrain(
                recomputed(_gated, self.activation)(both_BTPF), _HIDDEN
            )
            hidden_BTF = scope.save(hidden_BTF, "mlp_hidden")
            return row_parallel("BTF,FD->BTD", hidden_BTF, down, _HIDDEN, scope)

        weights = self.gate_up[...], self.down[...]
        widest = (*x.shape[:2], *weights[0].shape[1:])
        return in_token_chunks(
            mix_tokens, weights, x, scope, widest=widest, widest_axes=axes
        )


class PlainMLP(nnx.Module):
    """`down(gelu(up(x)))` with biases.

    Args:
        embed, hidden: Sizes.
        init_std, out_std: Standard deviation of the initial weights, and of those of
            the output.
        activation: GELU by tanh as GPT-2 has it, or another.
        bias: Whether there are biases.
    """

    def __init__(
        self,
        embed: int,
        hidden: int,
        *,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
        activation: Activation = "gelu_tanh",
        bias: bool = True,
    ) -> None:
        draw = nnx.initializers.normal
        self.activation = activation
        self.up = nnx.Param(
            draw(init_std)(rngs.params(), (embed, hidden), jnp.float32),
            out_sharding=("embed", "mlp"),
        )
        self.up_bias = (
            nnx.Param(jnp.zeros((hidden,)), out_sharding=("mlp",)) if bias else None
        )
        self.down = nnx.Param(
            draw(out_std)(rngs.params(), (hidden, embed), jnp.float32),
            out_sharding=("mlp", "embed"),
        )
        self.down_bias = (
            nnx.Param(jnp.zeros((embed,)), out_sharding=("embed",)) if bias else None
        )

    def __call__(
        self, x: Float[AnyArray, "batch seq embed"], scope: Scope
    ) -> Float[AnyArray, "batch seq embed"]:
        """(batch, seq, embed) -> (batch, seq, embed), before it is constrained."""

        # B batch, T seq, D embed, F mlp.
        def mix_tokens(weights: tuple, x: jax.Array) -> jax.Array:
            up, up_bias, down, down_bias = weights
            up_BTF = column_parallel("BTD,DF->BTF", x, up, _HIDDEN, scope)
            up_BTF = up_BTF if up_bias is None else up_BTF + up_bias
            up_BTF = scope.save(scope.constrain(up_BTF, _HIDDEN), "mlp_up")
            hidden_BTF = scope.constrain(
                recomputed(_activated, self.activation)(up_BTF), _HIDDEN
            )
            hidden_BTF = scope.save(hidden_BTF, "mlp_hidden")
            down_BTD = row_parallel("BTF,FD->BTD", hidden_BTF, down, _HIDDEN, scope)
            return down_BTD if down_bias is None else down_BTD + down_bias

        parameters = self.up, self.up_bias, self.down, self.down_bias
        weights = tuple(None if one is None else one[...] for one in parameters)
        widest = (*x.shape[:2], self.up.shape[1])
        return in_token_chunks(
            mix_tokens, weights, x, scope, widest=widest, widest_axes=_HIDDEN
        )


def _gated(activation: str, both_BTPF: jax.Array) -> jax.Array:
    return ACTIVATIONS[activation](both_BTPF[:, :, 0]) * both_BTPF[:, :, 1]


def _activated(activation: str, up_BTF: jax.Array) -> jax.Array:
    return ACTIVATIONS[activation](up_BTF)
