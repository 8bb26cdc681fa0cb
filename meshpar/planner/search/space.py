"""The layouts that a search considers: mesh shapes, and ways to run each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from meshpar.layout import MESH_AXES, Layout
from meshpar.planner.search.constraints import Constraints

Splits = tuple[int, ...] | Literal["cost"]
"""`Layout.splits`: layers of every stage, or what decides them."""

Scheduled = tuple[str, int, Splits]
"""A schedule, the chunks of a rank, and the splits of the stages."""

State = tuple[int, str, str, str]
"""`zero`, `fsdp_gather`, `param_dtype` and `optimizer_memory` of a variant."""


class Variant(NamedTuple):
    """One way to run a mesh shape."""

    microbatches: int
    schedule: str
    chunks: int
    splits: Splits
    zero: int
    fsdp_gather: str
    param_dtype: str
    optimizer_memory: str
    sequence_parallel: bool
    remat: str

    def with_state(self, state: State) -> Variant:
        """The same with one of `MeshChoices.states`."""
        zero, gather, dtype, memory = state
        return self._replace(
            zero=zero, fsdp_gather=gather, param_dtype=dtype, optimizer_memory=memory
        )


def mesh_layouts(num_devices: int, constraints: Constraints) -> Iterator[Layout]:
    """Every way to factor the devices over the mesh axes that may be used.

    Each is a layout with what is kept and all else at its default, or at what keeps
    the search to one choice (`precision=bf16`).
    """
    free = [axis for axis in MESH_AXES if axis not in constraints.forbidden]
    base = Layout(**{"precision": "bf16", **constraints.kept})
    for sizes in _factorizations(num_devices, free, constraints.kept):
        axes: dict[str, Any] = dict(zip(free, sizes, strict=True))
        yield replace(base, **axes)


def _factorizations(
    number: int, axes: list[str], kept: Mapping[str, Any]
) -> Iterator[tuple[int, ...]]:
    if not axes:
        if number == 1:
            yield ()
        return
    wanted = kept.get(axes[0], -1)
    sizes = divisors(number) if wanted == -1 else (wanted,)
    for size in sizes:
        if number % size == 0:
            for rest in _factorizations(number // size, axes[1:], kept):
                yield (size, *rest)


@lru_cache(maxsize=1024)
def chunk_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Chunks of a rank that leave no more places empty than one chunk does.

    Example:
        >>> chunk_counts(126, 16)
        (2, 4)
    """
    places = math.ceil(layers / stages)
    return tuple(
        chunks
        for chunks in range(2, layers // stages + 1)
        if chunks * math.ceil(layers / (stages * chunks)) <= places
    )


def with_variant(mesh: Layout, variant: Variant) -> Layout:
    """The whole layout: that mesh, run so."""
    return replace(mesh, **variant._asdict())


def variant_of(layout: Layout) -> Variant:
    """How a layout runs its mesh shape."""
    return Variant(*(getattr(layout, key) for key in Variant._fields))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, smallest first.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return (*small, *large)
