"""Why each collective is in a program, and which of them nobody asked for.

A collective is asked for when the program writes it (`jax.lax.psum` and its like), when
it completes partial sums of a contraction or reduction over a split dim, when a
sharding constraint calls for another layout, or when the layout of a training step
does. What GSPMD inserts besides, such as a gather of a weight, is a surprise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshpar.audit.collectives import Collective
from meshpar.audit.constraints import sizes_of
from meshpar.audit.subject import Subject
from meshpar.collectives import ASKED, ASKED_PREFIX
from meshpar.layout import BATCH_AXES

_WRITTEN = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmean"), "all-reduce"),
    **dict.fromkeys(("pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), "reduce-scatter"),
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    **dict.fromkeys(("ppermute", "pshuffle"), "collective-permute"),
    "pbroadcast": "collective-broadcast",
}
_CONSTRAINTS = ("sharding_constraint", "device_put", "reshard")
_SUMS = ("all-reduce", "reduce-scatter")

# Operations whose result over a split dim is each device's part of a sum (or maximum).
_ADDS = re.compile(
    r"dot_general|conv|reduce|arg(max|min)|cum|scatter|add_any|select_and"
)
_BACKWARD = "transpose("


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A collective, its reason, and whether nobody asked for it."""

    collective: Collective
    reason: str
    surprise: bool


def explain(
    row: Collective,
    subject: Subject,
    expected: Mapping[str, Mapping[str, str]] | None = None,
) -> Explained:
    """The reason of one collective.

    Args:
        row: The collective.
        subject: What was audited.
        expected: Mesh axis (several with `+` between) -> kind -> reason, of what the
            caller asks for besides.
    """
    reason, asked = (
        _of_the_caller(row, expected or {})
        or _of_the_library(row)
        or _written(row)
        or _of_the_layout(row, subject)
        or _partial_sums(row)
        or _constrained(row, subject)
        or _unasked(row, subject)
    )
    return Explained(collective=row, reason=reason, surprise=not asked)


Reason = tuple[str, bool]
"""Words, and whether it was asked for."""


def _of_the_caller(
    row: Collective, expected: Mapping[str, Mapping[str, str]]
) -> Reason | None:
    kinds = expected.get("+".join(row.mesh_axes or ()), {})
    return (kinds[row.kind], True) if row.kind in kinds else None


def _of_the_library(row: Collective) -> Reason | None:
    name = re.search(rf"(?<![\w-]){ASKED_PREFIX}(\w+)", row.op_path)
    if not name or name[1] not in ASKED:
        return None
    kind, words = ASKED[name[1]]
    if kind == row.kind:
        return words, True
    # XLA replaces small gathers and scatters by all-reduces.
    return (f"{words}, as an all-reduce", True) if row.kind == "all-reduce" else None


def _written(row: Collective) -> Reason | None:
    # GSPMD inserts no ragged ones, of which XLA:GPU drops the path.
    is_ragged = row.kind == "ragged-all-to-all"
    name = "ragged_all_to_all" if is_ragged else _operation(row)
    if name not in _WRITTEN:
        return None
    kind = _WRITTEN[name]
    if row.kind not in (kind, "all-reduce"):
        return None
    return f"written in the program as {name}", True


def _of_the_layout(row: Collective, subject: Subject) -> Reason | None:
    if subject.layout is None or not row.mesh_axes:
        return None
    axes = set(row.mesh_axes)
    if axes <= set(subject.sequence_axes):
        if row.kind == "all-gather" and not weight_of(row, subject):
            return "sequence gathered before a column-parallel matmul", True
        if row.kind == "reduce-scatter":
            return "row-parallel output, scattered along the sequence", True
    if axes <= set(BATCH_AXES) and not row.op_path:
        # XLA joins collectives of one kind; what it joins has no path left.
        words = {
            "all-gather": ASKED["parameter_gather"][1],
            "reduce-scatter": ASKED["gradient_scatter"][1],
            "all-reduce": ASKED["gradient_reduction"][1],
        }
        if row.kind in words:
            return f"{words[row.kind]}, joined", True
    return None


def _partial_sums(row: Collective) -> Reason | None:
    operation = _operation(row)
    if row.kind not in _SUMS or (operation and not _ADDS.match(operation)):
        return None
    if operation == "dot_general":
        if _BACKWARD in row.op_path:
            return "input or weight gradient of a split matmul", True
        return "row-parallel output of a split matmul", True
    words = f"partial sums of {operation}" if operation else "partial sums"
    return words, True


def _constrained(row: Collective, subject: Subject) -> Reason | None:
    if _operation(row) in _CONSTRAINTS or _delivers_constrained(row, subject):
        return "another layout, asked for by a sharding constraint", True
    return None


def _delivers_constrained(row: Collective, subject: Subject) -> bool:
    if row.kind in _SUMS:
        return False
    if row.kind == "all-to-all" and len(row.dims) > 1:  # An array in as many pieces.
        size = sum(map(math.prod, row.dims))
        sizes = {
            math.prod(dims) for line, dims in subject.constrained if line == row.source
        }
        return size in sizes
    return {(row.source, sizes_of(dims)) for dims in row.dims} <= subject.constrained


def _unasked(row: Collective, subject: Subject) -> Reason:
    operation = _operation(row) or "an operation that the text does not name"
    weight = weight_of(row, subject)
    what = f"all of the weight {weight!r} moves" if weight else "inserted by GSPMD"
    if row.mesh_axes is None:
        what += ", between devices that form no product of mesh axes"
    return f"nobody asked for this: {what} for {operation}", False


def weight_of(row: Collective, subject: Subject) -> str:
    """Path of a weight that has the shape of what arrives, of which a part is split."""
    for dims in row.dims:
        sizes = sizes_of(dims)
        for path, weight in subject.weights.items():
            if len(sizes) > 1 and sizes == sizes_of(weight):
                return path
    return ""


def _operation(row: Collective) -> str:
    # XLA writes `(path:path)` for what it joins: the last one's bracket is not its own.
    last = row.op_path.split("/")[-1].split("[")[0]
    return last.removesuffix(")") if last.count(")") > last.count("(") else last
