"""Why each collective is in a program, and which of them nobody asked for.

A collective is asked for when the program writes it (`jax.lax.psum` and its like), when
it completes partial sums of a contraction or reduction over a split dim, when a
sharding constraint calls for another layout, or when the layout of a training step
does. What GSPMD inserts besides, such as a gather of a weight, is a surprise. A reason
follows from the operation that a collective names, and from how the trace splits its
operands (`evidence`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshpar.audit.collectives import Collective
from meshpar.audit.evidence import Evidence, is_asked_for
from meshpar.audit.flow import names_no_need
from meshpar.audit.needs import (
    MATMUL,
    gathers_for_table,
    gathers_tokens,
    halo_reason,
    sum_per_operand,
)
from meshpar.audit.subject import Subject
from meshpar.collective_kinds import KINDS, WRITTEN_AS
from meshpar.collectives import ASKED, ASKED_PREFIX
from meshpar.layout import TOKEN_AXES

_CONSTRAINTS = ("sharding_constraint", "device_put", "reshard", "shard_map")
_SUMS = ("all-reduce", "reduce-scatter")

# Operations whose result over a split dim is each device's part of a sum (or maximum).
_ADDS = re.compile(
    r"dot_general|conv|reduce_(?!window|precision)|arg(max|min)|scatter|add_any|select_and"
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
    evidence: Evidence,
    expected: Mapping[str, Mapping[str, str]] | None = None,
) -> Explained:
    """Explain one collective.

    Args:
        row: The collective.
        subject: What was audited.
        evidence: Its trace.
        expected: Mesh axis (several with `+` between) -> kind -> reason, of what the
            caller asks for besides.
    """
    parts = [row]
    if len(row.paths) > 1:  # Joined by XLA, from several lines.
        parts = [replace(row, op_path=path, source="") for path in row.paths]
    expected = expected or {}
    parts = [_named_by_need(part, subject, evidence, expected) for part in parts]
    reasons = [_reason(part, subject, evidence, expected) for part in parts]
    reasons = [found for found in reasons if not found[1]] or reasons
    words = " and ".join(dict.fromkeys(words for words, _ in reasons))
    row = parts[0] if len(parts) == 1 else row
    return Explained(collective=row, reason=words, surprise=not reasons[0][1])


Reason = tuple[str, bool]
"""Words, and whether it was asked for."""


def _reason(
    row: Collective,
    subject: Subject,
    evidence: Evidence,
    expected: Mapping[str, Mapping[str, str]],
) -> Reason:
    return _reason_by_maker(row, subject, expected) or _reason_by_name(
        row, subject, evidence
    )


def _named_by_need(
    row: Collective,
    subject: Subject,
    evidence: Evidence,
    expected: Mapping[str, Mapping[str, str]],
) -> Collective:
    """Rename a collective after a user of its result, if its own name needs nothing.

    Of several the first that has a reason: it would be there for that one alone.
    """
    if (
        row.kind in _SUMS
        or not names_no_need(row.operation)
        or _reason_by_maker(row, subject, expected)
        or is_asked_for(row, evidence.constrained)
    ):
        return row
    named = [
        replace(row, op_path=_as_entered(path, row.op_path), source=source)
        for path, source in row.uses
    ]
    asked = (use for use in named if _reason_by_name(use, subject, evidence)[1])
    return next(asked, next(iter(named), row))


def _as_entered(path: str, made: str) -> str:
    """Return a use's path, cut at a `shard_map` that the value enters."""
    depth = made.split("/").count("shard_map")
    parts = path.split("/")
    regions = [at for at, part in enumerate(parts) if part == "shard_map"]
    entered = made and len(regions) > depth
    return "/".join(parts[: regions[depth] + 1]) if entered else path


def _reason_by_maker(
    row: Collective, subject: Subject, expected: Mapping[str, Mapping[str, str]]
) -> Reason | None:
    kinds = expected.get("+".join(row.mesh_axes or ()), {})
    if row.kind in kinds:
        return kinds[row.kind], True
    return _asked_by_library(row) or _written(row) or _joined(row, subject)


def _reason_by_name(row: Collective, subject: Subject, evidence: Evidence) -> Reason:
    halo = halo_reason(row, evidence)
    return (
        _sequence_gathered(row, subject, evidence)
        or _partial_sums(row, subject, evidence)
        or ((halo, True) if halo else None)
        or _constrained(row, evidence)
        or _unasked(row, evidence)
    )


def _asked_by_library(row: Collective) -> Reason | None:
    names = re.findall(rf"(?<![\w-]){ASKED_PREFIX}(\w+)", row.op_path)
    if not names or names[-1] not in ASKED:
        return None
    kind, words = ASKED[names[-1]]
    if kind in (row.kind, KINDS[row.kind].takes_as):
        return words, True
    article = "an" if row.kind[0] in "aeiou" else "a"
    return (f"{words}, as {article} {row.kind}", True) if _replaces(row, kind) else None


