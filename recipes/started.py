"""Start a run at its first step, or at the newest good checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from meshpar import InputError, TrainState
from meshpar.models.convert.run_files import keep_files
from meshpar.models.convert.weights import read_weights
from meshpar.recipes import report
from meshpar.recipes.model import model_config
from meshpar.recipes.optimizer_options import FIRST_DEFAULT
from meshpar.recipes.replicas import num_replicas, skipped_in
from meshpar.recipes.resume import (
    changes,
    data_position,
    rate_change,
    read_description,
    refuse_other,
)
from meshpar.recipes.rows import begin_rows, cut_rows_after, refuse_another_run
from meshpar.recipes.run import Run
from meshpar.train.checkpoint import DamagedCheckpointWarning


def started(run: Run) -> tuple[Run, TrainState]:
    """The run where it goes on: the newest checkpoint's when resuming, else new.

    Raises:
        InputError: A fresh run where there is a checkpoint or a metrics file already,
            or a resumed one that changes what may not change.
    """
    config = run.config
    run.checkpoints.refuse_links()
    newest = newest_common_step(run)
    if newest is None and config.resume is not True:
        if run.processes.is_first:
            begin_rows(config)
        state = first_state(run)
        if run.processes.is_first:
            keep_files(
                config.folder,
                tokenizer=config.tokenizer,
                started_from=config.from_weights,
            )
        if config.on_bad_step == "rollback":  # The first step may be the bad one.
            run.checkpoints.save(state, run.description())
        return run, state
    if not config.resume:
        refuse_another_run(config, newest)
    before, state = restored(run)
    done, now = int(state.step), run.description()
    run = replace(run, position=data_position(before, now, done))
    skipped = skipped_in(run, state) / num_replicas(run)
    rates = rate_change(config, before, done, skipped=skipped)
    told = [*changes(before, now), *rates]
    if run.processes.is_first and now["tokenizer"] != before.get("tokenizer"):
        keep_files(config.folder, tokenizer=config.tokenizer)
    report.log_resumed(done, told, run.position)
    cut_rows_after(run, done)
    return run, state


def first_state(run: Run) -> TrainState:
    """Drawn from the seed, or of the weights that the run is to start from."""
    config, step = run.config, run.step
    if config.from_weights is None:
        return step.init(config.seed)
    weights = read_weights(config.from_weights, model_config(config))
    state = step.init(
        config.seed, params=weights.params, model_state=weights.model_state
    )
    read = f"{weights.source.bytes_read:,} bytes read by this process"
    report.log_line(f"weights from {weights.source.where}, {read}")
    return state


def restored(run: Run) -> tuple[dict[str, Any], TrainState]:
    """Return the run's description and the state of the newest good checkpoint.

    Raises:
        InputError: There is none, or what it is of may not change so.
    """
    checkpoints, step = run.checkpoints, run.step
    told: set[int] = set()
    if checkpoints.newest_good() is not None:
        told = tell_damaged(run, told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCheckpointWarning)  # It is printed.
        while True:
            before = {"optimizer": FIRST_DEFAULT, **read_description(checkpoints)}
            done = checkpoints.step_read or 0
            refuse_other(before, run.description(), done)
            state = checkpoints.restore(step.state_shapes, step.shardings)
            if checkpoints.step_read == done:  # Else what describes it is another.
                tell_damaged(run, told)  # Those that only reading has found.
                return before, state


def tell_damaged(run: Run, told: set[int]) -> set[int]:
    """Prints the checkpoints passed over that are not told yet; all that are then."""
    damaged = run.checkpoints.damaged
    for step in sorted(damaged.keys() - told, reverse=True):
        report.log_damaged(step, damaged[step])
    return told | damaged.keys()


def newest_common_step(run: Run) -> int | None:
    """The step of the newest checkpoint, which every process sees.

    Raises:
        InputError: Some see another, or none.
    """
    steps = run.processes.gather(run.checkpoints.latest_step)
    for process, step in enumerate(steps):
        if step != steps[0]:
            raise InputError(
                f"in {str(run.config.out)!r} process {process} finds a checkpoint of "
                f"step {step}, process 0 of step {steps[0]}; name a folder in --out "
                "that all hosts share",
                key="processes.different_checkpoints",
            )
    return steps[0]
