"""Arrays on the disk: written in small chunks, and read within a host's memory."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshpar.rules.sharding import path_name
from meshpar.train.heap import give_back, returned_early

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""Begin and end in each dim."""
Index = tuple[int | slice, ...]

_SLICE_BYTES = 1 << 24
"""Replicas share what they write from this size on: each shape costs a compile."""

_ALIGNMENT = 64  # bytes

_CACHE_BYTES = 1 << 30
"""A stacked matrix in fp32 of a model of about a billion parameters."""

_BLOCK_SHARE = 0.01
"""Share of a host's bytes that it reads at once and holds in up to three copies."""

_BLOCK_BYTES = (1 << 22, 1 << 28)
"""But at least and at most."""


def handler() -> ocp.PyTreeCheckpointHandler:
    """Return the Orbax handler that writes a tree of arrays."""
    of_arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_SLICE_BYTES
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, of_arrays)
        )
    )


def save_args(tree: Any) -> ocp.args.PyTreeSave:
    """Return the arguments with which Orbax writes a tree of arrays."""
    in_chunks = ocp.SaveArgs(chunk_byte_size=chunk_bytes())
    return ocp.args.PyTreeSave(tree, jax.tree.map(lambda _: in_chunks, tree))


def stored(folder: Path) -> dict[str, Any]:
    """Return path -> name, shape, dtype and chunks of every array of a folder.

    Raises:
        ValueError: It holds something else than arrays.
    """
    metadata = handler().metadata(folder)
    tree = getattr(metadata, "tree", metadata)
    found = {path_name(path): one for path, one in jax.tree.leaves_with_path(tree)}
    for name, one in found.items():
        if not (hasattr(one, "shape") and hasattr(one, "dtype")):
            raise ValueError(f"{name} is stored as {type(one).__name__}, not an array")
    return found


def opened(folder: Path, name: str, cache: tensorstore.Context | None = None) -> Any:
    """Open one array of a folder without reading it (`tensorstore.TensorStore`).

    Args:
        folder: Of a tree that Orbax has written.
        name: Of the array.
        cache: Keeps chunks that were read (`chunk_cache`); without, none is kept.
    """
    kvstore = {"driver": "ocdbt", "base": folder.absolute().as_uri()}
    spec = {
        "driver": "zarr",
        "kvstore": {**kvstore, "path": f"{name}/"},
        # Orbax stores chunks of zeros too: one that is not there is lost.
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, read=True, context=cache).result()


def chunk_cache() -> tensorstore.Context:
    """Return a cache of the chunks read last, 1 GiB of them at most.

    Chunks that Orbax alone has cut may have something of every layer: who reads such an
    array layer by layer reads it once where it is no larger than that, and anew for
    each layer otherwise.
    """
    pool = {"total_bytes_limit": _CACHE_BYTES}
    return tensorstore.Context({"cache_pool": pool})


def read(folder: Path, structs: Any, places: Any) -> Any:
    """Read the arrays of a folder; no process waits for another.

    Args:
        folder: Of a tree that Orbax has written, layers first to last.
        structs: A tree of `jax.ShapeDtypeStruct` with shardings.
        places: For each the layer at each place of its leading dim, -1 for a place that
            becomes zeros; None where they are as stored.

    Raises:
        ValueError: It has an array more, or one less.
    """
    there = stored(folder)
    wanted = shapes_by_path(structs)
    for paths, what in (
        (wanted.keys() - there.keys(), "lacks"),
        (there.keys() - wanted.keys(), "has, unlike the model,"),
    ):
        if paths:
            raise ValueError(f"it {what} {min(paths)} ({len(paths)} such arrays)")
    all_bytes = sum(
        math.prod(stop - start for start, stop in box) * struct.dtype.itemsize
        for struct in jax.tree.leaves(structs)
        for box in _devices_by_box(struct)
    )
    least, most = _BLOCK_BYTES
    block_bytes = min(max(int(_BLOCK_SHARE * all_bytes), least), most)

    def read_one(
        path: tuple, struct: jax.ShapeDtypeStruct, order: Sequence[int] | None
    ) -> jax.Array:
        found = there[path_name(path)]
        source = opened(folder, found.name)
        chunk = found.storage.chunk_shape if found.storage else None
        most = block_bytes // struct.dtype.itemsize
        blocks = _Blocks(tuple(chunk or source.shape), order, most)
        array = _read_array(source, struct, blocks)
        give_back()
        return array

    with returned_early():
        return jax.tree.map_with_path(read_one, structs, places)


