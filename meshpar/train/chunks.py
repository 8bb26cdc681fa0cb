"""The shape of a stored array's chunks: cut along every dim that a layout may split.

Who needs a part of a chunk reads all of it. Orbax cuts the dims that the saving layout
splits, so that of a layout that splits another one every host reads every chunk. Here
each dim is cut in about as many parts as the others.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]

_CUTS = 8
"""Of a dim: over so many hosts it may be split with nothing read twice."""

_CHUNK_BYTES = (1 << 16, 1 << 20)
"""At least, however few the cuts are, and about at most, where sizes have factors."""

_ARGUMENTS = ("global_shape", "write_shape", "dtype", "target_byte_size")
"""Of Orbax's function, the first ones."""

_RUN = 64
"""Values of the last dim that stay together: shorter runs cost time to copy."""


class ChunkBytes(int):
    """A `chunk_byte_size` of `orbax.checkpoint.SaveArgs` that asks for our shape.

    As a number it is about the most bytes of a chunk.
    """


def chunk_bytes() -> ChunkBytes:
    """What `orbax.checkpoint.SaveArgs` is to be given.

    Orbax has an option for the bytes of chunks and none for their shape, so that its
    function that chooses it is replaced, for arrays that are saved with this number. An
    Orbax that keeps it elsewhere goes by the number alone: what it writes is as good,
    but hosts of other layouts read more of it.
    """
    _let_orbax_ask()
    return ChunkBytes(_CHUNK_BYTES[1])


def chunk_shape(shape: Sequence[int], part: Sequence[int], itemsize: int) -> Shape:
    """Shape of an array's chunks, which divides what a device writes of it.

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
    """The smallest prime factor of a size; 1 of 1."""
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
    """Orbax's function with our shape where `ChunkBytes` ask for it.

    As it is, with a warning, where its arguments are none that are known.
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
