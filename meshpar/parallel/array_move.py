"""The move of one array to another sharding; stacked arrays move layer by layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshpar.errors import InputError
from meshpar.model.parameter import Parameter

Struct = jax.ShapeDtypeStruct
_PLACE = Struct((), jnp.int32)


class DeviceBytes(NamedTuple):
    """Bytes of an array on one device.

    Args:
        before, after: Bytes before and after the move.
        layer_before, layer_after: Bytes of one layer; 0 outside blocks.
    """

    before: int
    after: int
    layer_before: int = 0
    layer_after: int = 0

    @property
    def growth(self) -> int:
        """Return by how many bytes the array grows."""
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class ArrayMove:
    """The move of one parameter to another sharding and order of layers.

    Args:
        path: Path of the parameter.
        array: Array of JAX or NumPy, or an object whose parts can be read.
        given, wanted: The parameter before and after the move.
        sharding: Sharding after the move.
        dtype: Dtype after the move.
    """

    path: str
    array: Any
    given: Parameter
    wanted: Parameter
    sharding: NamedSharding
    dtype: Any

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the layer at each place before and after; None if both are equal."""
        if self.given.places == self.wanted.places:
            return None
        return self.given.places, self.wanted.places

    @property
    def bytes(self) -> DeviceBytes:
        """Return its bytes on one device."""
        shape = self.sharding.shard_shape(self.wanted.stacked_shape)
        after = math.prod(shape) * jnp.dtype(self.dtype).itemsize
        if not isinstance(self.array, jax.Array):
            return DeviceBytes(0, after)
        own = self.array.sharding.shard_shape(self.array.shape)
        before = math.prod(own) * self.array.dtype.itemsize
        if self.given.num_layers is None:
            return DeviceBytes(before, after)
        return DeviceBytes(before, after, before // own[0], after // shape[0])

    @property
    def stays(self) -> bool:
        """True if the same devices hold it before and after, in the same order."""
        return _devices(self.array.sharding) == _devices(self.sharding)

    @property
    def meets_itself(self) -> bool:
        """True if a device holds parts of it both before and after."""
        if not isinstance(self.array, jax.Array):
            return False
        before = self.array.sharding.device_set
        return bool(before & self.sharding.device_set)

    @property
    def can_park(self) -> bool:
        """True if this process holds all of it, before and after."""
        return self._is_local and self.sharding.is_fully_addressable

    @property
    def is_in_each_process(self) -> bool:
        """True if each process holds all of it, and will hold a part of it.

        Each process then reads its own part and sends nothing; whether the values of
        all processes are equal is not checked.
        """
        return self._is_local and not self.sharding.is_fully_addressable

    @property
    def _is_local(self) -> bool:
        return isinstance(self.array, jax.Array) and self.array.is_fully_addressable

    def check(self) -> None:
        """Check that no process would have to send to devices of only other processes.

        Raises:
            InputError: The devices before and after differ, in several processes.
        """
        if not isinstance(self.array, jax.Array) or self.is_in_each_process:
            return
        before, after = self.array.sharding, self.sharding
        local = before.is_fully_addressable and after.is_fully_addressable
        if not local and before.device_set != after.device_set:
            raise InputError(
                f"parameter {self.path} lies on {len(before.device_set)} devices of "
                f"several processes and is to lie on {len(after.device_set)} others; "
                "of several processes give the new layout the same devices, or save a "
                "checkpoint and restore it there",
                key="processes.different_devices",
            )

    @property
    def extra_bytes(self) -> int:
        """Return the bytes on a device during the move besides the arrays themselves.

        The most of its compiled programs, and a layer in transit.
        """
        if not isinstance(self.array, jax.Array) or self.is_in_each_process:
            return 0
        sizes = self.bytes
        if self.stays:
            both = sizes.before + sizes.after
            return max(_extra_bytes(program, both) for program in self._programs())
        layer = sizes.layer_before + sizes.layer_after or sizes.before
        pairs = zip(self._programs(), (sizes.before, sizes.after), strict=False)
        return layer + max(_extra_bytes(program, held) for program, held in pairs)

    def copied(self) -> jax.Array:
        """Return the array after the move, and leave the one before it valid."""
        if not isinstance(self.array, jax.Array):
            return self._from_host(self.array)
        if self.is_in_each_process:
            return self._from_host(Parked(self.array))
        if self.given.num_layers is not None:
            return self._layer_by_layer()
        # A copy, because the array before may be deleted.
        result = self._copy(self.array)
        return result if self.stays else jax.device_put(result, self.sharding)

    def moved_by_host(self) -> jax.Array:
        """Delete the array and return it moved, by way of the host's memory."""
        parked = Parked(self.array)
        self.array.delete()
        return self._from_host(parked)

    def _from_host(self, array: Any) -> jax.Array:
        shape = self.wanted.stacked_shape
        read: dict[tuple, np.ndarray] = {}

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            spans = zip(index or (), shape, strict=True)
            key = tuple(span.indices(size)[:2] for span, size in spans)
            if key not in read:  # Several devices may hold the same part.
                read[key] = self._part(array, index)
            return read[key]

        return jax.make_array_from_callback(shape, self.sharding, part)

    def _part(self, array: Any, index: Any) -> np.ndarray:
        """Read the part of the array that a device will hold."""
        if self.places is None:
            # JAX may share the memory of a NumPy array that is still somebody's.
            is_shared = isinstance(array, np.ndarray)
            return np.asarray(array[index]).astype(self.dtype, copy=is_shared)
        before, after = self.places

        def row(layer: int) -> np.ndarray:
            if layer < 0:
                sizes = zip(index[1:], self.wanted.shape, strict=True)
                shape = (len(range(*part.indices(size))) for part, size in sizes)
                return np.zeros((1, *shape), self.dtype)
            at = before.index(layer)
            values = np.asarray(array[(slice(at, at + 1), *index[1:])])
            return values.astype(self.dtype)

        return np.concatenate([row(layer) for layer in after[index[0]]])

    def _layer_by_layer(self) -> jax.Array:
        before, after, layer = self._structs
        result = jnp.zeros(after.shape, after.dtype, device=after.sharding)
        given_places = self.given.places
        for to, wanted_layer in enumerate(self.wanted.places):
            if wanted_layer < 0:
                continue
            at = given_places.index(wanted_layer)
            if self.stays:
                put = _put_from(after, before, layer.sharding)
                result = put(result, self.array, np.int32(to), np.int32(at))
            else:
                values = _layer(before)(self.array, np.int32(at))
                values = jax.device_put(values, layer.sharding)
                result = _put(after, layer)(result, values, np.int32(to))
        return result

    def _programs(self) -> Iterator[jax.stages.Compiled]:
        before, after, layer = self._structs
        if self.given.num_layers is None:
            yield self._copy
        elif self.stays:
            yield _put_from(after, before, layer.sharding)
        else:
            yield _layer(before)
            yield _put(after, layer)

    @property
    def _copy(self) -> jax.stages.Compiled:
        sharding = self.sharding if self.stays else None
        return _copied(self._structs[0], jnp.dtype(self.dtype), sharding)

    @property
    def _structs(self) -> tuple[Struct, Struct, Struct]:
        """Return structs of the array before and after, and of a layer after."""
        array, wanted = self.array, self.wanted
        layer_spec = PartitionSpec(*self.sharding.spec[1:])
        return (
            Struct(array.shape, array.dtype, sharding=array.sharding),
            Struct(wanted.stacked_shape, self.dtype, sharding=self.sharding),
            Struct(
                wanted.shape,
                array.dtype,
                sharding=NamedSharding(self.sharding.mesh, layer_spec),
            ),
        )


@functools.lru_cache
def _copied(before: Struct, dtype: Any, sharding: Any) -> jax.stages.Compiled:
    jitted = jax.jit(lambda x: jnp.copy(x.astype(dtype)), out_shardings=sharding)
    return jitted.lower(before).compile()


def _devices(sharding: Sharding) -> tuple[jax.Device, ...]:
    """Return the devices of a sharding, in the order in which programs number them."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.ravel(np.asarray(sharding.mesh.devices)).tolist())
    return tuple(sharding.device_set)


def _extra_bytes(program: jax.stages.Compiled, held: int) -> int:
    """Return the bytes that a program takes on a device, less `held` bytes."""
    sizes: Any = program.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    needed += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    return max(0, int(needed) - held)


@functools.lru_cache
def _put_from(
    after: Struct, before: Struct, layer_sharding: NamedSharding
) -> jax.stages.Compiled:
    """Compile (array, other array, place, other place) -> array with that layer."""

    def put(array: Any, other: Any, to: Any, at: Any) -> jax.Array:
        values = jax.lax.dynamic_index_in_dim(other, at, keepdims=False)
        values = jax.lax.with_sharding_constraint(
            values.astype(array.dtype), layer_sharding
        )
        return array.at[to].set(values)

    jitted = jax.jit(put, out_shardings=after.sharding, donate_argnums=0)
    return jitted.lower(after, before, _PLACE, _PLACE).compile()


@functools.lru_cache
def _put(after: Struct, layer: Struct) -> jax.stages.Compiled:
    """Compile (array, one layer, place) -> array with that layer."""

    def put(array: Any, values: Any, to: Any) -> jax.Array:
        return array.at[to].set(values.astype(array.dtype))

    jitted = jax.jit(put, out_shardings=after.sharding, donate_argnums=0)
    return jitted.lower(after, layer, _PLACE).compile()


@functools.lru_cache
def _layer(before: Struct) -> jax.stages.Compiled:
    """Compile (array, place) -> that layer of the array."""

    def layer(array: jax.Array, at: Any) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, at, keepdims=False)

    return jax.jit(layer).lower(before, _PLACE).compile()


Box = tuple[tuple[int, int], ...]
"""First index of each dim, and the one after the last."""


class Parked:
    """A copy of an array in the host's memory, of which any part can be read.

    Args:
        array: An array on devices of this process only.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._shards: dict[Box, np.ndarray] = {}
        for shard in array.addressable_shards:
            box = _box(shard.index, array.shape)
            if box not in self._shards:
                # A copy, because NumPy shares the memory of a CPU's array.
                self._shards[box] = np.array(shard.data)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the part of the array in a slice for each of the first dims."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        wanted = _box(index, self.shape)
        if wanted in self._shards:
            return self._shards[wanted]
        part = np.empty([stop - start for start, stop in wanted], self.dtype)
        for box, shard in self._shards.items():
            common = tuple(
                (max(span[0], other[0]), min(span[1], other[1]))
                for span, other in zip(wanted, box, strict=True)
            )
            if all(start < stop for start, stop in common):
                part[_within(common, wanted)] = shard[_within(common, box)]
        return part


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    parts = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in parts)


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    """Return the index of `box` in an array that covers `whole`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, whole, strict=True)
    )
