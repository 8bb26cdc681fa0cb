"""Optimizer state: the parameter of each array, its sharding, the fp32 master copy."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Sequence
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
from meshpar.rules.sharding import path_name

LARGE_BYTES = 1 << 20
"""State above this size should not be whole on every device, as the lint has it."""


def map_states(
    of_parameter: Callable[..., Any],
    other: Any,
    opt_state: Any,
    params: Any,
    *more: Any,
) -> Any:
    """A tree like `opt_state`, made array by array.

    Args:
        of_parameter: (array, its parameter, what `more` has of it) -> value.
        other: Value of an array of no parameter, such as a step count.
        opt_state: An optimizer's state or its shapes.
        params: The parameters or their shapes.
        more: Trees like `params`.
    """
    leaves = jax.tree.leaves_with_path(params)
    columns = (jax.tree.leaves(tree) for tree in more)
    rows = zip(leaves, *columns, strict=True)
    known = {tuple(path): (leaf, *rest) for (path, leaf), *rest in rows}

    def value(path: tuple, array: Any) -> Any:
        owner = owned_path(path, known)
        if owner is None:
            return other
        return of_parameter(array, *known[owner.path])

    return jax.tree.map_with_path(value, opt_state)


@dataclass(frozen=True)
class OwnedPath:
    """A path of an optimizer's state, in three parts.

    Args:
        before: Where the tree lies in the state.
        path: The parameter's own path, within that tree.
        after: Which of several arrays of the parameter it is.
    """

    before: tuple
    path: tuple
    after: tuple


def owned_path(path: Sequence[Any], known: Container[tuple]) -> OwnedPath | None:
    """The parts of a state's path that holds a parameter's; None if it holds none.

    Behind a parameter's path there may be places in a list or tuple, as SM3 keeps one
    array for each dim.

    Args:
        path: Of an array of the state.
        known: The parameters' paths.
    """
    end = len(path)
    while True:
        for start in range(end):
            if tuple(path[start:end]) in known:
                before, of_param, after = path[:start], path[start:end], path[end:]
                return OwnedPath(tuple(before), tuple(of_param), tuple(after))
        if not end or not isinstance(path[end - 1], jax.tree_util.SequenceKey):
            return None
        end -= 1


def follow_sharding(array: Any, param: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a parameter's optimizer state.

    State of the parameter's shape lies as the parameter's gradient; state with fewer of
    its dims, such as Adafactor's factors, as those dims do.

    Raises:
        InputError: The state has dims that are not its parameter's.
    """
    dims = kept_dims(array.shape, param.shape)
    if dims is None:
        raise InputError(
            f"optimizer state of shape {array.shape} belongs to a parameter of shape "
            f"{param.shape}, so it cannot take that parameter's layout; use an "
            "optimizer whose state has the parameter's dims, all or some of them",
            key="optimizer.state_has_other_dims",
        )
    spec = sharding.spec
    return NamedSharding(
        sharding.mesh,
        PartitionSpec(*(None if dim is None else spec[dim] for dim in dims)),
    )


def check_unowned(opt_state: Any, params: Any, of_states: Any) -> None:
    """Refuses large state of no parameter where those of parameters are split.

    Nothing tells how its dims relate to the parameters', so it would be whole on every
    device, and a checkpoint of it would be in this layout's order of layers.

    Args:
        opt_state: An optimizer's state or its shapes.
        params: The parameters or their shapes.
        of_states: Sharding of each parameter's optimizer state.

    Raises:
        InputError: There is such an array; its path is in the message.
    """
    if all(sharding.is_fully_replicated for sharding in jax.tree.leaves(of_states)):
        return
    is_owned = map_states(lambda *_: True, False, opt_state, params)
    arrays = jax.tree.leaves_with_path(opt_state)
    for (path, array), owned in zip(arrays, jax.tree.leaves(is_owned), strict=True):
        size = math.prod(array.shape) * array.dtype.itemsize
        if not owned and size > LARGE_BYTES:
            raise InputError(
                f"optimizer state {path_name(path)!r} of shape {array.shape} lies at "
                f"no parameter's path, so its {size:,} bytes would be whole on every "
                f"device (limit {LARGE_BYTES:,}) while the layout splits the states of "
                "parameters; use an optimizer whose state has the parameters' tree, "
                "such as this one without optax.flatten, or a layout that splits "
                "nothing, such as data=-1",
                key="optimizer.large_unsplit_state",
            )


