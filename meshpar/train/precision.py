"""Precision of parameters: fp32, or bf16 beside an fp32 master, or rounded at random.

Updates are made in fp32. Parameters of bf16 keep too few bits for small updates, so the
optimizer state holds an fp32 master copy; or rounding up and down at random keeps their
mean. Reference: Micikevicius et al. 2018 (master weights); Gupta et al. 2015
(stochastic rounding).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float32, PRNGKeyArray

from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params, is_parameter
from meshpar.parallel.placement import PARAM_DTYPES
from meshpar.rules.sharding import path_name


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
