"""A row of the table of traffic: one collective, how often, and what may hide it."""

from __future__ import annotations

from typing import NamedTuple

HALVES = ("attention", "mlp")
"""Of a block: the backward of each has matmuls for its `inputs` and its `weights`."""

ATTENTION, ATTENTION_AGAIN, LAYER = "attention", "attention again", "layer"
BLOCKS, LAST_BACKWARD, NEXT_FORWARD = "blocks", "last backward", "next forward"
MATMULS = "matmuls"
"""Work that collectives run beside, where the execution overlaps them; and a half's
`attention outputs` (in the forward), `attention inputs`, `mlp weights`."""

SECONDS, BYTES = "seconds", "bytes"
"""The sum that alone counts a row."""


class Row(NamedTuple):
    """One collective.

    Args:
        mesh_axes: Whose devices take part together.
        kind: As XLA calls it.
        payload_bytes: Of the whole array: output of a gather, input of a scatter; of a
            permute, what is sent.
        reason: What it is for.
        passes: What runs it: a forward, a backward, a head, a hop up or down; once.
        times: How often each of those does.
        beside: The work that it can run beside; empty where there is none.
        share: Of its time, what can be hidden there at most.
        waits_on: The mesh axis that waiting for it counts for; its first when empty.
        members: Devices that take part, where not all of the mesh axes do.
        part: `inner` where devices next to each other take part alone, `outer` where
            one of each such group does; all of the mesh axes where empty.
        only: `SECONDS` or `BYTES`, where the other sum leaves it out.
    """

    mesh_axes: tuple[str, ...]
    kind: str
    payload_bytes: float
    reason: str
    passes: str
    times: int = 1
    beside: str = ""
    waits_on: str = ""
    members: int = 0
    part: str = ""
    only: str = ""
    share: float = 1.0


Rows = tuple[Row, ...]


def of_pass(rows: Rows, passes: str) -> Rows:
    """Those that such a pass runs."""
    return tuple(row for row in rows if row.passes == passes)