def cut_box(box: Box, chunk: Shape, most: int) -> Iterator[Box]:
    """Cut a box between chunks, outer dims first, into blocks of `most` values.

    A block of one chunk may be larger, and a box smaller than one stays whole.

    Example:
        >>> list(cut_box(((0, 4), (2, 6)), chunk=(1, 4), most=6))
        [((0, 1), (2, 6)), ((1, 2), (2, 6)), ((2, 3), (2, 6)), ((3, 4), (2, 6))]
    """
    cuts = []
    size = math.prod(stop - start for start, stop in box)
    for (start, stop), step in zip(box, chunk, strict=True):
        extent = stop - start
        # As many chunks as fit, inner dims being whole so far; at least one.
        fit = max(most * extent // max(size, 1) // step, 1) * step
        if size <= most or fit >= extent:
            cuts.append([(start, stop)])
        else:
            inner = range(start // fit * fit + fit, stop, fit)
            cuts.append(list(itertools.pairwise([start, *inner, stop])))
            size = size * fit // extent
    return itertools.product(*cuts)


def shapes_by_path(tree: Any) -> dict[str, Shape]:
    """Return path -> global shape of every array, or of its struct."""
    return {
        path_name(path): tuple(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _read_array(
    source: Any, struct: jax.ShapeDtypeStruct, blocks: _Blocks
) -> jax.Array:
    sharding = cast(NamedSharding, struct.sharding)
    devices = _devices_by_box(struct)
    parts = {
        box: _zeros([stop - start for start, stop in box], struct.dtype)
        for box in devices
    }
    for block in blocks.host_blocks(list(devices)):
        values = source[tuple(slice(*bounds) for bounds in block)].read().result()
        for box, part in parts.items():
            for here, there in blocks.common(box, block):
                part[here] = values[there]
    shards = []
    for box, on in devices.items():
        part = parts.pop(box)
        for device in on:
            to = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(part, to))
        jax.block_until_ready(shards)  # So that the part is freed before the next.
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, shards)


def _zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return zeros aligned to 64 bytes, which XLA:CPU takes without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Blocks:
    """The plan by which a host reads one array.

    Args:
        chunk: Shape of its chunks.
        places: The layer at each place; None where they lie as stored.
        most: Values of a block.
    """

    chunk: Shape
    places: Sequence[int] | None
    most: int

    def host_blocks(self, boxes: list[Box]) -> Iterator[Box]:
        """Yield the stored blocks of all boxes, without what lies between them."""
        if not boxes:
            return
        ranges = [_joined(set(bounds)) for bounds in zip(*boxes, strict=True)]
        if self.places is not None:
            there = {
                self.places[place]
                for start, stop in ranges[0]
                for place in range(start, stop)
            }
            ranges[0] = _joined((layer, layer + 1) for layer in there - {-1})
        for box in itertools.product(*ranges):
            yield from cut_box(box, self.chunk, self.most)

    def common(self, box: Box, block: Box) -> Iterator[tuple[Index, Index]]:
        """Yield the common values of box and block: their indices in each."""
        layers = None
        if self.places is not None:
            (start, stop), (first, last) = box[0], block[0]
            layers = [
                (place - start, self.places[place] - first)
                for place in range(start, stop)
                if first <= self.places[place] < last
            ]
            box, block = box[1:], block[1:]
        common = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, block, strict=True)
        ]
        if any(start >= stop for start, stop in common):
            return
        here, there = _from(common, box), _from(common, block)
        if layers is None:
            yield here, there
            return
        for place, layer in layers:
            yield (place, *here), (layer, *there)


