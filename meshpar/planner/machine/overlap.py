"""What compiled programs hide: a table of shares, read from the audit's findings.

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
    """How much of one kind of collective matmuls hide.

    Args:
        platform: `gpu` or `tpu`.
        mesh_axis: Whose devices take part.
        kind: Of the collective, as XLA calls it.
        share: Of the bytes sent, those with a matmul between start and done, 0 to 1.
        wire_bytes: What one device of the measured program sends so, in a step.
        target: The machine that it was compiled for.
        layout: How the model lay there.
        num_parts: Of the batch, in which its blocks took it (`hardware.batch_parts`).
        command: What measures it.
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
    """The table."""
    text = files("meshpar.planner").joinpath("overlap.json").read_text()
    return tuple(HiddenShare(**row) for row in json.loads(text)["rows"])


def hidden_share(
    platform: str,
    mesh_axes: Sequence[str],
    kind: str,
    at_work: Collection[str] = (),
    *,
    in_parts: bool = False,
) -> float:
    """The share of such collectives that compiled programs hide.

    Of the measured programs with the same of `tensor` and `stage` at work, whose
    collectives take turns with one another's, and blocks in parts of the batch or not;
    the least of any program where none has.
    By bytes of those together; the least of several mesh axes; 0 of what was not
    measured. Permutes over `tensor` are its gathers and scatters in chunks, so that
    they count as these, and these as all that go around the ring.

    Args:
        platform: `gpu` or `tpu`.
        mesh_axes: Over which the collective runs.
        kind: As XLA calls it.
        at_work: The layout's mesh axes of several devices.
        in_parts: Whether blocks take the batch in parts.

    Example:
        >>> hidden_share("gpu", ("data",), "all-reduce")
        0.0
    """
    beside = frozenset(at_work).intersection(_TAKE_TURNS), in_parts
    return min(_share(platform, axis, kind, beside) for axis in mesh_axes)


_Beside = tuple[frozenset[str], bool]
"""Mesh axes that a collective takes turns with, and whether blocks are in parts."""


@cache
def _share(platform: str, axis: str, kind: str, beside: _Beside) -> float:
    found = _shares().get((platform, axis, kind), {})
    return found.get(beside, min(found.values(), default=0.0))


@cache
def _shares() -> dict[tuple[str, str, str], dict[_Beside, float]]:
    """Platform, mesh axis and kind -> what took turns with it -> share."""
    sums: dict[tuple[str, str, str], dict[_Beside, list[float]]] = {}
    for row in hidden_shares():
        sizes = Layout.of(row.layout).mesh_shape
        turns = frozenset(axis for axis in _TAKE_TURNS if sizes[axis] > 1)
        beside = turns, row.num_parts > 1
        kinds: tuple[str, ...] = (row.kind,)
        if row.mesh_axis == "tensor" and row.kind in _AROUND_TENSOR:
            kinds = _AROUND_TENSOR
        for kind in kinds:
            of_kind = sums.setdefault((row.platform, row.mesh_axis, kind), {})
            found = of_kind.setdefault(beside, [0, 0])
            found[0] += row.share * row.wire_bytes
            found[1] += row.wire_bytes
    return {
        key: {beside: hidden / sent for beside, (hidden, sent) in of_kind.items()}
        for key, of_kind in sums.items()
    }


_TAKE_TURNS = ("stage", "tensor")
"""Mesh axes whose collectives stand in the way of others' between the same matmuls."""

_AROUND_TENSOR = ("all-gather", "reduce-scatter", "collective-permute")
