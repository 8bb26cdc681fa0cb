"""Memory of a step with tables by arithmetic, before anything is compiled.

On a device, with `d` values a row, `u` different ids of its examples, `E` rows that it
exchanges in a round (devices times room) and `v` arrays of a value for each value of a
row (the rows, and an optimizer's moments), all in fp32:

    states      the model's, and the tables' rows with their optimizer state
    ids         16 bytes for each of its ids, from the lookup to the update
    looking up  u d + 2 E d: rows found, asked for and come back
    updating    u d + (3 + v) E d: gradients summed up, sent, received and summed over
                devices, and old values
    model       residuals of its backward for the examples in flight, its gradients

and of the last three the largest, for they follow one another; the inputs' gradients
lie beside the last. Which of a phase's arrays XLA keeps at once was read from programs
compiled for H100s (jax 0.10.2, 2026-11-22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.scope import Scope
from meshpar.model.tracing import loss
from meshpar.planner.plan import gigabytes
from meshpar.tables.exchange import Exchange
from meshpar.tables.programs import TableFunctions, split_state
from meshpar.tables.stores import SPREAD, Store
from meshpar.tables.tables import EmbeddingTables
from meshpar.train.memory_report import local_bytes

_VALUE_BYTES, _ID_BYTES = 4, 16


@dataclass(frozen=True, kw_only=True)
class TableMemory:
    """Bytes of one device.

    Args:
        model_bytes: The model's parameters and optimizer state.
        table_bytes: The tables' rows and optimizer state.
        batch_bytes: This device's part of a batch.
        temp_bytes: The most of all that comes and goes.
    """

    model_bytes: int
    table_bytes: int
    batch_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        states = self.model_bytes + self.table_bytes
        return states + self.batch_bytes + self.temp_bytes

    def lines(self, _: Layout) -> list[str]:
        """Return a line of text: bytes by what they are for."""
        return [
            f"tables {gigabytes(self.table_bytes)}, model "
            f"{gigabytes(self.model_bytes)}, batch {gigabytes(self.batch_bytes)}, "
            f"temporaries {gigabytes(self.temp_bytes)}"
        ]

    def as_json(self) -> dict[str, float]:
        """Return the parts and their sum."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def predicted_memory(
    functions: TableFunctions, batch: Mapping[str, Any]
) -> TableMemory:
    """Bytes of a step on the fullest device.

    Args:
        functions: Of the step.
        batch: Arrays of a global batch, or their shapes.
    """
    layout = functions.dense.placement.layout
    dense, tables = split_state(functions.state_shapes)
    of_dense, of_tables = split_state(functions.shardings)
    own = {
        name: jax.ShapeDtypeStruct(
            (array.shape[0] // layout.batch_shards, *array.shape[1:]), array.dtype
        )
        for name, array in batch.items()
    }
    return TableMemory(
        model_bytes=local_bytes(dense, of_dense),
        table_bytes=local_bytes(tables, of_tables),
        batch_bytes=sum(map(_bytes, own.values())),
        temp_bytes=_temp_bytes(
            functions, own, local_bytes(dense.params, of_dense.params)
        ),
    )


def _temp_bytes(
    functions: TableFunctions, batch: Mapping[str, Any], param_bytes: int
) -> int:
    layout, mesh = functions.dense.placement.layout, functions.mesh
    examples = _examples(batch)
    beside = mesh.size // layout.batch_shards
    own = -(-examples // beside)
    phases = [_phases(store, functions.tables, own) for store in functions.stores]
    ids = sum(_ID_BYTES * own * store.lookups for store in functions.stores)
    rows = functions.tables.row_shapes
    of_inputs = sum(
        _VALUE_BYTES * examples * math.prod(shape) for shape in rows.values()
    )
    in_flight = min(layout.stage, layout.microbatches) / layout.microbatches
    kept = in_flight * _residual_bytes(functions.dense.model_as_given, batch, rows)
    model = of_inputs + kept + param_bytes
    most = [max(found[at] for found in phases) for at in (0, 1)]
    return int(ids + max(most[0] + of_inputs, most[1] + of_inputs + param_bytes, model))


def _phases(store: Store, tables: EmbeddingTables, examples: int) -> tuple[int, int]:
    """Bytes of looking up in one store, and of updating it."""
    distinct = store.distinct(examples)
    slots = tables.optimizer.slots.values()
    of_value = 1 + sum(not slot.per_row for slot in slots)
    if store.kind == SPREAD:
        exchange = Exchange.for_examples(store, ("all",), examples)
        exchanged, width = store.num_devices * exchange.room, store.dim
    else:
        exchanged, width = store.num_devices * distinct, store.local_dim
    row, part = _VALUE_BYTES * store.dim, _VALUE_BYTES * width
    at_position = examples * store.lookups * row
    look_up = distinct * row + max(2 * exchanged * part, at_position)
    return look_up, distinct * row + (3 + of_value) * exchanged * part


def _residual_bytes(
    model: Model, batch: Mapping[str, Any], rows: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the bytes that the forward keeps for the backward, without parameters."""
    examples = _examples(batch)
    known = {name: batch[name] for name in model.known_inputs if name in batch}
    known |= {
        name: jax.ShapeDtypeStruct((examples, *shape), jnp.float32)
        for name, shape in rows.items()
    }
    params = jax.eval_shape(model.init, 0)

    def kept(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda p: loss(model, p, batch, Scope()), params)[1]

    traced = jax.make_jaxpr(kept)(params, known).jaxpr
    # A parameter that is kept lies there anyway, and nothing is kept twice.
    own = set(traced.invars[: len(jax.tree.leaves(params))])
    residuals = {one for one in traced.outvars if isinstance(one, Var)} - own
    return sum(_bytes(one.aval) for one in residuals)


def _bytes(one: Any) -> int:
    return math.prod(one.shape) * one.dtype.itemsize


def _examples(batch: Mapping[str, Any]) -> int:
    """Examples of a batch."""
    return next(iter(batch.values())).shape[0]
