"""One array from one sharding to another, of stacked arrays layer by layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
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
    """What an array takes of a device.

    Args:
        before, after: As it lies, and as it is to lie.
        layer_before, layer_after: One layer of it; 0 outside blocks.
    """

    before: int
    after: int
    layer_before: int = 0
    layer_after: int = 0

    @property
    def growth(self) -> int:
        """What it takes more afterwards."""
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class ArrayMove:
    """One array on its way.

    Args:
        path: Of the parameter.
        array: JAX's, NumPy's, or anything that parts can be read of.
        given, wanted: The parameter as it lies, and as it is to lie.
        sharding: It is to have.
        dtype: It is to have.
    """

    path: str
    array: Any
    given: Parameter
    wanted: Parameter
    sharding: NamedSharding
    dtype: Any

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The layer at each place, before and after; None where both are alike."""
        if self.given.places == self.wanted.places:
            return None
        return self.given.places, self.wanted.places

    @property
    def bytes(self) -> DeviceBytes:
        """What it takes of a device."""
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
        """Whether the same devices have it, in the same order."""
        return _devices(self.array.sharding) == _devices(self.sharding)

    @property
    def meets_itself(self) -> bool:
        """Whether a device has parts of it before and after."""
        if not isinstance(self.array, jax.Array):
            return False
        before = self.array.sharding.device_set
        return bool(before & self.sharding.device_set)

    @property
    def can_park(self) -> bool:
        """Whether this process has all of it, before and after."""
        here = isinstance(self.array, jax.Array) and self.array.is_fully_addressable
        return here and self.sharding.is_fully_addressable

    @property
    def is_of_each(self) -> bool:
        """Whether each process has all of it now, and will have a part of it.

        Each then reads its own part, and none sends any: that their values are equal is
        not compared.
        """
        here = isinstance(self.array, jax.Array) and self.array.is_fully_addressable
        return here and not self.sharding.is_fully_addressable

    def check(self) -> None:
        """Refuses what would have to go from one process's devices to another's alone.

        Raises:
            InputError: It would.
        """
        if not isinstance(self.array, jax.Array) or self.is_of_each:
            return
        before, after = self.array.sharding, self.sharding
        here = before.is_fully_addressable and after.is_fully_addressable
        if not here and before.device_set != after.device_set:
            raise InputError(
                f"parameter {self.path} lies on {len(before.device_set)} devices of "
                f"several processes and is to lie on {len(after.device_set)} others; "
                "of several processes give the new layout the same devices, or save a "
                "checkpoint and restore it there",
                key="processes.different_devices",
            )

    @property
    def extra_bytes(self) -> int:
        """Of a device, while its programs run, beside it before and after.

        As the compiler says; the most of any of its programs, and a layer under way.
        """
        if not isinstance(self.array, jax.Array) or self.is_of_each:
            return 0
        sizes = self.bytes
        if self.stays:
            known = sizes.before + sizes.after
            return max(_extra_bytes(program, known) for program in self._programs())
        one = sizes.layer_before + sizes.layer_after or sizes.before
        return one + max(
            _extra_bytes(program, known)
            for program, known in zip(
                self._programs(), (sizes.before, sizes.after), strict=False
            )
        )

    def done(self) -> jax.Array:
        """The array as it is to lie; as it lies it stays."""
        if not isinstance(self.array, jax.Array):
            return self._from_host(self.array)
        if self.is_of_each:
            return self._from_host(Parked(self.array))
        if self.given.num_layers is not None:
            return self._layer_by_layer()
        # A copy, as what shares memory with an array is gone with it.
        copied = self._copy(self.array)
        return copied if self.stays else jax.device_put(copied, self.sharding)

    def parked(self) -> jax.Array:
        """The same by way of the host's memory: no device has it twice.

        The array is given up.
        """
        there = Parked(self.array)
        self.array.delete()
        return self._from_host(there)

    def _from_host(self, array: Any) -> jax.Array:
        shape = self.wanted.stacked_shape
        read: dict[tuple, np.ndarray] = {}

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            spans = zip(index or (), shape, strict=True)
            key = tuple(one.indices(size)[:2] for one, size in spans)
            if key not in read:  # Several devices may have the same part.
                read[key] = self._part(array, index)
            return read[key]

        return jax.make_array_from_callback(shape, self.sharding, part)

    def _part(self, array: Any, index: Any) -> np.ndarray:
        """What a device is to have, of which only that is read."""
        if self.places is None:
            return np.asarray(array[index]).astype(self.dtype)
        before, after = self.places

        def row(layer: int) -> np.ndarray:
            if layer < 0:
                return np.zeros(self._shape_of(index), self.dtype)
            at = before.index(layer)
            found = np.asarray(array[(slice(at, at + 1), *index[1:])])
            return found.astype(self.dtype)

        return np.concatenate([row(layer) for layer in after[index[0]]])

    def _shape_of(self, index: tuple[slice, ...]) -> tuple[int, ...]:
        """Of one layer of a part."""
        parts = zip(index[1:], self.wanted.shape, strict=True)
        return (1, *(len(range(*part.indices(size))) for part, size in parts))

    def _layer_by_layer(self) -> jax.Array:
        before, after, layer = self._structs
        result = _zeros(after)()
        for to, at in self._rows():
            if self.stays:
                put = _put_from(after, before, layer.sharding)
                result = put(result, self.array, np.int32(to), np.int32(at))
            else:
                one = _layer(before)(self.array, np.int32(at))
                one = jax.device_put(one, layer.sharding)
                result = _put(after, layer)(result, one, np.int32(to))
        return result

    def _rows(self) -> list[tuple[int, int]]:
        """(place wanted, place given) of each layer."""
        before = self.given.places
        wanted = enumerate(self.wanted.places)
        return [(to, before.index(layer)) for to, layer in wanted if layer >= 0]

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
        """Shapes of the array before and after, and of a layer as it is to lie."""
        array, wanted = self.array, self.wanted
        of_layer = PartitionSpec(*self.sharding.spec[1:])
        return (
            Struct(array.shape, array.dtype, sharding=array.sharding),
            Struct(wanted.stacked_shape, self.dtype, sharding=self.sharding),
            Struct(
                wanted.shape,
                array.dtype,
                sharding=NamedSharding(self.sharding.mesh, of_layer),
            ),
        )


