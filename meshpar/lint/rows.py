"""What each device holds of a parameter under a layout, a row of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layout import Layout
from meshpar.model.parameter import Parameter
from meshpar.parallel.placement import PARAM_DTYPES
from meshpar.parallel.zero import parameter_specs
from meshpar.rules.rules import LogicalAxes, Rules, entry_axes


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter under a layout; `bytes` are per device, `mesh_axes` per dim."""

    path: str
    shape: tuple[int, ...]
    logical_axes: LogicalAxes
    mesh_axes: tuple[str | tuple[str, ...] | None, ...]
    local_shape: tuple[int, ...]
    bytes: int


def row_of(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> ParameterRow:
    """A parameter's row; raises `RuleError` where it cannot be laid out."""
    spec = parameter_specs(path, parameter, layout, rules)["spec"]
    return _row(path, parameter, spec, layout.mesh_shape, layout.param_dtype)


def replicated_row(path: str, parameter: Parameter, param_dtype: str) -> ParameterRow:
    """The row of a parameter that is whole on every device."""
    whole = PartitionSpec(*(None for _ in parameter.stacked_shape))
    return _row(path, parameter, whole, {}, param_dtype)


def _row(
    path: str,
    parameter: Parameter,
    spec: PartitionSpec,
    sizes: Mapping[str, int],
    param_dtype: str,
) -> ParameterRow:
    local = tuple(
        size // math.prod(sizes[axis] for axis in entry_axes(entry))
        for size, entry in zip(parameter.stacked_shape, spec, strict=True)
    )
    return ParameterRow(
        path=path,
        shape=parameter.stacked_shape,
        logical_axes=parameter.stacked_axes,
        mesh_axes=tuple(spec),
        local_shape=local,
        bytes=math.prod(local) * jnp.dtype(PARAM_DTYPES[param_dtype]).itemsize,
    )
