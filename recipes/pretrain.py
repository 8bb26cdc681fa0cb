"""Pretrain a language model on a text, under any layout.

    python -m recipes.pretrain --layout data=2,stage=2,tensor=2,microbatches=4

The default is a 0.8M-parameter Llama on bytes of twelve of Shakespeare's plays, on
eight virtual CPU devices; two further plays are kept for validation. Figures of a
measured run stand in recipes/README.md.
"""

from __future__ import annotations

import argparse
import errno
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh
from rich.console import Console

from meshpar import (
    MESH_AXES,
    InputError,
    Layout,
    TrainState,
    TrainStep,
    batch_shapes,
    emulate,
    lint,
    make_train_step,
)
from meshpar.cli.lint import wide_console
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import TokenWindows, padded_batches, shuffled_batches
from meshpar.train.interrupt import StopRequest
from meshpar.train.metrics import JsonLines, cut_rows
from meshpar.train.sample import sample_tokens
from models.presets import build
from recipes import report
from recipes.bubble import measured_bubble, predicted_bubble
from recipes.options import parse_arguments
from recipes.rows import comes_again, refuse_rows
from recipes.texts import BYTE_VOCAB, Texts, read_tokens

QUICK_BATCHES = 8  # of validation while training; all of them at the end
RUN_KEYS = ("preset", "seed", "global_batch", "seq", "learning_rate", "steps")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run but for its state, which every step replaces."""

    args: argparse.Namespace
    step: TrainStep
    texts: Texts
    checkpoints: Checkpoints
    console: Console

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        return {
            **{key: getattr(self.args, key) for key in RUN_KEYS},
            "precision": self.step.layout.precision,
            "text": str(self.args.text.resolve()),
            "layout": str(self.step.layout),
        }


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe; 0 when done or stopped by Ctrl-C, 2 on bad input."""
    args = parse_arguments(argv)
    try:
        if args.emulate:
            emulate(args.emulate)
        return pretrain(args)
    except (InputError, OSError) as error:
        print(f"pretrain: {_one_line(error, args.out)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pretrain: stopped outside the training loop", file=sys.stderr)
        return 130


def pretrain(args: argparse.Namespace) -> int:
    """Trains, validates, samples and saves."""
    console = wide_console()
    texts = read_tokens(args.text, args.seq)
    step = make_step(args)
    step.check_batch(args.global_batch)
    folder = args.out / "checkpoints"
    with Checkpoints(folder, layer_orders=step.layer_orders) as checkpoints:
        run = Run(
            args=args, step=step, texts=texts, checkpoints=checkpoints, console=console
        )
        state = first_state(run)
        found = lint(
            step.model, step.layout, global_batch=args.global_batch, seq=args.seq
        )
        report.print_layout(console, step, found)
        report.print_bytes(console, step, state, texts)
        with JsonLines(args.log_json) as log:
            with StopRequest() as stop:
                state = train(run, state, log, stop)
                checkpoints.save(state, run.description)
            finish(run, state, log)
    return 0


def audited(
    layout: Layout, mesh: AbstractMesh | None
) -> tuple[TrainStep, dict[str, jax.ShapeDtypeStruct]]:
    """The step and the batch of the default options: `meshpar audit --recipe`."""
    args = parse_arguments(["--layout", str(layout)])
    return make_step(args, mesh), batch_shapes(args.global_batch, args.seq)