def _joined(bounds: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(bounds):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _devices_by_box(struct: jax.ShapeDtypeStruct) -> dict[Box, list[jax.Device]]:
    """Return this host's devices by the part of an array that they hold."""
    sharding = cast(NamedSharding, struct.sharding)
    devices: dict[Box, list[jax.Device]] = {}
    here = sharding.addressable_devices_indices_map(struct.shape)
    for device, index in here.items():
        sizes = zip(index or (), struct.shape, strict=True)
        box = tuple(part.indices(size)[:2] for part, size in sizes)
        devices.setdefault(box, []).append(device)
    return devices


def _from(box: Sequence[tuple[int, int]], within: Box) -> tuple[slice, ...]:
    """Return the slices of a box within another."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, within, strict=True)
    )


_CUTS = 8
"""Number of hosts that may split a dim without reading a chunk twice."""

_CHUNK_BYTES = (1 << 16, 1 << 20)
"""At least, however few the cuts are, and about at most, where sizes have factors."""

_ARGUMENTS = ("global_shape", "write_shape", "dtype", "target_byte_size")
"""Names of the first arguments of Orbax's function."""

_RUN = 64
"""Values of the last dim that stay together: shorter runs cost time to copy."""


class ChunkBytes(int):
    """A `chunk_byte_size` of `orbax.checkpoint.SaveArgs` that asks for our shape.

    As a number it is about the most bytes of a chunk.
    """


def chunk_bytes() -> ChunkBytes:
    """Return the `chunk_byte_size` for `orbax.checkpoint.SaveArgs`.

    Orbax has an option for the bytes of chunks, none for their shape, so its function
    that chooses the shape is replaced, for arrays that are saved with this number. A
    version of Orbax that has it elsewhere uses the number alone: its files are as good,
    but hosts of other layouts read more of them.
    """
    _let_orbax_ask()
    return ChunkBytes(_CHUNK_BYTES[1])


def chunk_shape(shape: Sequence[int], part: Sequence[int], itemsize: int) -> Shape:
    """Return the shape of an array's chunks, which divides the part of a device.

    The first of three dims or more is mostly that of the layers, and cut first, into
    single ones: so one layer is read without the others.

    Args:
        shape: Of the array.
        part: What one device writes of it.
        itemsize: Bytes of a value.

    Example:
        >>> chunk_shape((16, 768, 2048), part=(8, 768, 512), itemsize=4)
        (1, 96, 256)
    """
    least, most = (-(-num_bytes // itemsize) for num_bytes in _CHUNK_BYTES)
    chunk = [max(size, 1) for size in part]

    def cuts(dim: int) -> int:
        return shape[dim] // chunk[dim]

    def can_be_cut(dim: int) -> bool:
        factor = _factor(chunk[dim])
        size = chunk[dim] // factor
        is_run = dim < len(chunk) - 1 or size >= _RUN
        return chunk[dim] > 1 and is_run and math.prod(chunk) // factor >= least

    while len(chunk) > 2 and can_be_cut(0):
        chunk[0] //= _factor(chunk[0])
    while dims := list(filter(can_be_cut, range(len(chunk)))):
        dim = min(dims, key=lambda dim: (cuts(dim), -chunk[dim]))
        if math.prod(chunk) <= most and cuts(dim) >= _CUTS:
            break
        chunk[dim] //= _factor(chunk[dim])
    return tuple(chunk)


def _factor(size: int) -> int:
    """Return the smallest prime factor of a size; 1 of 1."""
    upto = range(2, math.isqrt(size) + 1)
    return next((factor for factor in upto if size % factor == 0), size)


@functools.cache
def _let_orbax_ask() -> None:
    try:
        from orbax.checkpoint._src.arrays import subchunking

        theirs = subchunking.choose_chunk_shape
    except (ImportError, AttributeError):
        return
    subchunking.choose_chunk_shape = _asking(theirs)


def _asking(theirs: Callable[..., Shape]) -> Callable[..., Shape]:
    """Return Orbax's function, with our shape for `ChunkBytes`.

    If its arguments are unknown it is returned as it is, with a warning.
    """
    signature = inspect.signature(theirs)
    found = tuple(signature.parameters)[: len(_ARGUMENTS)]
    if found != _ARGUMENTS:
        warnings.warn(
            f"Orbax chooses chunks by {', '.join(found)}, not by "
            f"{', '.join(_ARGUMENTS)}: hosts of other layouts read more of each array",
            stacklevel=4,
        )
        return theirs

    @functools.wraps(theirs)
    def choose(*args: Any, **options: Any) -> Shape:
        given = signature.bind(*args, **options).arguments
        shape, part, dtype, most = (given[name] for name in _ARGUMENTS)
        if isinstance(most, ChunkBytes):
            return chunk_shape(shape, part, dtype.itemsize)
        return theirs(*args, **options)

    return choose
