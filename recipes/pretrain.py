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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from rich.console import Console

from meshpar import TrainState, TrainStep, lint
from meshpar.cli.lint import wide_console
from meshpar.data.device_batches import device_batches
from meshpar.distributed import Processes
from meshpar.recipes import config_file, report
from meshpar.recipes.bubble import measured_bubble, predicted_bubble
from meshpar.recipes.command import main
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus import corpus_of
from meshpar.recipes.data_waits import DataWaits
from meshpar.recipes.joined import after_step, agreed, agreed_stop, join
from meshpar.recipes.metrics import (
    MetricsLog,
    NoLog,
    OnMetrics,
    Utilization,
    metrics_log,
)
from meshpar.recipes.model import learning_rate_of
from meshpar.recipes.options import resuming_command
from meshpar.recipes.rollback import rolled_back
from meshpar.recipes.run import PROGRAM, Run, RunResult
from meshpar.recipes.save import told_if_not_saved
from meshpar.recipes.started import started
from meshpar.recipes.step import audited, make_step
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import ordered_batches, padded_batches
from meshpar.train.faults import BadStepError, StepWatch
from meshpar.train.interrupt import StopRequest
from meshpar.train.replay import replay
from meshpar.train.sample import sample_tokens
from meshpar.train.watchdog import Watchdog

__all__ = ["RunConfig", "RunResult", "audited", "main", "make_step", "pretrain"]

QUICK_BATCHES = 8  # of validation while training; all of them at the end


def pretrain(
    config: RunConfig,
    *,
    on_metrics: OnMetrics | None = None,
    program: Sequence[str] = PROGRAM,
) -> RunResult:
    """Trains, validates, samples and saves.

    Args:
        config: The run.
        on_metrics: Called with every row of metrics, a dict: of a step `step`, `loss`,
            `grad_norm`, `tokens_per_s`, `step_s`, `learning_rate`, `mfu`, `skipped` and
            bytes of memory, of a look at the validation text `validation_loss`. What
            cannot be known here is None. For Weights & Biases:

                import wandb
                wandb.init(project="mine", config=config.values())
                pretrain(config, on_metrics=wandb.log)

        program: The words that resume it, but for its options; printed when it stops.

    Raises:
        InputError: Something of the run cannot be.
    """
    with join(config) as processes:
        config = agreed(config, processes)
        return joined_run(config, processes, on_metrics, program)


def joined_run(
    config: RunConfig,
    processes: Processes,
    on_metrics: OnMetrics | None,
    program: Sequence[str],
) -> RunResult:
    """The run of one process among all; the first prints and writes for them."""
    console = wide_console() if processes.is_first else Console(quiet=True)
    texts = corpus_of(config, processes, console.print)
    step = make_step(config)
    step.check_batch(config.global_batch)
    folder = config.folder / "checkpoints"
    with Checkpoints(
        folder,
        keep=config.keep,
        keep_every=config.keep_every,
        layer_orders=step.layer_orders,
        processes=processes,
    ) as checkpoints:
        run = Run(
            config=config,
            step=step,
            texts=texts,
            checkpoints=checkpoints,
            console=console,
            program=program,
            processes=processes,
        )
        run, state = started(run)
        if processes.is_first:
            saved_as = config_file.save(config, config.folder)
            report.print_config(console, config, saved_as)
        found = lint(
            step.model, step.layout, global_batch=config.global_batch, seq=config.seq
        )
        report.print_layout(console, step, found)
        report.print_bytes(console, step, state, texts)
        done = run.position.step
        with metrics_log(processes, config, on_metrics, done) as log:
            with StopRequest() as stop:
                run, state = trained(run, state, log, stop)
                with told_if_not_saved(run):
                    checkpoints.finish()
                checkpoints.save(state, run.description(int(state.step)))
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
    config, first = run.config, run.position.step
    rate_of = jax.jit(learning_rate_of(config))
    use = Utilization(run.step, global_batch=config.global_batch, seq=config.seq)
    skipped = float(state.skipped)
    last = min(config.steps, config.stop_after or config.steps)
    waits = DataWaits(hosts=run.processes.hosts)
    watch = StepWatch(config.on_bad_step, spike=config.spike)
    with (
        report.progress_bar(run.console) as progress,
        Watchdog(config.hang_timeout, run.processes) as watchdog,
        device_batches(
            batches_of(run), run.step.place, num_steps=max(last - first, 0)
        ) as batches,
    ):
        task = progress.add_task(
            "compiling", total=config.steps, completed=first, loss=0.0, rate=0.0
        )
        for number in range(first, last):
            learning_rate = float(rate_of(number - skipped))
            asked = time.perf_counter()
            batch = next(batches)
            data_s = time.perf_counter() - asked
            if config.replay_every and number and number % config.replay_every == 0:
                check_replay(run, state, batch, number)
            state, row = timed_step(run.step, state, batch)
            is_over, waited = after_step(run.processes, stop, data_s)
            told = {"learning_rate": learning_rate, **use.row(row["step_s"])}
            told["data_s"] = waits.note(row["step_s"], waited)
            log.write(step=number, **row, **told)
            if row["skipped"] > skipped:
                report.print_skipped(progress.console, number, row)
            watch.check(number, loss=row["loss"], skipped=row["skipped"] > skipped)
            skipped = row["skipped"]
            progress.update(
                task,
                advance=1,
                description="training",
                loss=row["loss"],
                rate=row["tokens_per_s"],
            )
            done = number + 1
            if done % config.validate_every == 0 and done < config.steps:
                progress.update(task, description="validating")
                loss = validate(run, state, QUICK_BATCHES)
                log.write(step=number, validation_loss=loss)
                report.print_look(progress.console, done, row, loss)
                report.print_waits(progress.console, done, waits.line())
                progress.update(task, description="training")
            if done % config.save_every == 0:
                save(run, state, done)
            watchdog.step_done()
            if is_over:
                break
    return state