def _replaces(row: Collective, kind: str) -> bool:
    """Return True if XLA may have put it in place of another collective.

    It makes all-reduces of small gathers and scatters, and a reduce-scatter of an
    all-reduce of whose result each device uses its own part.
    """
    return row.kind == "all-reduce" or (row.kind, kind) == (
        "reduce-scatter",
        "all-reduce",
    )


def _written(row: Collective) -> Reason | None:
    # GSPMD inserts no ragged ones, of which XLA:GPU drops the path.
    is_ragged = row.kind == "ragged-all-to-all"
    name = "ragged_all_to_all" if is_ragged else row.operation
    if name not in WRITTEN_AS:
        return None
    kind = WRITTEN_AS[name]
    if row.kind == kind or _replaces(row, kind):
        return f"written in the program as {name}", True
    return None


def _sequence_gathered(
    row: Collective, subject: Subject, evidence: Evidence
) -> Reason | None:
    if row.kind == "all-gather" and _is_over_sequence(row, subject):
        if gathers_tokens(row, evidence):
            return "sequence gathered before a column-parallel matmul", True
        if row.operation == "sharding_constraint":
            return "sequence gathered, asked for by a sharding constraint", True
        if row.operation == "scatter-add" and gathers_for_table(row, evidence):
            return "sequence gathered for the gradient of a table", True
    return None


def _is_over_sequence(row: Collective, subject: Subject) -> bool:
    axes = set(row.mesh_axes or ())
    return bool(axes) and axes <= set(subject.sequence_axes)


def _joined(row: Collective, subject: Subject) -> Reason | None:
    # XLA joins collectives of one kind, and writes a small scatter as an all-reduce;
    # such a one may have no path left. What only lays its operand out says nothing.
    is_nameless = not row.op_path or (row.borrows_path and names_no_need(row.operation))
    if subject.layout is None or not row.mesh_axes or not is_nameless:
        return None
    words = {
        "all-gather": ASKED["parameter_gather"][1],
        "reduce-scatter": ASKED["gradient_scatter"][1],
        "all-reduce": ASKED["gradient_reduction"][1],
    }
    if set(row.mesh_axes) <= set(TOKEN_AXES) and row.kind in words:
        how = "rewritten by XLA" if row.borrows_path else "joined"
        return f"{words[row.kind]}, {how}", True
    return None


def _partial_sums(
    row: Collective, subject: Subject, evidence: Evidence
) -> Reason | None:
    operation = row.operation
    if row.kind not in _SUMS:
        return None
    if operation == "while":  # XLA adds up over the iterations first.
        return "partial sums of a loop", True
    if operation and not _ADDS.match(operation):
        return None
    if operation == MATMUL:
        return _matmul_sum(row, subject, evidence)
    words = f"partial sums of {operation}" if operation else "partial sums"
    return words, True


def _matmul_sum(row: Collective, subject: Subject, evidence: Evidence) -> Reason | None:
    if row.mesh_axes is None:
        return None  # Rules split a dim over whole mesh axes: this was not asked for.
    knows_weights = bool(subject.weights)
    ratio = sum_per_operand(row, evidence, knows_weights=knows_weights)
    if ratio > 1:
        return (
            "nobody asked for this: partial sums of a matmul that contracts a split "
            f"dim of activations, {ratio:.1f} times the values that it multiplies",
            False,
        )
    words = "row-parallel output of a split matmul"
    if _BACKWARD in row.op_path:
        words = "input or weight gradient of a split matmul"
    elif knows_weights and ratio:
        words = "partial sums of a matmul of activations"
    if row.kind == "reduce-scatter" and _is_over_sequence(row, subject):
        words += ", scattered along the sequence"
    return words, True


def _constrained(row: Collective, evidence: Evidence) -> Reason | None:
    if row.operation in _CONSTRAINTS:
        words = "shard_map" if row.operation == "shard_map" else "sharding constraint"
        return f"another layout, asked for by a {words}", True
    if row.kind not in _SUMS and is_asked_for(row, evidence.constrained):
        return "another layout, asked for by a sharding constraint", True
    return None


def _unasked(row: Collective, evidence: Evidence) -> Reason:
    operation = row.operation or "an operation that the text does not name"
    weight = evidence.moved_weight(row)
    what = f"all of the weight {weight!r} moves" if weight else "inserted by GSPMD"
    if row.mesh_axes is None:
        what += ", between devices that form no product of mesh axes"
    return f"nobody asked for this: {what} for {operation}", False
