"""The activations of a model: what it names while it is traced, on no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.model import Model, Parameter, Params, batch_shapes, is_parameter
from meshpar.rules import LogicalAxes
from meshpar.scope import EXAMPLE, Scope


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An array that a model lays out by name."""

    logical_axes: LogicalAxes
    shape: tuple[int, ...]


def traced_activations(model: Model, examples: int, seq: int) -> list[Activation]:
    """Every activation that `model` constrains, once each, and the batch itself.

    Args:
        model: The model; one layer of each group of blocks is traced.
        examples: Examples in the batch.
        seq: Tokens of an example.

    Raises:
        InputError: The model cannot be traced on such a batch.
    """
    recorder = _Recorder()
    batch = _batch_of(examples, seq)
    ends, groups = model.split(
        jax.tree.map(_one_layer, model.parameters, is_leaf=is_parameter)
    )

    def once(ends: Params, groups: list[Params], batch: dict) -> Any:
        scope = Scope(rules=recorder, batch=batch)  # type: ignore[arg-type]
        x = model.embed(ends, batch, scope)
        for group, params in zip(model.groups, groups, strict=True):
            x, _ = group.run(params, x, scope)
        return model.head(ends, x, batch, scope)

    try:
        jax.eval_shape(once, ends, groups, batch)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the model cannot be traced on a batch of shape {(examples, seq)}: {error}"
        ) from error
    batch_dim = Activation(logical_axes=("batch",), shape=(examples,))
    return list(dict.fromkeys([batch_dim, *recorder.activations]))


class _Recorder:
    """Stands in for `Rules` while a model is traced, and notes what it names."""

    def __init__(self) -> None:
        self.activations: list[Activation] = []
        self.table: dict[str, tuple[str, ...]] = {}

    def constrain(
        self, x: jax.Array | jax.ShapeDtypeStruct, logical_axes: LogicalAxes
    ) -> Any:
        self.activations.append(Activation(logical_axes=logical_axes, shape=x.shape))
        return x

    def spec(
        self, logical_axes: LogicalAxes, shape: tuple[int, ...], **_: Any
    ) -> PartitionSpec:
        self.constrain(jax.ShapeDtypeStruct(shape, jnp.float32), logical_axes)
        return PartitionSpec(*(None for _ in logical_axes))


def _batch_of(examples: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    example = jax.ShapeDtypeStruct((examples,), jnp.uint32)
    return {**batch_shapes(examples, seq), EXAMPLE: example}


def _one_layer(parameter: Parameter) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype)
