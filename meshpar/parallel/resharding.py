"""Parameters from one layout to another, on the same devices or on others.

Array by array, and of stacked arrays layer by layer, each gone where it was as soon as
it is where it is to be; those that become smaller first, so that both layouts together
are never held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.mesh import make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.parallel.pipeline.program import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.parallel.resharding_bytes import NOTHING, MovedBytes, moved_bytes
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import path_name


@dataclass(frozen=True, kw_only=True)
class Lying:
    """How a model's parameters lie under a layout: order of layers, and shardings.

    Args:
        model: Arranged for the layout's stages.
        shardings: Tree of the sharding of each parameter; None where they lie as they
            happen to.
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
        """As a training step lays them out.

        Args:
            model: As given.
            layout: The layout.
            rules: Logical axis -> mesh axes; the layout's preset when absent.
            mesh: The devices.
            devices: Instead of a mesh; JAX's by default.

        Raises:
            InputError: The layout does not fit model or devices.
            RuleError: A parameter cannot be laid out.
        """
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


def reshard(
    params: Params,
    from_layout: Layout | str,
    to_layout: Layout | str,
    *,
    model: Model,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
    donate: bool = True,
) -> Params:
    """Parameters as another layout has them.

    Args:
        params: As `from_layout` has them, such as `state.params`.
        from_layout: How they lie.
        to_layout: How they are to lie.
        model: Whose they are.
        rules: Of the new layout; its preset when absent.
        devices: Of the new layout; JAX's by default.
        donate: Whether each array's memory is given up once it is moved: `params`
            cannot be used again.

    Raises:
        InputError: They are not the model's, or do not lie so.
        RuleError: A parameter cannot be laid out.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = build("test")
        >>> two = jax.devices()[:2]
        >>> params = model.init(0)
        >>> moved = reshard(params, "data=1", "tensor=2", model=model, devices=two)
        >>> tuple(moved["blocks"]["mlp"]["down"].sharding.spec)
        (None, 'tensor', None)
    """
    check_model(model)
    source = Lying(model=arranged_for(model, Layout.of(from_layout)))
    target = Lying.of(model, to_layout, rules=rules, devices=devices)
    return moved(params, source, target, donate=donate)


def reshard_bytes(params: Params, source: Lying, target: Lying) -> MovedBytes:
    """What `moved` sends at least, by mesh axis and link: what devices lack.

    Args:
        params: Arrays on a mesh, as `source` has them.
        source: How they lie.
        target: How they are to lie.
    """
    found = NOTHING
    for one in _moves(params, source, target, None):
        sharding = one.array.sharding
        if not isinstance(sharding, NamedSharding):
            raise InputError(
                f"{one.path} lies on one device by itself; lay it out on a mesh first"
            )
        found += moved_bytes(
            one.wanted.stacked_shape,
            one.array.dtype.itemsize,
            sharding,
            one.sharding,
            one.places,
        )
    return found


def moved(
    params: Params,
    source: Lying,
    target: Lying,
    *,
    dtype: str | None = None,
    donate: bool = False,
) -> Params:
    """The parameters as another layout has them.

    Args:
        params: Arrays as `source` has them: JAX's, NumPy's, or anything with a shape of
            which parts can be asked for, as of `meshpar.models.convert`.
        source: How they lie.
        target: How they are to lie.
        dtype: A `Layout.param_dtype` that numbers of half and full precision are
            rounded to; as they are when absent.
        donate: Whether each array is given up once it is moved.

    Raises:
        InputError: They are not the parameters of the model.
    """
    found: dict[str, jax.Array] = {}
    for one in sorted(_moves(params, source, target, dtype), key=_growth):
        found[one.path] = jax.block_until_ready(one.done())
        if donate and isinstance(one.array, jax.Array):
            one.array.delete()
    return jax.tree.map_with_path(lambda path, _: found[path_name(path)], params)


