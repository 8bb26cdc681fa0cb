"""What the tests read from a compiled program: its collectives and where they stand."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Args:
        kind: Such as `all-reduce`.
        mesh_axes: The mesh axes whose devices take part together.
        sizes: Bytes of every array that it returns (operands too where they are given).
        place: `forward` or `backward` loop, or `outside` of them.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    sizes: tuple[int, ...]
    place: str

    @property
    def bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(self.sizes)


def collectives(text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Every collective of a compiled step with one forward and one backward loop."""
    places = _places(text)
    rows, computation = [], ""
    for line in text.splitlines():
        computation = _computation_name(line) or computation
        match = _COLLECTIVE.search(line)
        if match:
            sizes = tuple(
                _BYTES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)
                for dtype, dims in _SHAPE.findall(match[1])
            )
            axes = _mesh_axes(line, mesh_shape)
            place = places.get(computation, "outside")
            rows.append(Collective(match[2], axes, sizes, place))
    return rows


def counts(rows: list[Collective], place: str, mesh_axis: str, min_bytes: int) -> dict:
    """Kind -> number of collectives over one mesh axis, small ones left out."""
    return dict(
        Counter(
            row.kind
            for row in rows
            if row.place == place
            and row.mesh_axes == (mesh_axis,)
            and max(row.sizes) >= min_bytes
        )
    )


def _computation_name(line: str) -> str | None:
    match = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
    return match[1] if match else None


def _places(text: str) -> dict[str, str]:
    bodies = re.findall(r"while\(.*?body=%?([\w.\-]+)", text)
    places, computation = {}, ""
    for line in text.splitlines():
        computation = _computation_name(line) or computation
        if computation in bodies:
            backward = "transpose(jvp" in line
            if backward or computation not in places:
                places[computation] = "backward" if backward else "forward"
    return places


def _mesh_axes(line: str, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    groups = _groups(line)
    ids = np.arange(math.prod(mesh_shape.values())).reshape(*mesh_shape.values())
    large = [axis for axis, size in mesh_shape.items() if size > 1]
    for count in range(1, len(large) + 1):
        for axes in itertools.combinations(large, count):
            dims = [list(mesh_shape).index(axis) for axis in axes]
            moved = np.moveaxis(ids, dims, range(-count, 0))
            size = math.prod(mesh_shape[axis] for axis in axes)
            if {frozenset(group) for group in moved.reshape(-1, size)} == groups:
                return axes
    raise AssertionError(f"no mesh axes give the groups of: {line.strip()}")


def _groups(line: str) -> set[frozenset]:
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:
        return _named_groups(*named.groups())
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if listed:
        found = re.findall(r"\{([\d,]+)\}", listed[1])
        return {
            frozenset(int(number) for number in group.split(",")) for group in found
        }
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    )
    assert iota, f"no replica groups in: {line.strip()}"
    shape, source, order = (
        [int(number) for number in part.split(",")] if part else None
        for part in iota.groups()
    )
    ids = np.arange(math.prod(source)).reshape(source)
    ids = ids.transpose(order) if order else ids
    return {frozenset(group) for group in ids.reshape(shape)}


def _named_groups(mesh: str, axes: str) -> set[frozenset]:
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    dims = [list(sizes).index(name.strip("'")) for name in axes.split(",")]
    ids = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    moved = np.moveaxis(ids, dims, range(-len(dims), 0))
    group_size = math.prod(ids.shape[dim] for dim in dims)
    return {frozenset(group) for group in moved.reshape(-1, group_size)}
