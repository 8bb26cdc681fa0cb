"""Weights in 8 bits, made numbers again layer by layer as they are used.

    W ~ values * scale,    scale of each output, int8: largest |W| of its inputs / 127.5

Of every matrix of the blocks that leads from the residual stream or to it; embedding,
norms, routers and biases stay as they are. By qwix (github.com/google/qwix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.errors import InputError, install_extra
from meshpar.hardware.devices import compute_capability
from meshpar.layout import Layout
from meshpar.layout.requirements import check_precision
from meshpar.model.contract import Model
from meshpar.model.lora import rebuilt
from meshpar.model.parameter import Matrix, Parameter, Params, flat
from meshpar.parallel.placement import DTYPES
from meshpar.rules.sharding import insert, path_name
from meshpar.train.state import TrainState, join_constants, split_constants

KINDS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_FP8_CAPABILITY = 8.9
"""Compute capability with fp8 matrix units (CUDA C++ Programming Guide, 16.1)."""


def check_weights(kind: str, devices: Sequence[jax.Device]) -> None:
    """Refuse a kind of weights that the devices lack.

    Raises:
        InputError: It is none, or they have not.
    """
    if kind not in KINDS:
        raise InputError(
            f"weights={kind!r}: must be one of {', '.join(KINDS)}",
            key="generation.unknown_weights",
        )
    one = devices[0]
    if kind == "fp8" and compute_capability(one) < _FP8_CAPABILITY:
        raise InputError(
            f"weights='fp8': {one.device_kind} has no fp8 (NVIDIA GPUs of compute "
            f"capability {_FP8_CAPABILITY} and above have); give weights='int8'",
            key="generation.no_fp8",
        )


def with_weights(
    model: Model,
    params: Any,
    kind: str,
    layout: Layout,
    devices: Sequence[jax.Device],
) -> tuple[Model, Any]:
    """Return a model and its values with 8-bit weights.

    Args:
        model: As its family builds it.
        params: Its parameters, or a `TrainState`.
        kind: `int8` or `fp8`.
        layout: Under which it generates.
        devices: Of that layout.

    Raises:
        InputError: There is no such kind, or not on these devices; or other processes
            have parts of the values.
    """
    check_weights(kind, devices)
    _check_whole(params)
    check_precision(layout)
    over = quantized(model, kind, DTYPES[layout.precision])
    if not isinstance(params, TrainState):
        return over, quantize(model, params, kind)
    apart = split_constants(model, params)
    values = quantize(model, apart.params, kind)
    return over, join_constants(over, replace(apart, params=values))


def _check_whole(params: Any) -> None:
    for path, one in jax.tree.leaves_with_path(getattr(params, "params", params)):
        if isinstance(one, jax.Array) and not one.is_fully_addressable:
            raise InputError(
                "weights= of 8 bits are made from whole values, but parameter "
                f"{path_name(path)} lies on {len(one.sharding.device_set)} devices of "
                "several processes; give those of a file, or leave weights= out",
                key="generation.parameters_not_whole",
            )


def quantized(model: Model, kind: str, dtype: Any) -> Model:
    """Return the model with 8-bit weights and their scales as parameters.

    Args:
        model: As its family builds it.
        kind: `int8` or `fp8`.
        dtype: In which it computes.
    """
    matrices = _matrices(model)
    parameters: Params = {}
    for path, one in flat(model.parameters).items():
        keys = tuple(path.split("."))
        if path not in matrices:
            # Values are given; a module's build, which drew them, is not asked again.
            drawn = one.initial or _zeros(one.shape, one.dtype)
            insert(parameters, keys, replace(one, initial=drawn))
            continue
        for name, part in _parts(matrices[path]).items():
            insert(parameters, (*keys, name), part)

    def rebuild(name: str, params: Params, _: Params) -> Params:
        return _numbers(params, kind, dtype)

    return rebuilt(model, parameters, rebuild)


def quantize(model: Model, params: Params, kind: str) -> Params:
    """Return values of `quantized`'s parameters, one layer of an array at a time.

    Args:
        model: As given.
        params: Its parameters, stacked in any order: arrays, or what parts can be read
            of.
        kind: `int8` or `fp8`.

    Returns:
        A tree with NumPy arrays in place of each matrix, `values` and `scale`.

    Raises:
        InputError: qwix is not installed.
    """
    matrices = _matrices(model)
    tree: Params = {}
    for path, array in jax.tree.leaves_with_path(params):
        keys = tuple(key.key for key in path)
        matrix = matrices.get(path_name(path))
        if matrix is None:
            insert(tree, keys, array)
            continue
        layers = [_layer(array, at, matrix, kind) for at in range(array.shape[0])]
        for name, parts in zip(
            ("values", "scale"), zip(*layers, strict=True), strict=True
        ):
            insert(tree, (*keys, name), np.stack(parts))
    return tree


def _matrices(model: Model) -> dict[str, Matrix]:
    return {
        path: matrix
        for path, one in flat(model.parameters).items()
        if one.num_layers is not None and (matrix := Matrix.from_parameter(one))
    }


def _parts(matrix: Matrix) -> dict[str, Parameter]:
    """Return a matrix's parameters: 8 bits a value, an fp32 scale an output."""
    one = matrix.parameter
    inputs = _inputs(matrix)
    shape = tuple(1 if dim in inputs else n for dim, n in enumerate(one.shape))
    axes = tuple(
        None if dim in inputs else name for dim, name in enumerate(one.logical_axes)
    )
    return {
        "values": replace(one, dtype=jnp.int8, initial=_zeros(one.shape, jnp.int8)),
        "scale": replace(
            one,
            shape=shape,
            logical_axes=axes,
            dtype=jnp.float32,
            initial=_zeros(shape, jnp.float32),
            in_full=True,
        ),
    }


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return lambda key: jnp.zeros(shape, dtype)


def _layer(
    array: Any, at: int, matrix: Matrix, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    weight = jnp.asarray(np.asarray(array[at : at + 1])[0], jnp.float32)
    outputs = [dim for dim in range(weight.ndim) if dim not in _inputs(matrix)]
    found = _qwix().quantize(weight, KINDS[kind], channelwise_axes=outputs)
    bits = np.asarray(lax.bitcast_convert_type(found.qvalue, jnp.int8))
    return bits, np.asarray(found.scale, np.float32)


def _inputs(matrix: Matrix) -> range:
    return range(matrix.num_batch, matrix.num_batch + matrix.num_inputs)


def _numbers(tree: Any, kind: str, dtype: Any) -> Any:
    """Return the tree with a number for each 8 bits."""
    if not isinstance(tree, dict):
        return tree
    if tree.keys() != {"values", "scale"}:
        return {key: _numbers(value, kind, dtype) for key, value in tree.items()}
    values = lax.bitcast_convert_type(tree["values"], KINDS[kind])
    array = _qwix().QArray(values, tree["scale"])
    return _qwix().dequantize(array).astype(dtype)


def _qwix() -> Any:
    try:
        import qwix
    except ModuleNotFoundError as error:
        raise InputError(
            f"weights of 8 bits need qwix: {install_extra('quantized')}",
            key="generation.missing_package",
        ) from error
    return qwix
