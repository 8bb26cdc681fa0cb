"""The function of an expert on a tile of its rows, forward and backward.

`GatedMLP` keeps its products with `gate_up` for the backward. An `ExpertFunction` is
any function of one expert's arrays, and its backward runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named

Arrays = tuple[jax.Array, ...]
"""Arrays of one expert."""


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """`weight * down(silu(gate(x)) * up(x))`; its arrays are gate_up_DPF and down_FD.

    Args:
        platform: Kind of device.
    """

    platform: str

    def forward(
        self, arrays: Arrays, x_TD: jax.Array, weight_T: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        """Return the weighted results, and the products with `gate_up`, (T, 2, F)."""
        gate_up_DPF, down_FD = arrays
        both = jnp.einsum("TD,DPF->TPF", x_TD, gate_up_DPF)
        return jnp.einsum("TF,FD->TD", _swiglu(both, weight_T), down_FD), (both,)

    def backward(
        self,
        arrays: Arrays,
        x_TD: jax.Array,
        weight_T: jax.Array,
        kept: Arrays,
        dy_TD: jax.Array,
        own_T: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        """Return gradients of `x`, `weight`, and in fp32 of the arrays.

        Args:
            arrays: As for `forward`.
            x_TD: As for `forward`.
            weight_T: As for `forward`.
            kept: Products that `forward` returned.
            dy_TD: Gradient of the results, 0 in rows of other experts.
            own_T: True for rows of this expert.
        """
        gate_up_DPF, down_FD = arrays
        acted, pull = jax.vjp(_swiglu, *kept, weight_T)
        dacted = jnp.einsum("TD,FD->TF", dy_TD, down_FD)
        ddown = self._wide("TF,TD->FD", acted, dy_TD)
        dboth, dweight = pull(dacted)
        dgate_up = self._wide("TD,TPF->DPF", x_TD, dboth)
        dx = jnp.einsum("TPF,DPF->TD", dboth, gate_up_DPF)
        return dx, dweight, (dgate_up, ddown)

    def _wide(self, dims: str, left: jax.Array, right: jax.Array) -> jax.Array:
        # XLA:CPU has no fp32 product of narrower operands in a loop.
        if not platform_named(self.platform).sums_16_bits:
            left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)


@dataclass(frozen=True, kw_only=True)
class ExpertFunction:
    """`weight * function(arrays of one expert, x)`, of each row by itself.

    Args:
        function: (tree of one expert's arrays, (rows, embed)) -> (rows, embed).
        structure: Structure of the tree, whose leaves the arrays are.
    """

    function: Callable[[Any, jax.Array], jax.Array]
    structure: Any

    def check(self, arrays: Arrays, x_ND: jax.Array) -> None:
        """Raise if the function does not suit the arrays of all experts and tokens.

        Raises:
            InputError: It returns another shape than its rows have, or reads arrays
                that are no arguments.
        """
        tree = self.structure.unflatten([array[0] for array in arrays])
        shape = jnp.shape(jax.eval_shape(self.function, tree, x_ND))
        if shape != x_ND.shape:
            raise InputError(
                f"experts: function returns shape {shape} for rows of shape "
                f"{x_ND.shape}; return a row of the same size for each row",
                key="model.wrong_expert_result",
            )
        _, closed_over = jax.closure_convert(self.function, tree, x_ND)
        if closed_over:
            raise InputError(
                "experts: function reads an array of shape "
                f"{closed_over[0].shape} that is no argument, whose gradient would be "
                "lost; put it into kernels, with the experts as its first dim",
                key="model.expert_reads_array",
            )

    def forward(
        self, arrays: Arrays, x_TD: jax.Array, weight_T: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        """Return the weighted results; nothing is kept."""
        y = self.function(self.structure.unflatten(arrays), x_TD)
        weighted = y.astype(jnp.float32) * weight_T[:, None]
        return weighted.astype(x_TD.dtype), ()

    def backward(
        self,
        arrays: Arrays,
        x_TD: jax.Array,
        weight_T: jax.Array,
        kept: Arrays,
        dy_TD: jax.Array,
        own_T: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        """Return gradients as `GatedMLP.backward` does.

        Other experts' rows are replaced by this expert's first one: at a row of zeros
        the function may have no derivative.
        """
        x_TD = jnp.where(own_T[:, None], x_TD, x_TD[:1])
        _, pull = jax.vjp(
            lambda *given: self.forward(*given)[0], arrays, x_TD, weight_T
        )
        darrays, dx, dweight = pull(dy_TD)
        return dx, dweight, tuple(array.astype(jnp.float32) for array in darrays)


Function = GatedMLP | ExpertFunction


def _swiglu(both_TPF: jax.Array, weight_T: jax.Array) -> jax.Array:
    both = both_TPF.astype(jnp.float32)
    acted = jax.nn.silu(both[:, 0]) * both[:, 1] * weight_T[:, None]
    return acted.astype(both_TPF.dtype)
