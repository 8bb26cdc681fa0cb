"""The layouts that a search considers: mesh shapes, and ways to run each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from meshpar.layout import MESH_AXES, STAGE_REMATS, Layout
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.workload.workload import Workload
from meshpar.schedules import SCHEDULES, step_refusal

BUILT_AXES = ("data", "fsdp", "stage", "tensor")
"""The mesh axes that `make_train_step` lays out; the others are planned."""

_PLAIN = Layout()
# What computes again least, and keeps most, comes first.
_REMATS = ("none", "selective", "dots", "full")


class Variant(NamedTuple):
    """One way to run a mesh shape."""

    microbatches: int
    schedule: str
    chunks: int
    zero: int
    fsdp_gather: str
    sequence_parallel: bool
    remat: str


def mesh_layouts(num_devices: int, constraints: Constraints) -> Iterator[Layout]:
    """Every way to factor the devices over the mesh axes that may be used.

    Each is a layout with what is kept and all else at its default, or at what keeps
    the search to one choice (`precision=bf16`).
    """
    free = [
        axis
        for axis in MESH_AXES
        if (constraints.planned or axis in BUILT_AXES or axis in constraints.kept)
        and axis not in constraints.forbidden
    ]
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


class MeshChoices(NamedTuple):
    """What a mesh shape leaves to choose.

    Args:
        ranks: Its pipeline's.
        microbatches: Their numbers.
        schedules: Schedules, each with chunks; not all exist for all microbatches.
        states: What ZeRO splits, and when it gathers.
        sequence_parallel: Whether the residual stream is split.
        remats: What is computed again, least of it first.
    """

    ranks: int
    microbatches: tuple[int, ...]
    schedules: tuple[tuple[str, int], ...]
    states: tuple[tuple[int, str], ...]
    sequence_parallel: tuple[bool, ...]
    remats: tuple[str, ...]

    @property
    def num_variants(self) -> int:
        """Ways to run the mesh shape."""
        gathers = sum(gather != _PLAIN.fsdp_gather for _, gather in self.states)
        counts = [count for count, _ in self._scheduled()]
        states = len(self.states) * len(counts)
        if self.ranks == 1:
            states -= gathers * counts.count(1)
        return states * len(self.sequence_parallel) * len(self.remats)

    def variants(self) -> Iterator[Variant]:
        """Every way to run the mesh shape."""
        for (count, (schedule, chunks)), (zero, gather), sequence, remat in product(
            self._scheduled(), self.states, self.sequence_parallel, self.remats
        ):
            # Without microbatches, a microbatch's gather is the step's.
            if self.ranks > 1 or count > 1 or gather == _PLAIN.fsdp_gather:
                yield Variant(count, schedule, chunks, zero, gather, sequence, remat)

    def _scheduled(self) -> list[tuple[int, tuple[str, int]]]:
        """Microbatches with each of the schedules that exist for so many."""
        return [
            (count, (name, chunks))
            for count, (name, chunks) in product(self.microbatches, self.schedules)
            if self.ranks == 1 or SCHEDULES[name].exists(self.ranks, count, chunks)
        ]

    def parts(self) -> Iterator[MeshChoices]:
        """The same choices apart, by the first of them that is open."""
        key = next(key for key in _OPENED if len(getattr(self, key)) > 1)
        for value in getattr(self, key):
            opened: dict[str, Any] = {key: (value,)}
            part = self._replace(**opened)
            if part.num_variants:
                yield part


# Those that bounds tell most of come first.
_OPENED = ("microbatches", "states", "remats", "sequence_parallel", "schedules")


def choices_of(
    workload: Workload,
    mesh: Layout,
    constraints: Constraints,
    *,
    global_batch: int,
    seq: int,
) -> MeshChoices:
    """The choices of a mesh shape whose axes suit the workload; maybe none."""
    each = global_batch // (mesh.data * mesh.fsdp * mesh.expert)
    counts = constraints.choices("microbatches", divisors(each))
    splits = mesh.tensor > 1 and seq % (mesh.tensor * mesh.context) == 0
    remats = (*_REMATS, *STAGE_REMATS) if mesh.stage > 1 else _REMATS
    return MeshChoices(
        mesh.stage,
        tuple(count for count in counts if each % count == 0),
        tuple(_schedules(workload, mesh, constraints)),
        tuple(_states(workload, mesh, constraints)),
        constraints.choices("sequence_parallel", (False, True) if splits else (False,)),
        constraints.choices("remat", remats),
    )


def _states(
    workload: Workload, mesh: Layout, constraints: Constraints
) -> Iterator[tuple[int, str]]:
    """What ZeRO splits, and when it gathers.

    Of two that are the same (ZeRO-1 over `data` or over `fsdp` alone) one is left out.
    """
    if mesh.zero_axes or "zero" in constraints.kept:
        levels: tuple[int, ...] = (mesh.zero,)
    elif mesh.fsdp > 1:
        levels = (3, 2, 1) if mesh.data > 1 else (3,)
    else:
        levels = (3, 2, 1) if mesh.data > 1 else (_PLAIN.zero,)
    for zero in levels:
        splits = math.prod(
            mesh.mesh_shape[axis] for axis in replace(mesh, zero=zero).split_axes
        )
        if workload.hidden % splits:
            continue  # our parameters are split along it, evenly
        gathers = ("step", "microbatch") if zero == 3 and splits > 1 else ("step",)
        for gather in constraints.choices("fsdp_gather", gathers):
            yield zero, gather


def _schedules(
    workload: Workload, mesh: Layout, constraints: Constraints
) -> Iterator[tuple[str, int]]:
    if mesh.stage == 1:
        yield mesh.schedule, mesh.chunks
        return
    # One that another schedule beats is considered only if it is kept.
    searched = tuple(
        name
        for name, method in SCHEDULES.items()
        if method.no_better_than is None and step_refusal(name) is None
    )
    several = chunk_counts(workload.layers, mesh.stage)
    for name in constraints.choices("schedule", searched):
        method = SCHEDULES[name]
        has_one = method.num_chunks == 1
        for chunks in constraints.choices("chunks", (1,) if has_one else several):
            # One that may have any number is another schedule when it has one.
            if (chunks == 1) == has_one and method.has_chunks(chunks):
                yield name, chunks


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
