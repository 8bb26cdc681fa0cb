"""Sums over devices at the end of a step: gradients, their norm, the mean loss.

Gradients are summed over the batch axes by one all-reduce. Over several hosts that sum
can run in three parts (`sum_by_host`): reduce-scatter inside each host, all-reduce
across hosts, all-gather inside. XLA's CPU collectives over gloo need this: they send a
sum around one ring of all n devices, so of P values 2 P (n - 1)/n leave every host; by
host 2 P (h - 1)/h do, with h hosts. NCCL does not need it: its rings run through all
GPUs of a host before they leave it (NCCL 2.20, src/graph/connect.cc). TPUs of one slice
do not either: they have one kind of link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

from meshpar.collectives import asked
from meshpar.layout import MESH_AXES
from meshpar.model.block_run import PERPLEXITY, Sums, Terms
from meshpar.rules.rules import spec_axes

Arrays = list[jax.Array]
SumOver = Callable[[Arrays, tuple[str, ...]], Arrays]
"""(this device's arrays, mesh axes) -> their sums over those, on every device."""


def joint_all_reduce(arrays: Arrays, mesh_axes: tuple[str, ...]) -> Arrays:
    """Sum all arrays over mesh axes in one all-reduce."""
    with asked("gradient_reduction"):
        return lax.psum(arrays, mesh_axes)


def reduce_gradients(
    stored: Any,
    gradients: Any,
    mesh_axes: tuple[str, ...],
    sum_over: SumOver = joint_all_reduce,
) -> Any:
    """Sum each gradient over the mesh axes that it has not been reduced over yet.

    One all-reduce of all gradients whose states are whole on all devices; one over the
    other mesh axes of those that are already reduce-scattered over some. Each
    all-reduce of P values sends 2 P (n-1)/n.

    Args:
        stored: Tree of `Stored`.
        gradients: The same tree of this device's gradients, reduce-scattered where
            their states are split.
        mesh_axes: Mesh axes of size above 1 that split the batch, and `stage`.
        sum_over: Function that sums arrays over mesh axes, such as `sum_by_host`.
    """
    layouts, treedef = jax.tree.flatten(stored)
    leaves = treedef.flatten_up_to(gradients)
    remaining = [
        tuple(
            axis
            for axis in mesh_axes
            if axis not in (*spec_axes(layout.spec), *layout.loop_sums)
        )
        for layout in layouts
    ]
    for axes in sorted(set(remaining) - {()}):
        at = [index for index, wanted in enumerate(remaining) if wanted == axes]
        parts = [leaves[index].astype(layouts[index].sum_dtype) for index in at]
        summed = sum_over(parts, axes)
        for index, leaf in zip(at, summed, strict=True):
            leaves[index] = leaf
    return treedef.unflatten(leaves)


@dataclass(frozen=True)
class HostGroups:
    """Groups of the devices of a collective, by their index in it.

    Args:
        inside: Devices of each host.
        across: One device of each host: all first ones, all second ones, and so on.
    """

    inside: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]


def host_groups(hosts: np.ndarray, mesh_axes: Sequence[str]) -> HostGroups | None:
    """Return the groups of a collective over some mesh axes, the first one slowest.

    None if it stays in a host, if each of its devices is in another host, or if hosts
    hold different numbers of its devices or are in another order from group to group.

    Args:
        hosts: The host of each device, a dim for each of `MESH_AXES`.
        mesh_axes: Mesh axes of the collective.

    Example:
        >>> hosts = np.array([0, 0, 1, 1]).reshape(4, 1, 1, 1, 1, 1)
        >>> host_groups(hosts, ["data"]).across
        ((0, 2), (1, 3))
    """
    dims = [MESH_AXES.index(axis) for axis in mesh_axes]
    rows = np.moveaxis(hosts, dims, range(-len(dims), 0))
    members = int(np.prod([hosts.shape[dim] for dim in dims]))
    groups = set()
    for row in rows.reshape(-1, members).tolist():
        places: dict[int, list[int]] = {}
        for place, host in enumerate(row):
            places.setdefault(host, []).append(place)
        groups.add(tuple(map(tuple, places.values())))
    if len(groups) != 1:
        return None
    (inside,) = groups
    sizes = {len(group) for group in inside}
    if len(inside) == 1 or sizes == {1} or len(sizes) != 1:
        return None
    return HostGroups(inside, tuple(zip(*inside, strict=True)))


def sum_by_host(
    hosts: np.ndarray, arrays: list[jax.Array], mesh_axes: tuple[str, ...]
) -> list[jax.Array]:
    """Sum each array over mesh axes, by host where that sends less between hosts.

    Args:
        hosts: As for `host_groups`.
        arrays: This device's arrays.
        mesh_axes: Mesh axes to sum over.
    """
    groups = host_groups(hosts, mesh_axes)
    if groups is None:
        return joint_all_reduce(arrays, mesh_axes)
    summed: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [at for at, array in enumerate(arrays) if array.dtype == dtype]
        sums = all_reduce_by_host([arrays[at] for at in places], mesh_axes, groups)
        summed.update(zip(places, sums, strict=True))
    return [summed[at] for at in range(len(arrays))]


