"""From a case that fails to the smallest one that still does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from meshpar import MESH_AXES, Layout
from meshpar.testing.layout_cases import Case, Choices, refusal
from meshpar.testing.report import Result

MAX_TRIES = 40


def shrink(failed: Result, run: Callable[[Case], Result], choices: Choices) -> Result:
    """The failure reached by always taking the first simpler case that fails too.

    Deterministic; gives up after `MAX_TRIES` runs.

    Args:
        failed: Where to start.
        run: Runs a case.
        choices: What says whether a simpler case is valid, and what it may not change.
    """
    tried = {failed.case}
    smaller: Result | None = failed
    while smaller is not None:
        failed, smaller = smaller, None
        for case in simpler_cases(failed.case, choices):
            if case in tried or refusal(case, choices) is not None:
                continue
            if len(tried) > MAX_TRIES:
                return failed
            tried.add(case)
            result = run(case)
            if not result.ok:
                smaller = result
                break
    return failed


def simpler_cases(case: Case, choices: Choices) -> Iterator[Case]:
    """Cases one step simpler, the largest steps first; valid or not."""
    if case.resume_as is not None:
        yield replace(case, resume_as=None)
        for layout in _simpler_layouts(case.resume_as):
            yield replace(case, resume_as=layout)
    for layout in _simpler_layouts(case.layout):
        yield replace(case, layout=layout)
    if case.mask != "full":
        yield replace(case, mask="full")
    fewer_layers = re.sub(r"layers=\d+", "layers=1", case.model)
    if fewer_layers != case.model:
        yield replace(case, model=fewer_layers)
    shards = case.layout.batch_shards * case.layout.microbatches
    if choices.global_batch is None and case.global_batch > shards:
        yield replace(case, global_batch=shards)
    if choices.seq is None and case.seq > 2:
        yield replace(case, seq=max(2, case.seq // 2))
    if case.seed:
        yield replace(case, seed=0)


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    default = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if value == getattr(default, field.name):
            continue
        yield replace(layout, **{field.name: getattr(default, field.name)})
        if field.name in MESH_AXES and value > 2:
            sizes: list[Any] = [2, value // 2] if value > 5 and value % 2 == 0 else [2]
            for size in sizes:
                yield replace(layout, **{field.name: size})
