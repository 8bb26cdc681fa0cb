"""Compute steps of a run twice, and act on a difference."""

from __future__ import annotations

import numpy as np

from meshpar import TrainState
from meshpar.recipes import report
from meshpar.recipes.run import Run
from meshpar.train.faults import BadStepError
from meshpar.train.same_step import replay


def check_replay(
    run: Run, state: TrainState, batch: dict[str, np.ndarray], number: int
) -> None:
    """Computes a step's gradients twice, where it is its turn.

    Raises:
        BadStepError: Other bits, and `on_bad_step` is not to go on.
    """
    every = run.config.replay_every
    if not every or not number or number % every:
        return
    found = run.processes.gather(replay(run.step, state, batch))
    told = next(filter(None, found), None)
    if told is None:
        return
    if run.config.on_bad_step != "skip":
        raise BadStepError(number, told, key="run.step_not_repeatable")
    report.log_replay(number, told)
