"""Constraints: what of a layout a search may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshpar.errors import InputError, nearest
from meshpar.hardware.device import Device
from meshpar.layout import MESH_AXES, Layout
from meshpar.schedules import step_refusal


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a search may choose.

    Args:
        kept: Key of a layout -> the value that it must have.
        forbidden: Mesh axes that must have size 1.
        max_memory_bytes: Of a device; all that it has when None.

    Raises:
        InputError: A key or a value that no layout has, a schedule that no step runs,
            or an axis both kept and forbidden.

    Example:
        >>> Constraints.of(keep=["tensor=8"], forbid=["stage"]).kept
        {'tensor': 8}
    """

    kept: Mapping[str, Any] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    max_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        refused = step_refusal(Layout(**self.kept).schedule)
        if refused is not None:
            raise refused
        for axis in MESH_AXES:
            if self.kept.get(axis) == -1:
                raise InputError(
                    f"{axis}=-1 is kept, but a search gives every mesh axis a size; "
                    "leave it out, or keep a size",
                    key="plan.open_size_kept",
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
    def of(
        cls,
        *,
        keep: list[str] | tuple[str, ...] = (),
        forbid: list[str] | tuple[str, ...] = (),
        max_memory_bytes: float | None = None,
    ) -> Constraints:
        """Constraints in words: `keep` as lines of a layout, `forbid` as mesh axes.

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
        return cls(
            kept=kept,
            forbidden=frozenset(forbid),
            max_memory_bytes=max_memory_bytes,
        )

    def capacity_bytes(self, device: Device) -> float:
        """Memory of a device that a plan may fill."""
        own = device.usable_bytes
        return min(own, self.max_memory_bytes or own)

    def choices(self, key: str, values: tuple) -> tuple:
        """The values of a key that are left of these."""
        return (self.kept[key],) if key in self.kept else values
