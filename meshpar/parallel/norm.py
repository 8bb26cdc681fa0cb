"""The global norm of a tree of sharded arrays, every value counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

from meshpar.collectives import asked
from meshpar.rules.rules import spec_axes


def global_norm(
    tree: Any,
    shardings: Any,
    mesh: Mesh | AbstractMesh,
    *,
    apart: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """`sqrt(sum of squares)` over all arrays: one all-reduce of a single number.

    A value that several devices hold is counted on each with its share of one.

    Args:
        tree: Global arrays.
        shardings: The same tree of `NamedSharding`s on `mesh`.
        mesh: The mesh; all its axes are automatic here.
        apart: Mesh axes that `jax.vmap` maps over: what lies there has its own norm.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if axis not in apart}
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def local(tree: Any) -> jax.Array:
        parts = jax.tree.map(
            lambda spec, x: _squares(x) / _copies(spec, sizes), specs, tree
        )
        with asked("gradient_norm"):
            return lax.psum(sum(jax.tree.leaves(parts)), tuple(sizes))

    squares = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(tree)
    return jnp.sqrt(squares)


def _squares(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(jnp.square(jnp.abs(wide) if jnp.iscomplexobj(wide) else wide))


def _copies(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    used = spec_axes(spec)
    return math.prod(size for axis, size in sizes.items() if axis not in used)
