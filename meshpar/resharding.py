"""Parameters from one layout to another, on the same devices or on others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.mesh import make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.parallel.pipeline.program import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import path_name


@dataclass(frozen=True, kw_only=True)
class Lying:
    """How a model's parameters lie under a layout: order of layers, and shardings.

    Args:
        model: Arranged for the layout's stages.
        shardings: Tree of the sharding of each parameter; None where they are whole on
            a device or the host.
    """

    model: Model
    shardings: Any = None

    @classmethod
    def of(
        cls,
        model: Model,
        layout: Layout | str,
        *,
        rules: Rules | None = None,
        mesh: Mesh | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Lying:
        """As a training step lays them out."""
        layout = Layout.of(layout)
        mesh = make_mesh(layout, devices) if mesh is None else mesh
        layout = layout.resolve(mesh.size)
        arranged = arranged_for(model, layout)
        placement = Placement(
            model=arranged,
            layout=layout,
            rules=default_rules(layout) if rules is None else rules,
            mesh=mesh,
            platform=platform_of(mesh),
        )
        specs = placement.specs(lambda stored: stored.spec)
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )
        return cls(model=arranged, shardings=shardings)


def moved(
    params: Params, source: Lying, target: Lying, *, dtype: str | None = None
) -> Params:
    """The parameters as another layout has them, layer by layer.

    Args:
        params: Arrays as `source` has them; they stay.
        source: How they lie.
        target: How they are to lie.
        dtype: A `Layout.param_dtype` that numbers of half and full precision are
            rounded to; as they are when absent.

    Raises:
        InputError: They are not the parameters of the model.
    """
    of_source, of_target = flat(source.model.parameters), flat(target.model.parameters)
    _check(params, of_source)
    shardings = dict(
        (path_name(path), sharding)
        for path, sharding in jax.tree.leaves_with_path(target.shardings)
    )

    def move(path: tuple, array: Any) -> jax.Array:
        name = path_name(path)
        given, wanted = of_source[name], of_target[name]
        to = _dtype(array.dtype, dtype)
        return _moved(array, given, wanted, shardings[name], to)

    return jax.tree.map_with_path(move, params)


def _dtype(dtype: Any, wanted: str | None) -> Any:
    if wanted is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return PARAM_DTYPES[wanted]


def _check(params: Params, known: dict[str, Parameter]) -> None:
    check = {path_name(path): one for path, one in jax.tree.leaves_with_path(params)}
    for path in sorted(known.keys() - check.keys()):
        raise InputError(
            f"parameter {path} of the model is missing; there are "
            f"{', '.join(sorted(check)) or 'none'}"
        )
    for path in sorted(check.keys() - known.keys()):
        raise InputError(f"{path} is no parameter of the model; leave it out")
    for path, one in check.items():
        if tuple(one.shape) != known[path].stacked_shape:
            raise InputError(
                f"parameter {path} has shape {tuple(one.shape)}, but under its layout "
                f"it has {known[path].stacked_shape}; say which layout it lies in"
            )


def _moved(
    array: Any, given: Parameter, wanted: Parameter, sharding: NamedSharding, dtype: Any
) -> jax.Array:
    indices = _indices(given, wanted)
    if indices is None:
        return _on(array, sharding, dtype)
    if not isinstance(array, jax.Array):
        rows = np.asarray(array)
        found = np.zeros((len(indices), *rows.shape[1:]), rows.dtype)
        here = np.array(indices) >= 0
        found[here] = rows[np.array(indices)[here]]
        return _on(found, sharding, dtype)
    if array.sharding.device_set == sharding.device_set:
        return _rows_at(indices, sharding, dtype)(array)
    own = _free(array.sharding)
    return _on(_rows_at(indices, own, array.dtype)(array), sharding, dtype)


def _free(sharding: Any) -> Any:
    """A sharding whose first dim is not split, since its size changes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))


def _on(array: Any, sharding: NamedSharding, dtype: Any) -> jax.Array:
    return jax.device_put(array.astype(dtype), sharding, may_alias=False)


def _indices(given: Parameter, wanted: Parameter) -> tuple[int, ...] | None:
    """For each place wanted the place given, -1 for none; None if they are alike."""
    if given.places == wanted.places:
        return None
    return tuple(
        given.places.index(layer) if layer >= 0 else -1 for layer in wanted.places
    )


@functools.lru_cache
def _rows_at(
    indices: tuple[int, ...], sharding: Any, dtype: Any
) -> Callable[[jax.Array], jax.Array]:
    def rows_at(array: jax.Array) -> jax.Array:
        found = array.at[np.array(indices)].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return found.astype(dtype)

    return jax.jit(rows_at, out_shardings=sharding)


def reshard(
    params: Params,
    from_layout: Layout | str,
    to_layout: Layout | str,
    *,
    model: Model,
    devices: Sequence[jax.Device] | None = None,
) -> Params:
    """Parameters of one layout, laid out by another."""
    check_model(model)
    source = Lying(model=arranged_for(model, Layout.of(from_layout)))
    return moved(params, source, Lying.of(model, to_layout, devices=devices))
