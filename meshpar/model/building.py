"""Modules built under a mesh: the same bits on every layout, and never whole for long.

Values that are drawn and only mapped, one by one, can be partitioned: each device draws
its own. A sum, a decomposition or a permutation would be rounded otherwise, or need the
whole: there every device builds one layer after another and keeps its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.model.equations import equations
from meshpar.rules.rules import entry_axes

_MAPPED = frozenset(
    """
    abs add and broadcast_in_dim bitcast_convert_type clamp concatenate copy
    convert_element_type cos div eq erf erf_inv exp exp2 expm1 ge gt integer_pow
    iota is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow
    pjit jit closed_call custom_jvp_call random_bits random_fold_in random_seed
    random_split random_unwrap random_wrap rem reshape round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin slice split sqrt square stack
    squeeze stop_gradient sub tan tanh threefry2x32 transpose xor
    """.split()  # noqa: SIM905, a table
)
"""What partitions as it is, value by value."""

Build = Callable[[jax.Array], Any]
"""Key -> tree of arrays."""


def build_one(build: Build, key: jax.Array, specs: Any) -> Any:
    """`build(key)`, laid out by the specs of its arrays.

    Args:
        build: Makes the arrays.
        key: For it.
        specs: Tree of `PartitionSpec` over the mesh that is set; None without one.
    """
    if specs is None or is_mapped(build, key):
        return build(key)
    return _on_every_device(lambda key: _own(build(key), specs), key, specs)


def build_layers(build: Build, keys: jax.Array, specs: Any) -> Any:
    """`build` of every key, stacked; the specs have the leading dim too."""
    if specs is None or is_mapped(build, keys[0]):
        return jax.vmap(build)(keys)
    of_layer = jax.tree.map(lambda spec: PartitionSpec(None, *spec[1:]), specs)
    of_layers = jax.tree.map(lambda spec: PartitionSpec(*spec[:1]), specs)

    def own(keys: jax.Array) -> Any:
        layers = lax.map(
            lambda key: _own(jax.tree.map(lambda x: x[None], build(key)), of_layer),
            keys,
        )
        return _own(jax.tree.map(lambda x: x[:, 0], layers), of_layers)

    return _on_every_device(own, keys, specs)


def _on_every_device(own: Build, keys: jax.Array, specs: Any) -> Any:
    return jax.shard_map(
        own, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
    )(keys)


def _own(tree: Any, specs: Any) -> Any:
    """This device's part of arrays that it has whole."""

    def own(spec: PartitionSpec, x: jax.Array) -> jax.Array:
        for dim, entry in enumerate(spec):
            axes = entry_axes(entry)
            parts = math.prod(lax.axis_size(axis) for axis in axes)
            index = jnp.int32(0)
            for axis in axes:
                index = index * lax.axis_size(axis) + lax.axis_index(axis)
            size = x.shape[dim] // parts
            x = lax.dynamic_slice_in_dim(x, index * size, size, dim)
        return x

    return jax.tree.map(own, specs, tree)


def is_mapped(build: Build, key: jax.Array) -> bool:
    """Whether every value is drawn and mapped by itself."""
    program = jax.make_jaxpr(build)(key)
    return all(
        equation.primitive.name in _MAPPED for equation in equations(program.jaxpr)
    )
