"""Pretrain a language model on a text, under any layout.

    meshpar train --layout data=2,stage=2,tensor=2,microbatches=4

or `python -m recipes.pretrain` from a checkout, or from Python:

    from meshpar.recipes.pretrain import RunConfig, pretrain
    pretrain(RunConfig(layout="data=8", text=(Path("mine.txt"),), steps=300))

The default is a 0.85M-parameter Llama on bytes of twelve of Shakespeare's plays, on
eight virtual CPU devices; two further plays are kept for validation. Figures of a
measured run stand in recipes/README.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console

from meshpar import TrainState
from meshpar.cli.lint import wide_console
from meshpar.cli.parsing import import_function
from meshpar.data.batches import device_batches
from meshpar.distributed import Processes
from meshpar.generation.sampling import sample_tokens
from meshpar.recipes import config_file, report
from meshpar.recipes.bubble import run_bubble
from meshpar.recipes.command import main
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus import load_corpus
from meshpar.recipes.elastic import fitted
from meshpar.recipes.fits import check_memory
from meshpar.recipes.goodput import Goodput
from meshpar.recipes.host_times import HostTimes
from meshpar.recipes.joined import after_step, agreed, agreed_stop, join, run_folder
from meshpar.recipes.metrics import (
    Callback,
    MetricsLog,
    NoLog,
    OnMetrics,
    Utilization,
    metrics_log,
)
from meshpar.recipes.optimizers import learning_rate_schedule
from meshpar.recipes.options import resuming_command
from meshpar.recipes.phases import Phases
from meshpar.recipes.profile import Profile
from meshpar.recipes.replayed import check_replay
from meshpar.recipes.replicas import mean_over_replicas, num_replicas, skipped_in
from meshpar.recipes.rollback import rolled_back
from meshpar.recipes.rows import check_files
from meshpar.recipes.run import PROGRAM, Run, RunResult
from meshpar.recipes.run_log import on_console
from meshpar.recipes.save import save, told_if_not_saved
from meshpar.recipes.started import started
from meshpar.recipes.step import audited, check_intervals, make_step, timed_step
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import ordered_batches, padded_batches
from meshpar.train.faults import BadStepError, StepWatch, StopRequest, Watchdog
from meshpar.train.heap import share_heaps
from meshpar.train.optimizer.average import averaged_state
from meshpar.train.same_step import check_same_step

__all__ = ["RunConfig", "RunResult", "audited", "main", "make_step", "pretrain"]

QUICK_BATCHES = 8  # of validation while training; all of them at the end


def pretrain(
    config: RunConfig,
    *,
    on_metrics: OnMetrics | None = None,
    callbacks: Sequence[Callback] = (),
    console: bool = True,
    program: Sequence[str] = PROGRAM,
    began: float | None = None,
) -> RunResult:
    """Trains, validates, samples and saves.

    Args:
        config: The run.
        on_metrics: Called with every row of metrics, a dict: of a step `step`, `loss`,
            `grad_norm`, `tokens_per_s`, `step_s`, `learning_rate`, `mfu`, `skipped` and
            bytes of memory, of a look at the validation text `validation_loss`. What
            cannot be known here is None.
        callbacks: Functions called with the step and a dict of the metrics of every
            row, after those that `config.callback` names.
        console: Print what the run logs. Its records are INFO and WARNING of the logger
            `meshpar.recipes.pretrain`, for a program that handles them itself.
        program: The words that resume it, but for its options; printed when it stops.
        began: When its time began, by `time.perf_counter`; now when absent.

    Raises:
        InputError: Something of the run cannot be.
    """
    began = time.perf_counter() if began is None else began
    share_heaps()
    with join(config) as processes:
        config = agreed(config, processes)
        report.LOGGER.disabled = not processes.is_first
        screen = wide_console() if console and processes.is_first else None
        with (
            nullcontext() if screen is None else on_console(screen),
            Watchdog(config.hang_timeout, processes) as watchdog,
        ):
            phases = Phases(watchdog, began)
            named = [import_function(one, "--callback") for one in config.callback]
            log = partial(
                metrics_log,
                processes,
                on_metrics=on_metrics,
                callbacks=(*named, *callbacks),
            )
            return joined_run(config, processes, phases, log, screen, program)


def joined_run(
    config: RunConfig,
    processes: Processes,
    phases: Phases,
    open_log: Callable[..., AbstractContextManager[MetricsLog | NoLog]],
    screen: Console | None,
    program: Sequence[str],
) -> RunResult:
    """The run of one process among all; the first prints and writes for them."""
    if processes.is_first:
        check_files(config)
    texts = load_corpus(
        config,
        processes,
        report.log_line,
        on_file=partial(phases.begin, "starting"),
    )
    line, told = fitted(config, jax.device_count(), processes.num_processes)
    step = make_step(replace(config, layout=line))
    check_intervals(config, step.layout)
    step.check_batch(config.global_batch)
    report.log_fitted(told)
    check_memory(config, step, processes)
    with (
        run_folder(config, processes) as folder,
        Checkpoints(
            config.folder / "checkpoints",
            keep=config.keep,
            keep_every=config.keep_every,
            layer_orders=step.layer_orders,
            processes=processes,
        ) as checkpoints,
    ):
        run = Run(
            config=config,
            step=step,
            texts=texts,
            checkpoints=checkpoints,
            console=screen or Console(quiet=True),
            program=program,
            processes=processes,
            phases=phases,
            goodput=Goodput(phases, config.folder if processes.is_first else None),
            watch=StepWatch(config.on_bad_step, spike=config.spike),
            folder=folder,
        )
        phases.begin("restoring")
        run, state = started(run)
        if processes.is_first:
            saved_as = config_file.save(config, config.folder)
            report.log_config(config, saved_as)
        report.log_layout(step, config)
        if processes.is_first:
            report.log_slow_links(step, config)
        report.log_bytes(step, state, texts)
        with open_log(config, done=run.position.step) as log:
            with StopRequest() as stop:
                run, state = trained(run, state, log, stop)
                phases.begin("saving")
                with told_if_not_saved(run):
                    checkpoints.finish()
                checkpoints.save(state, run.description(int(state.step)))
                if folder is not None:
                    folder.refuse_deleted()
            phases.begin("end")
            agreed_stop(processes, stop)  # A signal may have come to some since.
            return finish(run, state, log, stop)


def trained(
    run: Run, state: TrainState, log: MetricsLog | NoLog, stop: StopRequest
) -> tuple[Run, TrainState]:
    """The run and its state after all steps, those before a rollback forgotten.

    Raises:
        BadStepError: A step was bad, and there is nothing to go back to.
    """
    while True:
        try:
            return run, train(run, state, log, stop)
        except BadStepError as bad:
            run, state = rolled_back(run, bad)


def train(
    run: Run, state: TrainState, log: MetricsLog | NoLog, stop: StopRequest
) -> TrainState:
    """Steps until `--steps`, or until a stop is requested.

    Raises:
        BadStepError: One after which the run cannot simply go on.
    """
    config, phases, first = run.config, run.phases, run.position.step
    phases.begin("compiling")
    run.goodput.begin(first)
    rate_of = jax.jit(learning_rate_schedule(config))
    use = Utilization(run.step, global_batch=config.global_batch, seq=config.seq)
    skipped = skipped_in(run, state)
    last = min(config.steps, config.stop_after or config.steps)
    times = HostTimes(run)
    with (
        report.progress_bar(run.console) as progress,
        Profile(config, first=first) as profile,
        device_batches(
            make_batches(run), run.step.place, num_steps=max(last - first, 0)
        ) as batches,
    ):
        task = report.compiling(progress, config.steps, first)
        for number in range(first, last):
            learning_rate = float(rate_of(number - skipped / num_replicas(run)))
            asked = time.perf_counter()
            with phases.during("data"):
                batch = next(batches)
            data_s = time.perf_counter() - asked
            if number == first:
                check_same_step(run.processes, run.step, state, batch)
            check_replay(run, state, batch, number)
            with profile.step(number):
                state, row = timed_step(run.step, state, batch)
            row = mean_over_replicas(run, state, row)
            is_over, waited = after_step(run.processes, stop, data_s)
            told = {"learning_rate": learning_rate, **use.row(row["step_s"])}
            told["data_s"] = times.note(row["step_s"], waited)
            is_skipped = row["skipped"] > skipped
            if is_skipped or is_logged(config, number, first, last):
                log.write(step=number, **row, **told)
            if is_skipped:
                report.log_skipped(number, row)
            is_bad = is_skipped and row["weight_sum"] != 0
            run.watch.check(number, loss=row["loss"], skipped=is_bad)
            skipped = row["skipped"]
            told = {"loss": row["loss"], "rate": row["tokens_per_s"]}
            progress.update(task, advance=1, description="training", **told)
            done = number + 1
            if done % config.validate_every == 0 and done < config.steps:
                progress.update(task, description="validating")
                with phases.during("validating"):
                    loss = validate(run, state, QUICK_BATCHES)
                share = run.goodput.note(done)
                log.write(step=number, validation_loss=loss, goodput=share)
                report.log_look(done, row, loss)
                times.look(done)
                progress.update(task, description="training")
            if done % config.save_every == 0:
                save(run, state, done)
            phases.begin("step")
            if is_over:
                break
    return state


def is_logged(config: RunConfig, number: int, first: int, last: int) -> bool:
    """Return True if a step has a row of metrics: every Nth, a start's first and last.

    Args:
        config: Options of the run.
        number: The step, from 0.
        first: First step of this start.
        last: Step after its last.
    """
    return (number + 1) % config.log_every == 0 or number in (first, last - 1)


def make_batches(run: Run) -> Any:
    """The batch of each step after the run's first, by its number from there."""
    config = run.config
    return ordered_batches(
        run.texts.order(config.seed),
        global_batch=config.global_batch,
        skip=run.position.windows,
        rows=run.step.rows_here(config.global_batch),
    )


