"""A batch checked against the model's inputs, and put on the devices.

Each of several processes gives the rows that its own devices hold, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshpar.checks.batches import check_batch, check_values
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.inputs import Input
from meshpar.train.refusals import batch_refusal


@dataclass(frozen=True, kw_only=True)
class BatchPlacement:
    """The checks and shardings of batches.

    Args:
        inputs: The inputs that the model declares.
        check_sequences: Refuses sequences of a batch, whole or `partly`, that cannot be
            split; None if none are.
        layout: The layout, over whose batch axes and microbatches a batch divides.
        sharding: Sharding of examples.
        sharding_of: (name, global array or its shape) -> sharding, where arrays differ
            in it.
    """

    inputs: Mapping[str, Input]
    check_sequences: Callable[..., None] | None
    layout: Layout
    sharding: NamedSharding
    sharding_of: Callable[[str, Any], NamedSharding] | None = None
    _passed: set[tuple[Any, ...]] = field(default_factory=set, compare=False)

    def place(
        self,
        batch: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        partly: bool = False,
        global_batch: int | None = None,
    ) -> dict[str, jax.Array]:
        """Put a batch on the devices; arrays that are there already stay.

        Args:
            batch: Arrays by name; of several processes the rows of this one.
            microbatches: Number of parts that it is cut into; the layout's when absent.
            partly: Whether declared arrays may be missing.
            global_batch: Examples of all processes, to check the number of rows.

        Raises:
            InputError: It is not as declared, does not divide, or has not as many rows
                as this process's devices hold.
        """
        self._check_once(batch, microbatches, partly=partly)
        if all(
            isinstance(array, jax.Array)
            and array.sharding == self._sharding(name, array)
            for name, array in batch.items()
        ):
            return dict(batch)
        if global_batch is not None:
            self._check_rows(batch, global_batch)
        if self._is_shared:
            return {name: self._joined(name, array) for name, array in batch.items()}
        lie = {name: self._sharding(name, array) for name, array in batch.items()}
        return jax.device_put(dict(batch), lie)

    def rows_here(self, global_batch: int) -> np.ndarray:
        """Return the numbers of the rows that this process's devices hold, in order.

        Raises:
            InputError: The global batch does not divide over the batch axes.
        """
        if global_batch % self.layout.batch_shards:
            self.check_examples(global_batch, microbatches=1)
        of_shard = np.arange(global_batch).reshape(self.layout.batch_shards, -1)
        return of_shard[list(self._shards_here)].ravel()

    def check(
        self,
        batch: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        partly: bool = False,
    ) -> None:
        """Refuse a batch that `place` refuses."""
        inputs = self.inputs
        if partly:
            inputs = {name: one for name, one in inputs.items() if name in batch}
        num_rows, name = check_batch(inputs, batch), next(iter(batch))
        if self.check_sequences is not None:
            self.check_sequences(batch, partly=partly)
        num_examples = self._num_examples(name, batch[name], num_rows)
        self.check_examples(num_examples, name, microbatches)

    def check_examples(
        self, num_examples: int, name: str = "", microbatches: int | None = None
    ) -> None:
        """Refuse a global batch that does not divide over the batch axes."""
        refused = batch_refusal(self.layout, num_examples, name, microbatches)
        if refused is not None:
            raise refused

    @property
    def _is_shared(self) -> bool:
        """True if other processes hold a part of each batch."""
        mesh = self.sharding.mesh
        return isinstance(mesh, Mesh) and not self.sharding.is_fully_addressable

    @cached_property
    def _shards_here(self) -> tuple[int, ...]:
        """Numbers of the batch axes' parts on this process's devices."""
        if not self._is_shared:
            return tuple(range(self.layout.batch_shards))
        places = self.sharding.addressable_devices_indices_map(
            (self.layout.batch_shards,)
        )
        shards = {index[0].start or 0 for index in places.values() if index}
        if not shards:
            raise InputError(
                f"no device of process {jax.process_index()} is in the mesh of layout "
                f"{str(self.layout)!r}: lay it out over the devices of all processes",
                key="mesh.process_without_devices",
            )
        return tuple(sorted(shards))

    def _num_examples(self, name: str, array: Any, num_rows: int) -> int:
        """Return the number of examples of the global batch of an array."""
        is_whole = isinstance(array, jax.Array | jax.ShapeDtypeStruct)
        if is_whole or not self._is_shared:
            return num_rows
        here, all_shards = len(self._shards_here), self.layout.batch_shards
        if num_rows % here:
            layout = self.layout
            experts = f",expert={layout.expert}" if layout.expert > 1 else ""
            raise InputError(
                f"batch[{name!r}] has {num_rows} rows on process "
                f"{jax.process_index()} of {jax.process_count()}, whose devices hold "
                f"{here} of the {all_shards} parts of data={layout.data},"
                f"fsdp={layout.fsdp}{experts}: give it a multiple of {here} rows, "
                f"{here}/{all_shards} of the global batch (step.rows_here)",
                key="batch.indivisible_rows",
            )
        return num_rows // here * all_shards

    def _check_rows(self, batch: Mapping[str, Any], global_batch: int) -> None:
        num_rows, wanted = len(next(iter(batch.values()))), self.rows_here(global_batch)
        if num_rows != len(wanted):
            raise InputError(
                f"batch[{next(iter(batch))!r}] has {num_rows} rows, but of a global "
                f"batch of {global_batch} the devices of process "
                f"{jax.process_index()} of {jax.process_count()} hold {len(wanted)}: "
                "give those of step.rows_here(global_batch)",
                key="batch.wrong_number_of_rows",
            )

    def _joined(self, name: str, array: Any) -> jax.Array:
        """Return the global array for this process's rows."""
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return jax.device_put(array, self._sharding(name, array))
        rows = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        parts = np.split(rows, len(self._shards_here))
        length = len(parts[0])
        shape = (length * self.layout.batch_shards, *rows.shape[1:])

        def part(index: Any) -> np.ndarray:
            shard = (index[0].start or 0) // max(length, 1)
            return parts[self._shards_here.index(shard)][(slice(None), *index[1:])]

        whole = jax.ShapeDtypeStruct(shape, rows.dtype)
        return jax.make_array_from_callback(shape, self._sharding(name, whole), part)

    def structs(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a global batch, with their shardings."""
        return {
            name: with_sharding(struct, self._sharding(name, struct))
            for name, struct in batch_structs(batch).items()
        }

    def _sharding(self, name: str, array: Any) -> NamedSharding:
        if self.sharding_of is None:
            return self.sharding
        return self.sharding_of(name, array)

    def _check_once(
        self, batch: Mapping[str, Any], microbatches: int | None, *, partly: bool
    ) -> None:
        """`check` a batch; only its values if its shapes and dtypes have passed."""
        try:
            shapes = tuple(
                (name, array.shape, array.dtype) for name, array in batch.items()
            )
        except AttributeError:  # No arrays by name: the check says so.
            shapes = ()
        key = (shapes, microbatches, partly)
        if shapes and key in self._passed:
            check_values(self.inputs, batch)
            return
        self.check(batch, microbatches, partly=partly)
        self._passed.add(key)


def batch_structs(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every array, as the devices will hold it."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
        ),
        dict(batch),
    )


def with_sharding(struct: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, with its sharding."""
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
