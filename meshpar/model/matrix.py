"""A parameter as a matrix: which of its dims are inputs, and which outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.parameter import Parameter

_STREAM = "embed"
"""The logical axis that a matrix leads from or to."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A parameter as a matrix from some of its dims to the others.

    Args:
        parameter: It.
        num_batch: Leading dims that each have a matrix of their own: experts.
        num_inputs: Dims after those that are inputs; what is left are outputs.
    """

    parameter: Parameter
    num_batch: int
    num_inputs: int

    @classmethod
    def of(cls, parameter: Parameter) -> Matrix | None:
        """The matrix that leads from the residual stream or to it; None if it is none.

        What is used in fp32 whatever the layout, such as a router, stays as it is.
        """
        axes = parameter.logical_axes
        num_batch = int(bool(axes) and axes[0] == "experts")
        own = axes[num_batch:]
        if len(own) < 2 or parameter.in_full or _STREAM not in (own[0], own[-1]):
            return None
        num_inputs = 1 if own[0] == _STREAM else len(own) - 1
        return cls(parameter=parameter, num_batch=num_batch, num_inputs=num_inputs)

    def product(self, a: Any, b: Any) -> jax.Array:
        """A B in fp32, in the parameter's shape."""
        return jnp.einsum(self.formula(), a, b, preferred_element_type=jnp.float32)

    def formula(self, batch: str = "") -> str:
        """Of `einsum`, with dims before those of the parameter.

        Example:
            >>> one = Parameter(
            ...     shape=(4, 8, 32), dtype=float, logical_axes=("heads", None, "embed")
            ... )
            >>> Matrix.of(one).formula()
            'abz,zc->abc'
        """
        dims = "abcdefgh"[: len(self.parameter.shape)]
        first = self.num_batch + self.num_inputs
        shared, inputs = dims[: self.num_batch], dims[:first]
        return f"{batch}{inputs}z,{batch}{shared}z{dims[first:]}->{batch}{dims}"