def validate(run: Run, state: TrainState, num_batches: int | None = None) -> float:
    """Return the mean loss per token over the validation text, or its first batches.

    More of them are read if no token of the first ones counts.
    """
    windows, state = run.texts.validation, evaluated(run, state)
    loss_sum = weight_sum = 0.0
    global_batch = run.config.global_batch
    rows = run.step.rows_here(global_batch)
    for index, batch in enumerate(padded_batches(windows, global_batch, rows)):
        if num_batches is not None and index >= num_batches and weight_sum:
            break
        found = run.step.evaluate(state, batch)
        loss_sum += float(found["loss_sum"])
        weight_sum += float(found["weight_sum"])
    return loss_sum / weight_sum


def evaluated(run: Run, state: TrainState) -> TrainState:
    """Return the state to validate: with averaged parameters if the run uses them."""
    return averaged_state(run.step, state) if run.config.validates_average else state


def finish(
    run: Run, state: TrainState, log: MetricsLog | NoLog, stop: StopRequest
) -> RunResult:
    """The results, or how to go on, and where everything is."""
    config, done, loss = run.config, int(state.step), None
    if stop.requested or done < config.steps:
        report.log_stopped(done, resuming_command(config, run.program))
    else:
        loss = validate(run, state)
        share = run.goodput.note(done)
        log.write(step=done - 1, validation_loss=loss, goodput=share)
        report.log_results(loss, run.texts)
        report.log_sample(run.texts, sample(run, state))
        if run.step.layout.stage > 1:
            report.log_bubble(
                run.step,
                *run_bubble(run, state, make_batches(run)(0)),
            )
    run.goodput.note(done)
    report.log_goodput(run.goodput.line())
    report.log_where(run.checkpoints.directory, config.metrics_path)
    return RunResult(
        steps_done=done,
        validation_loss=loss,
        signal=stop.signal,
        folder=config.folder,
    )


def sample(run: Run, state: TrainState) -> np.ndarray:
    """Tokens that follow the first of the validation text."""
    return sample_tokens(
        run.step,
        evaluated(run, state),
        run.texts.prompt,
        num_tokens=run.config.sample_tokens,
        seq=run.config.seq,
        vocab=run.texts.vocab,
        seed=run.config.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