def _devices(sharding: Sharding) -> tuple[jax.Device, ...]:
    """In the order that a program of that sharding numbers them."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.ravel(np.asarray(sharding.mesh.devices)).tolist())
    return tuple(sharding.device_set)


def _extra_bytes(program: jax.stages.Compiled, known: int) -> int:
    """What a device holds while a program runs, beside what is known of."""
    found: Any = program.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes
    held += found.temp_size_in_bytes - found.alias_size_in_bytes
    return max(0, int(held) - known)


@functools.lru_cache
def _zeros(after: Struct) -> Callable[[], jax.Array]:
    born = jax.jit(
        lambda: jnp.zeros(after.shape, after.dtype), out_shardings=after.sharding
    )
    return born.lower().compile()


@functools.lru_cache
def _copied(before: Struct, dtype: Any, sharding: Any) -> jax.stages.Compiled:
    def copied(x: jax.Array) -> jax.Array:
        return jnp.copy(x.astype(dtype))

    return jax.jit(copied, out_shardings=sharding).lower(before).compile()


@functools.lru_cache
def _put_from(
    after: Struct, before: Struct, of_layer: NamedSharding
) -> jax.stages.Compiled:
    """(array, other array, place, place in the other) -> the array with that layer."""

    def put(array: Any, other: Any, to: Any, at: Any) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(other, at, keepdims=False)
        one = jax.lax.with_sharding_constraint(one.astype(array.dtype), of_layer)
        return array.at[to].set(one)

    jitted = jax.jit(put, out_shardings=after.sharding, donate_argnums=0)
    return jitted.lower(after, before, _PLACE, _PLACE).compile()


@functools.lru_cache
def _put(after: Struct, layer: Struct) -> jax.stages.Compiled:
    """(array, one layer, place) -> the array with it."""

    def put(array: Any, one: Any, to: Any) -> jax.Array:
        return array.at[to].set(one.astype(array.dtype))

    jitted = jax.jit(put, out_shardings=after.sharding, donate_argnums=0)
    return jitted.lower(after, layer, _PLACE).compile()


@functools.lru_cache
def _layer(before: Struct) -> jax.stages.Compiled:
    """(array, place) -> that layer of it."""

    def layer(array: jax.Array, at: Any) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, at, keepdims=False)

    return jax.jit(layer).lower(before, _PLACE).compile()


Box = tuple[tuple[int, int], ...]
"""Of each dim, the first place and the one after the last."""


class Parked:
    """A copy of all shards, each once, of which any part can be read.

    Args:
        array: Its devices are all of this process.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._shards: dict[Box, np.ndarray] = {}
        for shard in array.addressable_shards:
            box = _box(shard.index, array.shape)
            if box not in self._shards:
                # A copy: what NumPy has of a CPU's array would be gone with it.
                self._shards[box] = np.array(shard.data)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part: a slice for each of the first dims."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        wanted = _box(index, self.shape)
        if wanted in self._shards:
            return self._shards[wanted]
        found = np.empty([stop - start for start, stop in wanted], self.dtype)
        for box, shard in self._shards.items():
            common = tuple(
                (max(one[0], other[0]), min(one[1], other[1]))
                for one, other in zip(wanted, box, strict=True)
            )
            if all(start < stop for start, stop in common):
                found[_within(common, wanted)] = shard[_within(common, box)]
        return found


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    parts = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in parts)


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    """The part of an array of `whole` that is `box`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, whole, strict=True)
    )
