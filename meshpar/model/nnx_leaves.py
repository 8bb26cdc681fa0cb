"""The arrays of a Flax NNX module: which are parameters, which are state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """One array of a module.

    Args:
        path: Keys of where it stands.
        template: Its variable, or None for an array that stands by itself.
        role: `param`, `constant` (of integers or booleans), `state`, `random` or
            `fixed`, a NumPy array that every build has alike.
        value: Shape and dtype, or the NumPy array itself if it is `fixed`.
    """

    path: tuple
    template: nnx.Variable | None
    role: str
    value: Any

    @property
    def name(self) -> str:
        """Its path, as in `attention.query.kernel`."""
        return name_of(self.path)

    @property
    def initial(self) -> jax.Array:
        """Zeros in place of a stream's key or count, which no method may draw from.

        Made where they are used: an array made as the module is built starts JAX.
        """
        return jnp.zeros(self.value.shape, self.value.dtype)


def name_of(path: tuple) -> str:
    """Keys of where an array stands as one name, as in `attention.query.kernel`."""
    return ".".join(map(str, path))


def leaf_of(path: tuple, leaf: Any, shape: Any, what: str) -> Leaf:
    """One array of a module that is being traced.

    Args:
        path: Keys of where it stands.
        leaf: The variable, or the array that stands by itself.
        shape: Its shape and dtype.
        what: The argument of `from_nnx`, in words.

    Raises:
        InputError: It is a random key.
    """
    template = leaf.replace(None) if isinstance(leaf, nnx.Variable) else None
    if isinstance(leaf, nnx.RngState):
        return Leaf(path, template, "random", shape)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise InputError(
            f"{what}: the module holds a random key {name_of(path)!r} of its own; "
            "draw with scope.dropout or scope.key, which every layout does alike",
            key="model.own_random_key",
        )
    if isinstance(leaf, np.ndarray):
        return Leaf(path, None, "fixed", leaf)
    if not isinstance(leaf, nnx.Param):
        return Leaf(path, template, "state", shape)
    role = "param" if jnp.issubdtype(shape.dtype, jnp.inexact) else "constant"
    return Leaf(path, template, role, shape)


def in_full(template: nnx.Variable | None) -> bool:
    """Whether a variable was made with `in_full=True` (`Parameter`)."""
    return template is not None and bool(template.get_metadata().get("in_full", False))


def value_of(leaf: Any) -> Any:
    """The array of a variable, or the array itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
