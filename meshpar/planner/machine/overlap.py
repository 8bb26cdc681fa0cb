"""What compiled programs hide: a table of shares, read from the audit's findings.

`recipes.bench.overlap` compiles this library's steps for absent machines, reads from
the scheduled programs which collectives have a matmul between their start and their
done (`meshpar.audit.overlap`), and writes `overlap.json`: one row for each platform,
mesh axes and kind of collective, with the command that measured it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


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


@cache
def hidden_shares() -> tuple[HiddenShare, ...]:
    """The table."""
    text = files("meshpar.planner").joinpath("overlap.json").read_text()
    return tuple(HiddenShare(**row) for row in json.loads(text)["rows"])


def hidden_share(platform: str, mesh_axes: Sequence[str], kind: str) -> float:
    """The share of such collectives that compiled programs hide.

    Of all measured programs together, by bytes; the least of several mesh axes; 0 of
    what was not measured. Permutes over `tensor` are its gathers and scatters in
    chunks, so that they count as these, and these as all that go around the ring.

    Example:
        >>> hidden_share("gpu", ("data",), "all-reduce")
        0.0
    """
    return min(_shares().get((platform, axis, kind), 0.0) for axis in mesh_axes)


@cache
def _shares() -> dict[tuple[str, str, str], float]:
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in hidden_shares():
        kinds: tuple[str, ...] = (row.kind,)
        if row.mesh_axis == "tensor" and row.kind in _AROUND_TENSOR:
            kinds = _AROUND_TENSOR
        for kind in kinds:
            found = sums.setdefault((row.platform, row.mesh_axis, kind), [0, 0])
            found[0] += row.share * row.wire_bytes
            found[1] += row.wire_bytes
    return {key: hidden / sent for key, (hidden, sent) in sums.items()}


_AROUND_TENSOR = ("all-gather", "reduce-scatter", "collective-permute")
