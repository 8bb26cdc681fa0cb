"""Parameters and state before they exist: shapes, matrices and initial values.

Initial values are functions of (seed, group, layer), whatever the layout. A module is
built once for all its parameters, from the key that a Flax user would give it:
`initial_key(seed, group, layer)`. Values that are drawn and mapped one by one are
partitioned: each device draws its own. A sum, a decomposition or a permutation would be
rounded otherwise, or need the whole: then every device builds one layer after another
and keeps its own part.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.rules.rules import LogicalAxes, entry_axes
from meshpar.rules.sharding import path_name
from meshpar.trace.primitives import ELEMENTWISE, RANDOM
from meshpar.trace.walk import equations

if TYPE_CHECKING:
    from meshpar.model.contract import Model

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


ENDS = "ends"
"""Name of the parameters outside the blocks, beside the names of groups."""


def initial_key(
    seed: jax.Array | int, group: str, layer: jax.Array | int | None = None
) -> jax.Array:
    """Return the key that one block, or the ends, start from.

        key = fold_in(fold_in(key(seed), crc32(group)), layer)

    Args:
        seed: Seed of the run.
        group: Name of the group of blocks, or `ends`.
        layer: Index in that group, counted from 0; None for the ends.

    Example:
        >>> from flax import nnx
        >>> key = initial_key(0, "blocks", layer=1)
        >>> nnx.Linear(2, 2, rngs=nnx.Rngs(key)).kernel.shape
        (2, 2)
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(group.encode()))
    if layer is None:
        return key
    return jax.random.fold_in(key, jnp.asarray(layer).astype(jnp.uint32))


Specs = tuple[Params, Params]
"""Trees of `PartitionSpec` beside parameters and state."""


def initial_values(
    model: Model, seed: jax.Array | int, specs: Specs | None = None
) -> tuple[Params, Params]:
    """Return parameters and state before the first step, stacked over layers.

    Args:
        model: The model, arranged for stages or not.
        seed: Seed of the run.
        specs: Their specs over the mesh that is set; None without one.
    """
    if model.build_whole is not None:
        return _whole_values(model, model.build_whole, seed, specs)
    params: Params = {}
    state: Params = {}
    for group in model.groups:
        name = group.name
        params[name], state[name] = _group_values(model, name, seed, specs)
    built: tuple[Params, Params] = ({}, {})
    if ENDS in model.build:
        of_ends = specs and (model.split(specs[0])[0], model.split(specs[1])[0])
        built = build_one(model.build[ENDS], initial_key(seed, ENDS), of_ends)
    params |= _drawn(model.split(model.parameters)[0], built[0], seed, ())
    state |= _drawn(model.split(model.state)[0], built[1], seed, ())
    return (
        {name: params[name] for name in model.parameters},
        {name: state[name] for name in model.state},
    )


def _whole_values(
    model: Model,
    build: Callable[[jax.Array], tuple[Params, Params]],
    seed: jax.Array | int,
    specs: Specs | None,
) -> tuple[Params, Params]:
    """Return parameters and state that one function makes, in the stages' order."""

    def placed(value: jax.Array, parameter: Parameter) -> jax.Array:
        order = parameter.layer_order
        if order is not None:
            value = value[jnp.maximum(jnp.asarray(order), 0)]
        return _without_empty(value.astype(parameter.dtype), parameter)

    def made(key: jax.Array) -> tuple[Params, Params]:
        values, declared = build(key), (model.parameters, model.state)
        return jax.tree.map(placed, values, declared)

    return build_one(made, jax.random.key(seed), specs)


def _group_values(
    model: Model, name: str, seed: jax.Array | int, specs: Specs | None
) -> tuple[Params, Params]:
    """Return a group's parameters and state, each (places, ...)."""
    trees = model.parameters[name], model.state.get(name, {})
    built: tuple[Params, Params] = ({}, {})
    if name in model.build:
        leaves = jax.tree.leaves(trees, is_leaf=is_parameter)
        order = jnp.asarray(leaves[0].places)
        keys = jax.vmap(lambda layer: initial_key(seed, name, layer))(order)
        of_group = specs and (specs[0].get(name, {}), specs[1].get(name, {}))
        built = build_layers(model.build[name], keys, of_group)
    at = (jax.tree_util.DictKey(name),)
    params, state = (
        _drawn(tree, values, seed, at)
        for tree, values in zip(trees, built, strict=True)
    )
    return params, state


def _drawn(tree: Params, built: Params, seed: jax.Array | int, at: tuple) -> Params:
    """Return values of a tree, built or drawn from their own keys."""
    leaves = jax.tree.leaves_with_path(built)
    given = {path_name((*at, *path)): value for path, value in leaves}

    def value(path: tuple, parameter: Parameter) -> Any:
        name = path_name((*at, *path))
        if name in given:
            return _without_empty(given[name].astype(parameter.dtype), parameter)
        return _drawn_alone(name, parameter, seed)

    return jax.tree.map_with_path(value, tree, is_leaf=is_parameter)


def _drawn_alone(path: str, parameter: Parameter, seed: jax.Array | int) -> jax.Array:
    if parameter.initial is None:
        raise KeyError(f"{path} has no initial value, and no build gives one")
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    if parameter.num_layers is None:
        return parameter.initial(key).astype(parameter.dtype)
    layers = jnp.asarray(parameter.places, jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers.astype(jnp.uint32))
    values = jax.vmap(parameter.initial)(keys).astype(parameter.dtype)
    return _without_empty(values, parameter)


def _without_empty(values: jax.Array, parameter: Parameter) -> jax.Array:
    """Return the values with zeros at places without a layer."""
    order = parameter.layer_order
    if order is None or min(order) >= 0:
        return values
    filled = (jnp.asarray(order) >= 0).reshape(-1, *(1,) * len(parameter.shape))
    return jnp.where(filled, values, jnp.zeros((), values.dtype))


_MAPPED = (
    ELEMENTWISE
    | (RANDOM - {"random_gamma", "random_gamma_grad"})
    | {"jit", "pjit", "closed_call", "custom_jvp_call"}
    | {"broadcast_in_dim", "concatenate", "reshape", "slice", "split", "squeeze"}
    | {"stack", "transpose", "iota", "bitcast_convert_type"}
    | {"random_split", "random_unwrap", "random_wrap"}
)
"""Operations that are partitioned value by value."""

Build = Callable[[jax.Array], Any]
"""Key -> tree of arrays."""


def build_one(build: Build, key: jax.Array, specs: Any) -> Any:
    """Return `build(key)`, laid out by the specs of its arrays.

    Args:
        build: Makes the arrays.
        key: Its key.
        specs: Tree of `PartitionSpec` over the mesh that is set; None without one.
    """
    if specs is None or is_mapped(build, key):
        return build(key)
    return _on_every_device(lambda key: _own(build(key), specs), key, specs)


def build_layers(build: Build, keys: jax.Array, specs: Any) -> Any:
    """Return `build` of every key, stacked; the specs have the leading dim too."""
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
    """Return this device's part of arrays that it has whole."""

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
    """Return True if every value is drawn and mapped by itself."""
    program = jax.make_jaxpr(build)(key)
    return all(equation.primitive.name in _MAPPED for equation in equations(program))
