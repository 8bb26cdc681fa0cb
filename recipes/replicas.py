"""Metrics of the replicas of a run with local steps."""

from __future__ import annotations

from meshpar import TrainState
from meshpar.recipes.run import Run
from meshpar.train.metrics import (
    combined_metrics,
    local_replica_metrics,
    num_local_replicas,
)


def mean_over_replicas(
    run: Run, state: TrainState, row: dict[str, float]
) -> dict[str, float]:
    """A row of metrics, of the replicas of local steps that others hold too."""
    processes = run.processes
    if not run.step.is_local or processes.num_processes == 1:
        return row
    here = num_local_replicas(state.skipped)
    rows, numbers = zip(*processes.gather((row, here)), strict=True)
    return combined_metrics(rows, numbers, run.step.layout.data)


def num_replicas(run: Run) -> int:
    """Replicas that each have a number of skipped steps."""
    return run.step.layout.data if run.step.is_local else 1


def skipped_in(run: Run, state: TrainState) -> float:
    """Steps that changed nothing, of all replicas."""
    if not run.step.is_local:
        return float(state.skipped)
    here = local_replica_metrics({"skipped": state.skipped})
    row = {name: float(value) for name, value in here.items()}
    return mean_over_replicas(run, state, row)["skipped"]
