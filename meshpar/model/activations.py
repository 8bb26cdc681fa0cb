"""The activations of a model: what it names while it is traced, on no device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.model.contract import Model
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.rules.rules import LogicalAxes


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An array that a model lays out by name."""

    logical_axes: LogicalAxes
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def traced_activations(model: Model, examples: int, seq: int) -> tuple[Activation, ...]:
    """Every activation that `model` constrains, once each, and the batch itself.

    They depend on no layout: who tries many layouts of a model waits once.

    Args:
        model: The model; one layer of each group of blocks is traced.
        examples: Examples in the batch.
        seq: Tokens of an example.

    Raises:
        InputError: The model cannot be traced on such a batch.
    """
    recorder = _Recorder()
    with tracing(f"the model cannot be traced on a batch of shape {(examples, seq)}"):
        batch = traced_batch(model, examples, seq)
        once, *shapes = traced_forward(model, batch, rules=recorder, head=True)
        jax.eval_shape(once, *shapes)
    batch_dim = Activation(logical_axes=("batch",), shape=(examples,))
    return tuple(dict.fromkeys([batch_dim, *recorder.activations]))


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