def all_reduce_by_host(
    arrays: Sequence[jax.Array], mesh_axes: Sequence[str], groups: HostGroups
) -> list[jax.Array]:
    """Sum each array over mesh axes, equal to `lax.psum` but for rounding.

    For all values together, padded to a multiple of a host's devices: one
    reduce-scatter inside hosts, one all-reduce of a device's share across hosts, one
    all-gather inside.

    Args:
        arrays: This device's arrays, of one dtype.
        mesh_axes: Mesh axes to sum over.
        groups: From `host_groups` for these mesh axes.
    """
    axes = tuple(mesh_axes)
    values, restored = ravel_pytree(list(arrays))
    row = jnp.pad(values, (0, -values.size % len(groups.inside[0])))
    with asked("host_scatter"):
        own = lax.psum_scatter(row, axes, axis_index_groups=groups.inside, tiled=True)
    with asked("gradient_reduction"):
        own = lax.psum(own, axes, axis_index_groups=groups.across)
    with asked("host_gather"):
        row = lax.all_gather(own, axes, axis_index_groups=groups.inside, tiled=True)
    return restored(row[: values.size])


def global_norm(
    tree: Any,
    shardings: Any,
    mesh: Mesh | AbstractMesh,
    *,
    replica_axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Return `sqrt(sum of squares)` of all arrays: one all-reduce of a single number.

    Each of n devices that hold a value counts it 1/n times.

    Args:
        tree: Global arrays.
        shardings: The same tree of `NamedSharding`s on `mesh`.
        mesh: The mesh; all its axes are automatic here.
        replica_axes: Mesh axes that `jax.vmap` maps over; each replica has a norm.
    """
    sizes = {
        axis: size for axis, size in mesh.shape.items() if axis not in replica_axes
    }
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def squares(spec: PartitionSpec, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = jnp.abs(wide) if jnp.iscomplexobj(wide) else wide
        used = spec_axes(spec)
        copies = math.prod(size for axis, size in sizes.items() if axis not in used)
        return jnp.sum(jnp.square(wide)) / copies

    def local(tree: Any) -> jax.Array:
        parts = jax.tree.map(squares, specs, tree)
        with asked("gradient_norm"):
            return lax.psum(sum(jax.tree.leaves(parts)), tuple(sizes))

    total = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(tree)
    return jnp.sqrt(total)


def random_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key that all randomness of a step derives from."""
    # Folded once more than the keys of initial values, which start from the same seed.
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(0xD0))
    return jax.random.fold_in(key, step)


def loss_metrics(
    weight_sum: jax.Array, auxiliary: Sums, terms: Terms
) -> dict[str, jax.Array]:
    """Return the summed weights, the mean of each auxiliary loss, and the head's terms.

    Args:
        weight_sum: Sum of the weights over the global batch.
        auxiliary: Sum of each auxiliary loss over it.
        terms: Sum of each of the head's terms over it, and of the term's weights.
    """
    share = safe_inverse(weight_sum)
    means = {f"auxiliary.{name}": value * share for name, value in auxiliary.items()}
    return {"weight_sum": weight_sum, **means, **term_means(terms)}


def term_means(terms: Terms) -> dict[str, jax.Array]:
    """Return the mean of each term of a head; of `perplexity` its exponential."""
    means = {
        name: total * safe_inverse(weight) for name, (total, weight) in terms.items()
    }
    if PERPLEXITY in means:
        means[PERPLEXITY] = jnp.exp(means[PERPLEXITY])
    return means


def safe_inverse(weight_sum: jax.Array) -> jax.Array:
    """Return 1 / `weight_sum`, or 0 if `weight_sum` is 0."""
    counts = weight_sum != 0
    return jnp.where(counts, 1 / jnp.where(counts, weight_sum, 1), 0.0)


def scaled(tree: Any, scale: jax.Array | float, dtype: Any = None) -> Any:
    """Multiply every array by an fp32 `scale`, rounding once.

    Rounding the scale to an array's own few bits would move all its values one way.

    Args:
        tree: Arrays.
        scale: A scalar.
        dtype: Dtype of results of real numbers; that of each array when absent.
    """
    wide = jnp.asarray(scale, jnp.float32)

    def scale_one(x: jax.Array) -> jax.Array:
        real = jnp.issubdtype(x.dtype, jnp.floating)
        return (x * wide).astype(dtype if dtype is not None and real else x.dtype)

    return jax.tree.map(scale_one, tree)


def in_fp32(tree: Any) -> Any:
    """Convert arrays of real numbers to fp32, and leave others as they are."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tree,
    )