@dataclass(frozen=True, kw_only=True)
class _Move:
    """One array on its way."""

    path: str
    array: Any
    given: Parameter
    wanted: Parameter
    sharding: NamedSharding
    dtype: Any

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if self.given.places == self.wanted.places:
            return None
        return self.given.places, self.wanted.places

    def done(self) -> jax.Array:
        if not isinstance(self.array, jax.Array):
            return self._from_host()
        if self.given.num_layers is None:
            # A copy, as what shares memory with an array is gone with it.
            same = _devices(self.array.sharding) == _devices(self.sharding)
            copied = _copied(self.dtype, self.sharding if same else None)(self.array)
            return copied if same else jax.device_put(copied, self.sharding)
        return self._layer_by_layer()

    def _from_host(self) -> jax.Array:
        shape = self.wanted.stacked_shape
        return jax.make_array_from_callback(shape, self.sharding, self._part)

    def _part(self, index: Any) -> np.ndarray:
        """What a device is to have, of which only that is read."""
        if self.places is None:
            return np.asarray(self.array[index]).astype(self.dtype)
        before, after = self.places
        rows = [
            np.asarray(self.array[(slice(at, at + 1), *index[1:])])
            for at in (before.index(layer) for layer in after[index[0]] if layer >= 0)
        ]
        found = iter(rows)
        empty = np.zeros_like(rows[0]) if rows else np.zeros(self._shape_of(index))
        parts = [next(found) if layer >= 0 else empty for layer in after[index[0]]]
        return np.concatenate(parts).astype(self.dtype)

    def _shape_of(self, index: tuple[slice, ...]) -> tuple[int, ...]:
        """Of one layer of a part."""
        parts = zip(index[1:], self.wanted.shape, strict=True)
        return (1, *(len(range(*part.indices(size))) for part, size in parts))

    def _layer_by_layer(self) -> jax.Array:
        of_layer = NamedSharding(
            self.sharding.mesh, PartitionSpec(*self.sharding.spec[1:])
        )
        shape, array = self.wanted.stacked_shape, self.array
        result = _zeros(shape, self.dtype, self.sharding)()
        same = _devices(array.sharding) == _devices(self.sharding)
        for to, at in self._rows():
            if same:
                put = _put_from(self.sharding, of_layer)
                result = put(result, array, np.int32(to), np.int32(at))
            else:
                one = jax.device_put(_layer(array, np.int32(at)), of_layer)
                result = _put(self.sharding)(result, one, np.int32(to))
        return result

    def _rows(self) -> list[tuple[int, int]]:
        """(place wanted, place given) of each layer."""
        before = self.given.places
        wanted = enumerate(self.wanted.places)
        return [(to, before.index(layer)) for to, layer in wanted if layer >= 0]


def _devices(sharding: Sharding) -> tuple[jax.Device, ...]:
    """In the order that a program of that sharding numbers them."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.ravel(np.asarray(sharding.mesh.devices)).tolist())
    return tuple(sharding.device_set)


def _growth(one: _Move) -> float:
    """Bytes of a device that the array takes more than it did."""
    after = one.sharding.shard_shape(one.wanted.stacked_shape)
    before = one.given.stacked_shape
    if isinstance(one.array, jax.Array):
        before = one.array.sharding.shard_shape(one.array.shape)
    sizes = np.prod(after, dtype=float), np.prod(before, dtype=float)
    return float(sizes[0] - sizes[1])


def _moves(
    params: Params, source: Lying, target: Lying, dtype: str | None
) -> list[_Move]:
    given, wanted = flat(source.model.parameters), flat(target.model.parameters)
    _check(params, given)
    shardings = _by_path(target.shardings)
    return [
        _Move(
            path=name,
            array=array,
            given=given[name],
            wanted=wanted[name],
            sharding=shardings[name],
            dtype=_dtype(array, given[name], dtype),
        )
        for name, array in (
            (path_name(path), array)
            for path, array in jax.tree.leaves_with_path(params)
        )
    ]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _dtype(array: Any, parameter: Parameter, wanted: str | None) -> Any:
    dtype = getattr(array, "dtype", parameter.dtype)
    if wanted is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.float32 if parameter.in_full else PARAM_DTYPES[wanted]


def _check(params: Params, known: dict[str, Parameter]) -> None:
    there = _by_path(params)
    for path in sorted(known.keys() - there.keys()):
        raise InputError(
            f"parameter {path} of the model is missing; there are "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    for path in sorted(there.keys() - known.keys()):
        raise InputError(f"{path} is no parameter of the model; leave it out")
    for path, one in there.items():
        wanted = known[path].stacked_shape
        if tuple(one.shape) != wanted:
            raise InputError(
                f"parameter {path} has shape {tuple(one.shape)}, but in the layout "
                f"that is said to be its own it has {wanted}; say which layout it "
                "lies in"
            )


@functools.lru_cache
def _zeros(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.lru_cache
def _copied(dtype: Any, sharding: Sharding | None) -> Any:
    return jax.jit(lambda x: jnp.copy(x.astype(dtype)), out_shardings=sharding)


@functools.lru_cache
def _put_from(sharding: NamedSharding, of_layer: NamedSharding) -> Any:
    """(array, other array, place, place in the other) -> the array with that layer."""

    def put(array: Any, other: Any, to: Any, at: Any) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(other, at, keepdims=False)
        one = jax.lax.with_sharding_constraint(one.astype(array.dtype), of_layer)
        return array.at[to].set(one)

    return jax.jit(put, out_shardings=sharding, donate_argnums=0)


@functools.lru_cache
def _put(sharding: NamedSharding) -> Any:
    """(array, one layer, place) -> the array with it."""

    def put(array: Any, one: Any, to: Any) -> jax.Array:
        return array.at[to].set(one.astype(array.dtype))

    return jax.jit(put, out_shardings=sharding, donate_argnums=0)


@jax.jit
def _layer(array: jax.Array, at: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