def make_step(args: argparse.Namespace, mesh: AbstractMesh | None = None) -> TrainStep:
    """The compiled step of the options, on real devices or on a mesh without any."""
    layout = Layout.parse(args.layout)
    if args.dtype:
        layout = replace(layout, precision=args.dtype)
    model = build(args.preset)
    vocab = model.flat_parameters()["token_embed"].shape[0]
    if vocab < BYTE_VOCAB:
        raise InputError(
            f"preset {args.preset!r} has a vocabulary of {vocab}, but bytes need "
            f"{BYTE_VOCAB}; choose a larger preset"
        )
    warmup = min(max(args.steps // 10, 1), args.steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, max(args.steps, 2), args.learning_rate / 10
    )
    optimizer = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    devices = None if mesh else devices_of(layout)
    return make_train_step(
        model,
        optimizer,
        layout,
        devices=devices,
        mesh=mesh,
        max_grad_norm=1.0,
        schedule=args.schedule,
    )


def devices_of(layout: Layout) -> list[jax.Device]:
    """The first devices, as many as the layout needs; all of them for a -1."""
    devices = jax.devices()
    absorbs = any(getattr(layout, mesh_axis) == -1 for mesh_axis in MESH_AXES)
    if absorbs or layout.num_devices > len(devices):
        layout.resolve(len(devices))
        return devices
    return devices[: layout.num_devices]


def first_state(run: Run) -> TrainState:
    """The newest checkpoint's state when resuming, else initial values.

    Raises:
        InputError: A fresh run where there is a checkpoint or a metrics file already,
            or a resumed one with other options.
    """
    args, step, checkpoints = run.args, run.step, run.checkpoints
    if not args.resume:
        if checkpoints.latest_step is not None:
            raise InputError(
                f"{str(args.out)!r} holds a run at step {checkpoints.latest_step}; add "
                "--resume to go on with it, or name another --out"
            )
        refuse_rows(args.log_json)
        return step.init(args.seed)
    before, now = checkpoints.run_of_latest(), run.description
    for key in (*RUN_KEYS, "precision", "text"):
        if before.get(key) != now[key]:
            raise InputError(
                f"the checkpoint was made with {key}={before.get(key)}, not "
                f"{now[key]}; only the layout may change when resuming"
            )
    state = checkpoints.restore(step.state_shapes, step.shardings)
    done = int(state.step)
    cut_rows(args.log_json, lambda row: comes_again(row, done, args.steps))
    return state


def train(run: Run, state: TrainState, log: JsonLines, stop: StopRequest) -> TrainState:
    """Steps until `--steps`, or until a stop is requested."""
    args, first = run.args, int(state.step)
    windows = TokenWindows(run.texts.train, args.seq)
    batch_of = shuffled_batches(windows, global_batch=args.global_batch, seed=args.seed)
    skipped = float(state.skipped)
    with report.progress_bar(run.console) as progress:
        task = progress.add_task(
            "training", total=args.steps, completed=first, loss=0.0, rate=0.0
        )
        for number in range(first, args.steps):
            state, row = timed_step(run.step, state, batch_of(number))
            log.write(step=number, **row)
            if row["skipped"] > skipped:
                report.print_skipped(progress.console, number, row)
            skipped = row["skipped"]
            progress.update(task, advance=1, loss=row["loss"], rate=row["tokens_per_s"])
            done = number + 1
            if done % args.validate_every == 0 and done < args.steps:
                loss = validate(run, state, QUICK_BATCHES)
                log.write(step=number, validation_loss=loss)
                report.print_look(progress.console, done, row, loss)
            if done % args.save_every == 0:
                run.checkpoints.save(state, run.description)
            if stop.requested or done >= (args.stop_after or args.steps):
                break
    return state


def timed_step(
    step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[TrainState, dict[str, float]]:
    """One step, and its row of metrics."""
    start = time.perf_counter()
    state, metrics = step(state, batch)
    row = {name: float(value) for name, value in metrics.items()}
    step_s = time.perf_counter() - start
    tokens_per_s = batch["tokens"].size / step_s
    return state, {**row, "tokens_per_s": tokens_per_s, "step_s": step_s}


def validate(run: Run, state: TrainState, num_batches: int | None = None) -> float:
    """Mean loss per token over the validation text, or over its first batches."""
    windows = TokenWindows(run.texts.validation, run.args.seq)
    loss_sum = weight_sum = 0.0
    for index, batch in enumerate(padded_batches(windows, run.args.global_batch)):
        if index == num_batches:
            break
        sums = run.step.evaluate(state, batch)
        loss_sum += float(sums[0])
        weight_sum += float(sums[1])
    return loss_sum / weight_sum


def finish(run: Run, state: TrainState, log: JsonLines) -> None:
    """The results, or how to go on, and where everything is."""
    args, done = run.args, int(state.step)
    if done < args.steps:
        ending = f"stopped after step {done}; go on with --resume --out {args.out}"
        run.console.print(ending, markup=False, soft_wrap=True)
    else:
        loss = validate(run, state)
        log.write(step=done - 1, validation_loss=loss)
        report.print_results(run.console, loss, run.texts)
        report.print_sample(run.console, sample(run, state))
        if run.step.layout.stage > 1:
            print_bubble(run, state)
    where = f"checkpoint in {run.checkpoints.directory}, metrics in {log.path}"
    run.console.print(where, soft_wrap=True, highlight=False, markup=False)


def print_bubble(run: Run, state: TrainState) -> None:
    """The predicted bubble and the measured one; uses `state` up."""
    args, step = run.args, run.step
    predicted = predicted_bubble(step.schedule, step.layers_of_stages)
    measured = None
    # A schedule of one's own has none of twice the microbatches to compare with.
    if args.bubble_rounds and args.schedule is None:
        line = str(replace(step.layout, microbatches=2 * step.layout.microbatches))
        twice = make_step(argparse.Namespace(**{**vars(args), "layout": line}))
        windows = TokenWindows(run.texts.train, args.seq)
        batch_of = shuffled_batches(
            windows, global_batch=args.global_batch, seed=args.seed
        )
        measured = measured_bubble(step, twice, state, batch_of(0), args.bubble_rounds)
    report.print_bubble(run.console, step, predicted, measured)


def sample(run: Run, state: TrainState) -> np.ndarray:
    """Bytes that follow the first of the validation text."""
    return sample_tokens(
        run.step,
        state,
        run.texts.validation[:32],
        num_tokens=run.args.sample_tokens,
        seq=run.args.seq,
        vocab=BYTE_VOCAB,
        seed=run.args.seed,
    )


def _one_line(error: Exception, out: Path) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = str(error.filename or out)
        return f"the disk of {where!r} is full; free some space or name another folder"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
