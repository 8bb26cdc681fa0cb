"""Parameters, and arrays of state, before they exist; and parameters as matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.rules.rules import LogicalAxes
from meshpar.rules.sharding import path_name

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, or one array of state, before it exists.

    Args:
        shape: Global shape, of one layer where it belongs to blocks.
        dtype: Dtype of its initial value. A training step stores a parameter of real
            numbers in the layout's `param_dtype`.
        logical_axes: A name, or None, for each dim.
        initial: Key -> the initial value, of `shape`; None where a module's build
            gives it with all others (`Model.build`).
        num_layers: Layers that it is stacked over, on a leading dim; None outside
            blocks.
        layer_order: The layer at each place of that dim, -1 for a place without one;
            first to last when absent.
        in_full: Whether it is stored and used in fp32, whatever the layout's
            `param_dtype` and `precision`.
    """

    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes
    initial: Callable[[jax.Array], jax.Array] | None = None
    num_layers: int | None = None
    layer_order: tuple[int, ...] | None = None
    in_full: bool = False

    @property
    def places(self) -> tuple[int, ...]:
        """The layer at each place of the leading dim; () outside blocks."""
        return self.layer_order or tuple(range(self.num_layers or 0))

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Global shape with the `layers` dim."""
        return (*self._leading, *self.shape)

    @property
    def stacked_axes(self) -> LogicalAxes:
        """Logical axes with the `layers` dim."""
        return (*(("layers",) if self._leading else ()), *self.logical_axes)

    @property
    def _leading(self) -> tuple[int, ...]:
        return () if self.num_layers is None else (len(self.places),)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype as JAX wants them."""
        return jax.ShapeDtypeStruct(self.stacked_shape, self.dtype)


def flat(tree: Any) -> dict[str, Parameter]:
    """Return path such as `blocks.mlp.down` -> leaf, in tree order."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_parameter)
    return {path_name(path): leaf for path, leaf in leaves}


def is_parameter(node: object) -> bool:
    """Return True if a node of the parameter tree is a `Parameter`."""
    return isinstance(node, Parameter)


_STREAM = "embed"
"""The logical axis that a matrix leads from or to."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A parameter as a matrix from some of its dims to the others.

    Args:
        parameter: The parameter.
        num_batch: Number of leading dims with a matrix for each place: experts.
        num_inputs: Number of dims after those that are inputs; the rest are outputs.
    """

    parameter: Parameter
    num_batch: int
    num_inputs: int

    @classmethod
    def from_parameter(cls, parameter: Parameter) -> Matrix | None:
        """Return the matrix from or to the residual stream; None if it is none.

        A parameter that is always used in fp32, such as a router, is none.
        """
        axes = parameter.logical_axes
        num_batch = int(bool(axes) and axes[0] == "experts")
        own = axes[num_batch:]
        if len(own) < 2 or parameter.in_full or _STREAM not in (own[0], own[-1]):
            return None
        num_inputs = 1 if own[0] == _STREAM else len(own) - 1
        return cls(parameter=parameter, num_batch=num_batch, num_inputs=num_inputs)

    def product(self, a: Any, b: Any) -> jax.Array:
        """Return A B in fp32, in the parameter's shape."""
        return jnp.einsum(self.formula(), a, b, preferred_element_type=jnp.float32)

    def formula(self, batch: str = "") -> str:
        """Return the formula of `einsum` for a product A B.

        Args:
            batch: Letters of dims before those of the parameter.

        Example:
            >>> one = Parameter(
            ...     shape=(4, 8, 32), dtype=float, logical_axes=("heads", None, "embed")
            ... )
            >>> Matrix.from_parameter(one).formula()
            'abz,zc->abc'
        """
        dims = "abcdefgh"[: len(self.parameter.shape)]
        first = self.num_batch + self.num_inputs
        shared, inputs = dims[: self.num_batch], dims[:first]
        return f"{batch}{inputs}z,{batch}{shared}z{dims[first:]}->{batch}{dims}"