def check_replay(
    run: Run, state: TrainState, batch: dict[str, np.ndarray], number: int
) -> None:
    """Computes a step's gradients twice; other bits are a bad step.

    Raises:
        BadStepError: They differ, and `on_bad_step` is not to go on.
    """
    found = run.processes.gather(replay(run.step, state, batch))
    told = next(filter(None, found), None)
    if told is None:
        return
    if run.config.on_bad_step != "skip":
        raise BadStepError(number, told)
    report.print_replay(run.console, number, told)


def save(run: Run, state: TrainState, done: int) -> None:
    """Saves while the run goes on, which it does if that fails: it may not next time.

    The one before stays until another is whole.
    """
    with told_if_not_saved(run):
        run.checkpoints.save(state, run.description(done), wait=False)


def batches_of(run: Run) -> Any:
    """The batch of each step after the run's first, by its number from there."""
    config = run.config
    return ordered_batches(
        run.texts.order(config.seed),
        global_batch=config.global_batch,
        skip=run.position.windows,
        rows=run.step.rows_here(config.global_batch),
    )


def timed_step(
    step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[TrainState, dict[str, float]]:
    """One step, and its row of metrics."""
    start = time.perf_counter()
    placed = step.place(batch)
    state, metrics = step(state, placed)
    row = {name: float(value) for name, value in metrics.items()}
    step_s = time.perf_counter() - start
    tokens_per_s = placed["tokens"].size / step_s
    return state, {**row, "tokens_per_s": tokens_per_s, "step_s": step_s}


def validate(run: Run, state: TrainState, num_batches: int | None = None) -> float:
    """Mean loss per token over the validation text, or over its first batches."""
    windows = run.texts.validation
    loss_sum = weight_sum = 0.0
    global_batch = run.config.global_batch
    rows = run.step.rows_here(global_batch)
    for index, batch in enumerate(padded_batches(windows, global_batch, rows)):
        if index == num_batches:
            break
        sums = run.step.evaluate(state, batch)
        loss_sum += float(sums[0])
        weight_sum += float(sums[1])
    return loss_sum / weight_sum


def finish(
    run: Run, state: TrainState, log: MetricsLog | NoLog, stop: StopRequest
) -> RunResult:
    """The results, or how to go on, and where everything is."""
    config, done, loss = run.config, int(state.step), None
    if stop.requested or done < config.steps:
        report.print_stopped(run.console, done, resuming_command(config, run.program))
    else:
        loss = validate(run, state)
        log.write(step=done - 1, validation_loss=loss)
        report.print_results(run.console, loss, run.texts)
        report.print_sample(run.console, run.texts, sample(run, state))
        if run.step.layout.stage > 1:
            print_bubble(run, state)
    where = f"checkpoint in {run.checkpoints.directory}, metrics in "
    where += str(config.metrics_path)
    run.console.print(where, soft_wrap=True, highlight=False, markup=False)
    return RunResult(
        steps_done=done,
        validation_loss=loss,
        signal=stop.signal,
        folder=config.folder,
    )


def print_bubble(run: Run, state: TrainState) -> None:
    """The predicted bubble and the measured one; uses `state` up."""
    config, step = run.config, run.step
    predicted = predicted_bubble(step.schedule, step.layers_of_stages)
    measured = None
    # A schedule of one's own has none of twice the microbatches to compare with.
    if config.bubble_rounds and config.schedule is None:
        line = str(replace(step.layout, microbatches=2 * step.layout.microbatches))
        twice = make_step(replace(config, layout=line))
        batch = batches_of(run)(0)
        measured = measured_bubble(step, twice, state, batch, config.bubble_rounds)
    report.print_bubble(run.console, step, predicted, measured)


def sample(run: Run, state: TrainState) -> np.ndarray:
    """Tokens that follow the first of the validation text."""
    return sample_tokens(
        run.step,
        state,
        run.texts.prompt,
        num_tokens=run.config.sample_tokens,
        seq=run.config.seq,
        vocab=run.texts.vocab,
        seed=run.config.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
