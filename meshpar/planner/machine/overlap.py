"""Share of each collective that compiled programs hide, a table from the audit.

`recipes.bench.overlap` compiles this library's steps for absent machines, reads from
the scheduled programs which collectives have a matmul between their start and their
done (`meshpar.audit.overlap`), and writes `overlap.json`: one row for each platform,
mesh axes and kind of collective, with the command that measured it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshpar.layout import Layout


@dataclass(frozen=True, kw_only=True)
class HiddenShare:
    """Share of one kind of collective that matmuls hide in one program.

    Args:
        platform: `gpu` or `tpu`.
        mesh_axis: Mesh axis of the devices that take part.
        kind: XLA's name of the collective.
        share: Share of the bytes sent with a matmul between start and done, 0 to 1.
        wire_bytes: Bytes that one device sends with it in a step.
        target: Machine that the program was compiled for.
        layout: Layout of the model.
        num_parts: Parts in which blocks took the batch (`Platform.num_batch_parts`).
        command: Command that measures the row.
    """

    platform: str
    mesh_axis: str
    kind: str
    share: float
    wire_bytes: int
    target: str
    layout: str
    command: str
    num_parts: int = 1


@cache
def hidden_shares() -> tuple[HiddenShare, ...]:
    """Return the rows of the table."""
    text = files("meshpar.planner").joinpath("overlap.json").read_text()
    return tuple(HiddenShare(**row) for row in json.loads(text)["rows"])


def hidden_share(
    platform: str,
    mesh_axes: Sequence[str],
    kind: str,
    active_axes: Collection[str] = (),
    *,
    in_parts: bool = False,
) -> float:
    """Return the share of a collective that compiled programs hide.

    The mean, by bytes, of the measured programs in which the same of `tensor` and
    `stage` had several devices, whose collectives take turns with one another, and
    whose blocks took the batch in parts or not alike; the least of any program if there
    is none. The least of several mesh axes; 0 of what was not measured. Permutes over
    `tensor` are its gathers and scatters in chunks, so the three count together.

    Args:
        platform: `gpu` or `tpu`.
        mesh_axes: Mesh axes of the collective.
        kind: XLA's name of the collective.
        active_axes: The layout's mesh axes of several devices.
        in_parts: True if blocks take the batch in parts.

    Example:
        >>> hidden_share("gpu", ("data",), "all-reduce")
        0.0
    """
    condition = frozenset(active_axes).intersection(_TAKE_TURNS), in_parts
    shares = [_shares().get((platform, axis, kind), {}) for axis in mesh_axes]
    return min(each.get(condition, min(each.values(), default=0.0)) for each in shares)


_Condition = tuple[frozenset[str], bool]
"""Mesh axes that a collective takes turns with, and whether blocks are in parts."""


@cache
def _shares() -> dict[tuple[str, str, str], dict[_Condition, float]]:
    """Return platform, mesh axis and kind -> condition -> share."""
    sums: dict[tuple[str, str, str], dict[_Condition, list[float]]] = {}
    for row in hidden_shares():
        sizes = Layout.of(row.layout).mesh_shape
        turns = frozenset(axis for axis in _TAKE_TURNS if sizes[axis] > 1)
        condition = turns, row.num_parts > 1
        kinds: tuple[str, ...] = (row.kind,)
        if row.mesh_axis == "tensor" and row.kind in _AROUND_TENSOR:
            kinds = _AROUND_TENSOR
        for kind in kinds:
            by_condition = sums.setdefault((row.platform, row.mesh_axis, kind), {})
            total = by_condition.setdefault(condition, [0, 0])
            total[0] += row.share * row.wire_bytes
            total[1] += row.wire_bytes
    return {
        key: {
            condition: hidden / sent
            for condition, (hidden, sent) in by_condition.items()
        }
        for key, by_condition in sums.items()
    }


_TAKE_TURNS = ("stage", "tensor")
"""Mesh axes whose collectives stand in the way of others' between the same matmuls."""

_AROUND_TENSOR = ("all-gather", "reduce-scatter", "collective-permute")
