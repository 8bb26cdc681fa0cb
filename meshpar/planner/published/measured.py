"""Rows that compare a published number with the planner's, and helpers to make them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import Execution
from meshpar.planner.workload.workload import Workload

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published number and the planner's estimate of it.

    Args:
        source: Publication.
        name: Run.
        quantity: `step`, `memory`, or `layer` (one block's forward or backward).
        unit: `s`, `ms` or `GB`.
        measured: As published, or what follows from the published rate.
        predicted: Estimate of the planner.
        calibrates: True if an efficiency constant was fitted to it.
        apart: Reason why it is shown but not counted; empty if it is counted.
    """

    source: str
    name: str
    quantity: str
    unit: str
    measured: float
    predicted: float
    calibrates: bool = False
    apart: str = ""

    @property
    def error(self) -> float:
        """Relative error, above 0 if the planner predicts more."""
        return self.predicted / self.measured - 1


def step_row(
    source: str,
    name: str,
    measured_s: float,
    planned: Estimate,
    *,
    calibrates: bool = False,
) -> Measured:
    """Return a row for the step time of a run."""
    return Measured(
        source=source,
        name=name,
        quantity="step",
        unit="s",
        measured=measured_s,
        predicted=planned.step_s,
        calibrates=calibrates,
    )


def memory_row(
    source: str,
    name: str,
    measured_gib: float,
    predicted_bytes: float,
    *,
    calibrates: bool = False,
    apart: str = "",
) -> Measured:
    """Return a row for memory of a device, published in units of 2^30 bytes."""
    return Measured(
        source=source,
        name=name,
        quantity="memory",
        unit="GB",
        measured=measured_gib * _GIB / 1e9,
        predicted=predicted_bytes / 1e9,
        calibrates=calibrates,
        apart=apart,
    )


def interleaved(chunks: int) -> dict[str, Any]:
    """Layout options of a pipeline with this many chunks on a rank."""
    return {"schedule": "interleaved_1f1b", "chunks": chunks} if chunks > 1 else {}


@cache
def published() -> dict[str, Any]:
    """Published numbers, from `published.json`."""
    return json.loads(files("meshpar.planner").joinpath("published.json").read_text())


def estimate_published(
    workload: Workload,
    layout: Layout,
    global_batch: int,
    seq: int,
    execution: Execution,
    hardware: str = "a100-80gb",
    stage_blocks: tuple[int, ...] | None = None,
) -> Estimate:
    """Estimate a published run, on as many devices as its layout needs."""
    return estimate(
        workload,
        cluster_of(hardware, devices=layout.num_devices),
        layout,
        global_batch=global_batch,
        seq=seq,
        execution=execution,
        stage_blocks=stage_blocks,
    )
