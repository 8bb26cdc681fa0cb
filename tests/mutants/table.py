"""The table of all mutants in CONTRIBUTING.md."""

from __future__ import annotations

from tests.mutants.faults import MUTANTS
from tests.mutants.mutant import Mutant


def table() -> str:
    """Return a Markdown table with a row for each mutant, in order of the rooms."""
    rows = [_row(mutant) for mutant in sorted(MUTANTS, key=lambda one: one.room)]
    return "\n".join(["| room | fault | what goes wrong |", "|---|---|---|", *rows])


def _row(mutant: Mutant) -> str:
    mark = " *" if mutant.missed_at_first else ""
    return f"| `{mutant.room}` | {mutant.name}{mark} | {mutant.effect} |"
