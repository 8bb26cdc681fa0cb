"""Published runs of Megatron-Core on H100s, whose table leaves choices open.

Microbatch size, chunks and recomputation are not printed. Each row is predicted with
those that the planner finds fastest among what fits: one rule for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.machine.execution import MEGATRON_CORE
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    interleaved,
    published,
    step_row,
)
from meshpar.planner.workload.hf_workload import GPT2
from meshpar.planner.workload.workload import Workload

CALIBRATES_HOST = "1.7B"
"""The row that fixes its `host_s`: a sixth of so short a step."""

_SEQ, _VOCAB = 4096, 131_072
_REMATS = ("none", "selective", "full")


def megatron_core() -> Iterator[Measured]:
    """Step times of Megatron-LM's table of weak scaling, from FLOP/s of the model."""
    for row in published()["megatron_core_h100"]["rows"]:
        found = _fastest(row)
        rate = row["gpus"] * row["tflops_gpu"] * 1e12
        yield step_row(
            "Megatron-LM README",
            f"{row['name']} {found.run.layout}",
            found.model_flops / rate,
            found,
            calibrates=row["name"] == CALIBRATES_HOST,
        )


def _fastest(row: dict[str, Any]) -> Estimate:
    found = [
        estimate_published(
            _workload(row), layout, row["gbs"], _SEQ, MEGATRON_CORE, "h100-80gb"
        )
        for layout in _layouts(row)
    ]
    fitting = [one for one in found if one.fits]
    return min(fitting, key=lambda one: one.step_s)


def _layouts(row: dict[str, Any]) -> Iterator[Layout]:
    """Every power of two as a microbatch's size, every number of whole chunks."""
    each, stages = row["gbs"] // row["d"], row["p"]
    blocks = row["layers"] // stages
    chunks = [n for n in range(1, blocks + 1) if blocks % n == 0 and stages > 1]
    for size in (1, 2, 4, 8):
        if each % size:
            continue
        for count in chunks or [1]:
            if count > 1 and each // size % stages:
                continue
            for remat in _REMATS:
                yield Layout(
                    fsdp=row["d"],
                    stage=stages,
                    tensor=row["t"],
                    microbatches=each // size,
                    zero=1,
                    sequence_parallel=row["t"] > 1,
                    remat=remat,
                    precision="bf16",
                    **interleaved(count),
                )


def _workload(row: dict[str, Any]) -> Workload:
    sizes = {key: row[key] for key in ("layers", "hidden", "heads")}
    untied = {**GPT2, "tied": False}
    return Workload(name=row["name"], vocab=_VOCAB, seq=_SEQ, **untied, **sizes)
