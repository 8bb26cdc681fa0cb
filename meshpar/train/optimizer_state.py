"""Optimizer state: the parameter of each array, its sharding, the fp32 master copy.

Optax nests its states freely (`chain`, `masked`, `multi_transform`, a user's own), but
a state of a parameter lies at the parameter's own path within some tree. So the path
tells, not the kind of optimizer.

Updates are made in fp32. Parameters of bf16 keep too few bits for small updates, so the
optimizer state holds an fp32 master copy; or rounding up and down at random keeps their
mean. Reference: Micikevicius et al. 2018 (master weights); Gupta et al. 2015
(stochastic rounding).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16, Float32, PRNGKeyArray

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params, is_parameter
from meshpar.parallel.placement import PARAM_DTYPES
from meshpar.rules.rules import spec_axes
from meshpar.rules.sharding import path_name

LARGE_BYTES = 1 << 20
"""State above this size should not be whole on every device, as the lint has it."""

StateSpec = Callable[[str, tuple[int, ...]], PartitionSpec | None]
"""(Path in the optimizer's state, shape for one layer) -> PartitionSpec, or None."""


class WholeStateWarning(UserWarning):
    """Large optimizer state is whole on every device while a layout splits states."""


@dataclass(frozen=True)
class OwnedPath:
    """The path of an array of an optimizer's state that belongs to a parameter.

    Args:
        before: Path of the tree in the state.
        path: The parameter's own path, within that tree.
        after: Path within what the parameter has there, such as one of several arrays.
    """

    before: tuple
    path: tuple
    after: tuple


def owned_path(path: Sequence[Any], known: Container[tuple]) -> OwnedPath | None:
    """Return the parts of the path of a parameter's state; None if no parameter's.

    Args:
        path: Path of an array of the state.
        known: The parameters' paths.
    """
    for end in range(len(path), 0, -1):
        for start in range(end):
            if tuple(path[start:end]) in known:
                parts = path[:start], path[start:end], path[end:]
                return OwnedPath(*map(tuple, parts))
    return None


def map_states(
    of_parameter: Callable[..., Any],
    other: Any,
    opt_state: Any,
    params: Any,
    *more: Any,
) -> Any:
    """Return a tree like `opt_state`, made array by array.

    Args:
        of_parameter: (array, its parameter, its leaves of `more`) -> value.
        other: Value of an array of no parameter, such as a step count.
        opt_state: An optimizer's state or its shapes.
        params: The parameters or their shapes.
        more: Trees like `params`.
    """
    leaves = jax.tree.leaves_with_path(params)
    columns = (jax.tree.leaves(tree) for tree in more)
    known = {
        tuple(path): (leaf, *rest)
        for (path, leaf), *rest in zip(leaves, *columns, strict=True)
    }

    def value(path: tuple, array: Any) -> Any:
        owned = owned_path(path, known)
        return other if owned is None else of_parameter(array, *known[owned.path])

    return jax.tree.map_with_path(value, opt_state)


@dataclass(frozen=True)
class StateSharding:
    """The rule by which optimizer state is sharded.

    State of a parameter's shape, or with some of its dims (Adafactor's factors), is
    sharded as the parameter's gradient. An array with other dims, such as a
    preconditioner or blocks of 8-bit values, is whole, but for its dim of layers.

    Args:
        spec: Overrides the rule for the arrays that it returns a PartitionSpec for.
        unrolled: The state has each layer's arrays alone (`by_layer.unrolled`).
    """

    spec: StateSpec | None = None
    unrolled: bool = False

    def shardings(
        self, opt_state: Any, params: Any, gradients: Any, layers: Any
    ) -> Any:
        """Return a sharding for every array of an optimizer's state.

        Args:
            opt_state: The state's shapes.
            params: Shapes of the parameters.
            gradients: Sharding of each parameter's gradient.
            layers: For each parameter whether its first dim is one of layers.

        Raises:
            InputError: `spec` returns a PartitionSpec that does not fit, or there is
                large state of no parameter while the layout splits states.
        """
        mesh = jax.tree.leaves(gradients)[0].mesh
        splits = not all(one.is_fully_replicated for one in jax.tree.leaves(gradients))
        columns = map(jax.tree.leaves, (gradients, layers))
        known = {
            tuple(path): rest
            for (path, param), *rest in zip(
                jax.tree.leaves_with_path(params), *columns, strict=True
            )
            for rest in [(param, *rest)]
        }

        def one(path: tuple, array: Any) -> NamedSharding:
            owned = owned_path(path, known)
            lead: tuple[Any, ...] = ()
            entries: list[Any] = []
            own = sizes = array.shape
            if owned is not None:
                param, sharding, has_layers = known[owned.path]
                axes = (*sharding.spec, *(None,) * len(param.shape))
                entries = list(axes[: len(param.shape)])
                sizes = param.shape
                if has_layers:
                    sizes, first = sizes[1:], entries.pop(0)
                    if not self.unrolled and own:
                        lead, own = (first,), own[1:]
            name = path_name(path)
            asked = None if self.spec is None else self.spec(name, own)
            if asked is not None:
                _check_spec(asked, name, own, mesh)
                return NamedSharding(mesh, PartitionSpec(*lead, *asked))
            if owned is None:
                _check_unowned(array, name, splits)
                return NamedSharding(mesh, PartitionSpec())
            dims = kept_dims(own, sizes) or (None,) * len(own)
            rest = (None if dim is None else entries[dim] for dim in dims)
            return NamedSharding(mesh, PartitionSpec(*lead, *rest))

        return jax.tree.map_with_path(one, opt_state)


def whole_states(
    opt_state: Any, shardings: Any, params: Any, gradients: Any
) -> Iterator[tuple[str, int]]:
    """Yield path and bytes of large state that is whole while its parameter is split.

    Args:
        opt_state: The state's shapes.
        shardings: Sharding of each of its arrays.
        params: The parameters or their shapes.
        gradients: Sharding of each parameter's gradient.
    """
    is_split = map_states(
        lambda _, param, gradient: not gradient.is_fully_replicated,
        False,
        opt_state,
        params,
        gradients,
    )
    columns = map(jax.tree.leaves, (shardings, is_split))
    arrays = jax.tree.leaves_with_path(opt_state)
    for (path, array), sharding, splits in zip(arrays, *columns, strict=True):
        size = math.prod(array.shape) * array.dtype.itemsize
        if splits and size > LARGE_BYTES and sharding.is_fully_replicated:
            yield path_name(path), size


def whole_state_message(path: str, num_bytes: int) -> str:
    """Return what a user should know of state that is whole, and the way out."""
    return (
        f"optimizer state {path!r} has dims that its parameter has not, so its "
        f"{num_bytes:,} bytes are whole on every device (limit {LARGE_BYTES:,}); give "
        "state_spec= of make_train_step a PartitionSpec for it, or leave it so"
    )


def kept_dims(
    shape: tuple[int, ...], param_shape: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Return the dims of a parameter that its array of optimizer state has, in order.

    A dim of size 1 that is none of them is None, such as of Adafactor's placeholders.
    None altogether if a larger dim is not the parameter's.

    Example:
        >>> kept_dims((3, 128), (3, 256, 128))
        (0, 2)
        >>> kept_dims((3, 1), (3, 256, 128))
        (0, None)
        >>> kept_dims((2,), (3, 256, 128)) is None
        True
    """
    dims: list[int | None] = []
    start = 0
    for size in shape:
        if size in param_shape[start:]:
            dim = param_shape.index(size, start)
            dims.append(dim)
            start = dim + 1
        elif size == 1:
            dims.append(None)
        else:
            return None
    return tuple(dims)


def _check_unowned(array: Any, path: str, splits: bool) -> None:
    """Refuse large state of no parameter where the states of parameters are split.

    Nothing tells how its dims relate to the parameters', so it would be whole on every
    device, and a checkpoint of it would be in this layout's order of layers.
    """
    size = math.prod(array.shape) * array.dtype.itemsize
    if splits and size > LARGE_BYTES:
        raise InputError(
            f"optimizer state {path!r} of shape {array.shape} lies at "
            f"no parameter's path, so its {size:,} bytes would be whole on every "
            f"device (limit {LARGE_BYTES:,}) while the layout splits the states of "
            "parameters; use an optimizer whose state has the parameters' tree, "
            "such as this one without optax.flatten, or a layout that splits "
            "nothing, such as data=-1",
            key="optimizer.large_unsplit_state",
        )


def _check_spec(
    spec: PartitionSpec, path: str, shape: tuple[int, ...], mesh: Any
) -> None:
    unknown = [axis for axis in spec_axes(spec) if axis not in mesh.shape]
    if unknown or len(spec) > len(shape):
        what = f"the mesh axis {unknown[0]!r}" if unknown else f"{len(spec)} dims"
        raise InputError(
            f"state_spec returns {spec} for optimizer state {path!r} of shape {shape} "
            f"(of one layer), which does not have {what}; return at most "
            f"{len(shape)} entries, of mesh axes {', '.join(mesh.shape)}",
            key="optimizer.state_spec_does_not_fit",
        )
    for dim, axes in enumerate(spec):
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        degree = math.prod(mesh.shape[name] for name in names)
        if shape[dim] % degree:
            raise InputError(
                f"state_spec returns {spec} for optimizer state {path!r} of shape "
                f"{shape} (of one layer), whose dim {dim} of size {shape[dim]} does "
                f"not divide over {degree} devices; split another dim, or return None",
                key="optimizer.state_spec_does_not_fit",
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mastered:
    """Optimizer state of parameters that are stored in fewer bits.

    Args:
        master: The parameters in fp32.
        inner: The optimizer's own state.
    """

    master: Params
    inner: Any


def initial_optimizer_state(
    optimizer: optax.GradientTransformation, values: Params, param_dtype: str
) -> Any:
    """Return the optimizer state before the first step, for parameters in fp32."""
    inner = optimizer.init(values)
    return Mastered(values, inner) if param_dtype == "bf16" else inner


def master_values(params: Params, opt_state: Any) -> Params:
    """Return the values that are updated: the master copy, or parameters in fp32."""
    if isinstance(opt_state, Mastered):
        return opt_state.master
    return jax.tree.map(in_full, params)


def in_full(value: jax.Array) -> jax.Array:
    """Return a value in fp32, or complex64: the dtypes that updates are made in."""
    return value.astype(full_dtype(value.dtype))


def full_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return fp32, or complex64, with `jax_enable_x64` too: the dtype of updates."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(jnp.complex64 if is_complex else jnp.float32)


def inner_state(opt_state: Any) -> Any:
    """Return the optimizer's own state."""
    return opt_state.inner if isinstance(opt_state, Mastered) else opt_state


def with_inner(opt_state: Any, inner: Any, master: Params | None = None) -> Any:
    """Return `opt_state` with another inner state, and another master copy if given.

    Without a master copy in `opt_state` that is the inner state alone.
    """
    if not isinstance(opt_state, Mastered):
        return inner
    return Mastered(opt_state.master if master is None else master, inner)


def stored(
    values: Params, param_dtype: str, model: Model, key: jax.Array | None = None
) -> Params:
    """Return fp32 values in the dtype that parameters are stored in.

    Args:
        values: Laid out as `model.parameters`.
        param_dtype: As in `Layout`.
        model: The model of these parameters.
        key: Key of random rounding; None rounds to nearest.
    """
    dtype = PARAM_DTYPES[param_dtype]

    def one(path: tuple, parameter: Parameter, value: jax.Array) -> jax.Array:
        if parameter.in_full or jnp.iscomplexobj(value):
            return value
        if key is None or param_dtype != "bf16_stochastic":
            return value.astype(dtype)
        # A key for each layer: no layout changes what a value is rounded to.
        own = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        if parameter.num_layers is None:
            return stochastic_round(value, own)
        layers = jnp.asarray(parameter.places, jnp.int32).astype(jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(own, layers)
        return jax.vmap(stochastic_round)(value, keys)

    return jax.tree.map_with_path(one, model.parameters, values, is_leaf=is_parameter)


def stochastic_round(
    x: Float32[Array, "*shape"], key: PRNGKeyArray
) -> BFloat16[Array, "*shape"]:
    """Return bf16 of fp32 values, up or down with the chances that keep the mean.

    Values that are not finite are converted as usual.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 16
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