def kept_dims(
    shape: tuple[int, ...], of_param: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """The dims of a parameter that an array of its optimizer state has, in order.

    A dim of size 1 that is none of them is None, such as of Adafactor's placeholders.

    Returns:
        A dim of the parameter, or None, for each dim of the array; None altogether
        where a larger dim is not its parameter's.

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
        if size in of_param[start:]:
            dim = of_param.index(size, start)
            dims.append(dim)
            start = dim + 1
        elif size == 1:
            dims.append(None)
        else:
            return None
    return tuple(dims)


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
    """The state before the first step, of parameters whose values are `values`."""
    inner = optimizer.init(values)
    return Mastered(values, inner) if param_dtype == "bf16" else inner


def master_values(params: Params, opt_state: Any) -> Params:
    """What the optimizer updates: the master copy, or the parameters in fp32."""
    if isinstance(opt_state, Mastered):
        return opt_state.master
    return jax.tree.map(in_full, params)


def in_full(value: jax.Array) -> jax.Array:
    """A value in fp32, or complex64: what updates are made in."""
    return value.astype(full_dtype(value.dtype))


def full_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return fp32, or complex64: what updates of values of a dtype are made in.

    It is so with `jax_enable_x64` too.
    """
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(jnp.complex64 if is_complex else jnp.float32)


def inner_state(opt_state: Any) -> Any:
    """The optimizer's own state."""
    return opt_state.inner if isinstance(opt_state, Mastered) else opt_state


def with_inner(opt_state: Any, inner: Any) -> Any:
    """`opt_state` with another state of the optimizer's own; a master copy stays."""
    if not isinstance(opt_state, Mastered):
        return inner
    return Mastered(opt_state.master, inner)


def with_updated(opt_state: Any, inner: Any, values: Params) -> Any:
    """`opt_state` after an update: `values` are the master copy, where there is one."""
    return Mastered(values, inner) if isinstance(opt_state, Mastered) else inner


def stored(
    values: Params, param_dtype: str, model: Model, key: jax.Array | None = None
) -> Params:
    """fp32 values as parameters store them.

    Args:
        values: Laid out as `model.parameters`.
        param_dtype: As in `Layout`.
        model: Whose parameters they are.
        key: What random rounding derives from; None rounds to nearest.
    """
    if param_dtype == "bf16_stochastic" and key is not None:
        return jax.tree.map_with_path(
            lambda path, parameter, value: _rounded(
                value, _layer_keys(key, path_name(path), parameter), parameter
            ),
            model.parameters,
            values,
            is_leaf=is_parameter,
        )
    dtype = PARAM_DTYPES[param_dtype]

    def nearest(parameter: Parameter, value: jax.Array) -> jax.Array:
        whole = parameter.in_full or jnp.iscomplexobj(value)
        return value if whole else value.astype(dtype)

    return jax.tree.map(nearest, model.parameters, values, is_leaf=is_parameter)


def stochastic_round(
    x: Float32[Array, "*shape"], key: PRNGKeyArray
) -> BFloat16[Array, "*shape"]:
    """bf16 of fp32 values, up or down with the chances that keep the mean.

    What is not finite is converted as usual.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 16
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _rounded(value: jax.Array, keys: jax.Array, parameter: Parameter) -> jax.Array:
    if parameter.in_full or jnp.iscomplexobj(value):
        return value
    if parameter.num_layers is None:
        return stochastic_round(value, keys)
    return jax.vmap(stochastic_round)(value, keys)


def _layer_keys(key: jax.Array, path: str, parameter: Parameter) -> jax.Array:
    """One key, or one for each layer: no layout changes what a value is rounded to."""
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    if parameter.num_layers is None:
        return key
    layers = jnp.asarray(parameter.places, jnp.int32).astype(jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, layers)
