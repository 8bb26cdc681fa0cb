"""The space of a search: its constraints, mesh shapes, and ways to run each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from meshpar.errors import InputError, nearest, renamed
from meshpar.hardware.device import Device
from meshpar.layout import MESH_AXES, Layout
from meshpar.layout.layout import split_axes
from meshpar.schedules import SCHEDULES, plan_refusal


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Limits of a search.

    Args:
        kept: Key of a layout -> the value that it must have.
        forbidden: Mesh axes that must have size 1.
        max_memory_bytes: Memory of a device that plans may fill; None for all of it.

    Raises:
        InputError: A key or a value that no layout has, a schedule that no step runs,
            or an axis both kept and forbidden.

    Example:
        >>> Constraints.parse(keep=["tensor=8"], forbid=["stage"]).kept
        {'tensor': 8}
    """

    kept: Mapping[str, Any] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    max_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        refused = plan_refusal(Layout(**self.kept).schedule)
        if refused is not None:
            raise refused
        for axis in MESH_AXES:
            if self.kept.get(axis) == -1:
                raise InputError(
                    f"{axis}=-1 is kept, but a search gives every mesh axis a size; "
                    "leave it out, or keep a size",
                    key="plan.open_size_kept",
                )
        if self.kept.get("data_splits"):
            raise InputError(
                "data_splits is kept, but a search chooses it by the speed of the "
                "devices; keep 'data' and 'microbatches', or estimate that layout",
                key="plan.data_splits_kept",
            )
        for axis in self.forbidden:
            if axis not in MESH_AXES:
                raise InputError(
                    f"forbidden {axis!r} is no mesh axis; {nearest(axis, MESH_AXES)}",
                    key="mesh.unknown_axis",
                )
            if self.kept.get(axis, 1) != 1:
                raise InputError(
                    f"{axis}={self.kept[axis]} is kept and {axis!r} is forbidden; "
                    "leave one of them out",
                    key="plan.axis_kept_and_forbidden",
                )
        limit = self.max_memory_bytes
        if limit is not None and not limit > 0:
            raise InputError(
                f"maximum memory of {limit} bytes: must be above 0",
                key="value.not_positive",
            )

    @classmethod
    def parse(
        cls,
        *,
        keep: list[str] | tuple[str, ...] = (),
        forbid: list[str] | tuple[str, ...] = (),
        max_memory_bytes: float | None = None,
    ) -> Constraints:
        """Parse `keep`, lines of a layout, and `forbid`, names of mesh axes.

        Raises:
            InputError: As the constraints themselves; a key kept at two values.
        """
        kept: dict[str, Any] = {}
        for line in keep:
            layout = Layout.parse(line)
            for key in (part.partition("=")[0].strip() for part in line.split(",")):
                value = getattr(layout, key)
                if kept.setdefault(key, value) != value:
                    raise InputError(
                        f"{key} is kept at both {kept[key]} and {value}; keep it once",
                        key="plan.kept_twice",
                    )
        forbidden = frozenset(forbid)
        return cls(kept=kept, forbidden=forbidden, max_memory_bytes=max_memory_bytes)

    of = classmethod(renamed("Constraints.of", parse.__func__))  # type: ignore

    def capacity_bytes(self, device: Device) -> float:
        """Return the memory of a device that a plan may fill."""
        own = device.usable_bytes
        return min(own, self.max_memory_bytes or own)

    def choices(self, key: str, values: tuple) -> tuple:
        """Return the value that is kept for a key, or else all of these."""
        return (self.kept[key],) if key in self.kept else values


Splits = tuple[int, ...] | Literal["cost"]
"""`Layout.splits`: layers of every stage, or the rule that decides them."""


class Scheduled(NamedTuple):
    """A schedule, and how ranks run it: keys of a layout."""

    schedule: str
    chunks: int
    splits: Splits
    max_pending_w: int = 0
    execution: str = Layout().execution

    @property
    def splits_backward(self) -> bool:
        """True if the backwards are split."""
        return SCHEDULES[self.schedule].splits_backward


class State(NamedTuple):
    """How replicas keep parameters and optimizer state: keys of a layout."""

    data: int
    fsdp: int
    zero_axes: tuple[str, ...]
    zero: int
    fsdp_gather: str = Layout().fsdp_gather
    param_dtype: str = Layout().param_dtype
    optimizer_memory: str = Layout().optimizer_memory

    def num_parts(self, mesh: Layout) -> tuple[int, int]:
        """Return the parts that states of dense parameters and of experts are in.

        Those of one device of `expert`, which has its own experts.
        """
        sizes = {"data": self.data, "fsdp": self.fsdp, "context": mesh.context}
        axes = split_axes(self.zero, self.zero_axes, fsdp=self.fsdp, expert=mesh.expert)
        routed = math.prod(sizes.get(axis, 1) for axis in axes)
        return routed * (mesh.expert if "expert" in axes else 1), routed


class Variant(NamedTuple):
    """One way to run a mesh shape."""

    microbatches: int
    schedule: str
    chunks: int
    splits: Splits
    max_pending_w: int
    execution: str
    data: int
    fsdp: int
    zero_axes: tuple[str, ...]
    zero: int
    fsdp_gather: str
    param_dtype: str
    optimizer_memory: str
    sequence_parallel: bool
    remat: str

    @property
    def splits_backward(self) -> bool:
        """True if the backwards are split."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def scheduled(self) -> Scheduled:
        """The part of it that says how ranks run."""
        return Scheduled(*(getattr(self, key) for key in Scheduled._fields))

    @property
    def state(self) -> State:
        """The part of it that says how parameters and optimizer state are kept."""
        return State(*(getattr(self, key) for key in State._fields))

    def with_state(self, state: State) -> Variant:
        """Return the variant with one of `MeshChoices.states`."""
        return self._replace(**state._asdict())


def mesh_layouts(num_devices: int, constraints: Constraints) -> Iterator[Layout]:
    """Yield a layout for each way to factor the devices over the allowed mesh axes.

    Each has the kept values, and else defaults and `precision=bf16`.
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
    for size in (kept[axes[0]],) if axes[0] in kept else divisors(number):
        if number % size == 0:
            for rest in _factorizations(number // size, axes[1:], kept):
                yield (size, *rest)


@lru_cache(maxsize=1024)
def chunk_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Return the chunks of a rank that leave no more places empty than one does.

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
    """Return the layout of a mesh shape that is run so."""
    return replace(mesh, **variant._asdict())


def layout_variant(layout: Layout) -> Variant:
    """Return the way in which a layout runs its mesh shape."""
    return Variant(*(getattr(layout, key) for key in Variant._fields))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, smallest first.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return (*small, *large)
