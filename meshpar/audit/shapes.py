"""Shapes as XLA writes them: `bf16[8,128]{1,0:T(8,128)S(1)}`, and tuples of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"(\w+)\[((?:<=)?\d+(?:,(?:<=)?\d+)*|)](\{[^{}]*\})?")
_BETWEEN = re.compile(r"(?:\s|/\*.*?\*/)*")


@dataclass(frozen=True)
class ArrayShape:
    """One array: `dtype` as XLA writes it, sizes of its dims, its memory space.

    Memory space 0 is the device's memory; 5 is the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its values; small types are counted packed, and rounded up."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)


Shape = ArrayShape | tuple["Shape", ...]


def arrays_of(shape: Shape) -> Iterator[ArrayShape]:
    """Every array of a shape, in order."""
    if isinstance(shape, ArrayShape):
        yield shape
        return
    for part in shape:
        yield from arrays_of(part)


def parse_shape(text: str, start: int = 0) -> tuple[Shape, int]:
    """The shape at `start`, and where it ends.

    Raises:
        ValueError: There is none, or its dtype is unknown.

    Example:
        >>> parse_shape("(f32[8,4]{1,0}, s32[])")[0]
        (ArrayShape(dtype='f32', dims=(8, 4), memory_space=0), \
ArrayShape(dtype='s32', dims=(), memory_space=0))
    """
    start = _past_between(text, start)
    if not text.startswith("(", start):
        return _parse_array(text, start)
    parts, position = [], _past_between(text, start + 1)
    while not text.startswith(")", position):
        part, position = parse_shape(text, position)
        parts.append(part)
        position = _past_between(text, position)
        if text.startswith(",", position):
            position = _past_between(text, position + 1)
        elif not text.startswith(")", position):
            raise ValueError("a tuple shape that does not end")
    return tuple(parts), position + 1


def _past_between(text: str, start: int) -> int:
    between = _BETWEEN.match(text, start)
    return between.end() if between else start


def _parse_array(text: str, start: int) -> tuple[ArrayShape, int]:
    match = _ARRAY.match(text, start)
    if not match:
        raise ValueError(f"no shape at column {start + 1}")
    _bits(match[1])
    dims = tuple(int(dim.removeprefix("<=")) for dim in match[2].split(",") if dim)
    space = re.search(r"S\((\d+)\)", match[3] or "")
    return ArrayShape(match[1], dims, int(space[1]) if space else 0), match.end()


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if re.fullmatch(r"f8e\w+", dtype):
        return 8
    raise ValueError(f"unknown dtype {dtype!r}")
