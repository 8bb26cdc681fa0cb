"""Pretrain a language model on a text, under any layout.

    python -m recipes.pretrain --layout data=2,fsdp=2,tensor=2

The default is a 0.8M-parameter Llama on bytes of twelve of Shakespeare's plays, on
eight virtual CPU devices; two further plays are kept for validation. Figures of a
measured run stand in recipes/README.md.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshpar import (
    MESH_AXES,
    InputError,
    Layout,
    TrainState,
    TrainStep,
    emulate,
    lint,
    make_train_step,
)
from meshpar.cli.lint import parameter_table, wide_console
from meshpar.cli.parsing import OneLineParser, positive
from meshpar.emulate import ENVIRONMENT_VARIABLE
from meshpar.train.baselines import bigram_loss, unigram_loss
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import (
    TokenWindows,
    byte_tokens,
    padded_batches,
    read_texts,
    shuffled_batches,
)
from meshpar.train.interrupt import StopRequest
from meshpar.train.metrics import JsonLines
from meshpar.train.sample import sample_tokens
from models.presets import build

SHAKESPEARE = Path(__file__).parent / "data" / "shakespeare"
HELD_OUT = ("macbeth", "tempest")  # plays for validation
HELD_OUT_SHARE = 0.1  # of a single text, its end
BYTE_VOCAB = 256
QUICK_BATCHES = 8  # of validation while training; all of them at the end
RUN_KEYS = ("preset", "seed", "global_batch", "seq", "learning_rate", "steps")


@dataclass(frozen=True)
class Texts:
    """Tokens to train on and tokens to validate on."""

    train: np.ndarray
    validation: np.ndarray


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe; 0 when done or stopped by Ctrl-C, 2 on bad input."""
    args = parse_arguments(argv)
    try:
        if args.emulate:
            emulate(args.emulate)
        return pretrain(args)
    except (InputError, OSError) as error:
        print(f"pretrain: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pretrain: stopped outside the training loop", file=sys.stderr)
        return 130


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, each with its default."""
    parser = OneLineParser(prog="pretrain", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--layout", default="data=2,fsdp=2,tensor=2", help="the layout's line")
    add("--preset", default="tiny", help="a name in models.presets.PRESETS")
    add("--steps", type=positive, default=200, help="optimizer steps in all")
    add("--seed", type=int, default=0, help="of initial values, data order, samples")
    add("--dtype", choices=("fp32", "bf16"), help="arithmetic; the layout's by default")
    add("--text", type=Path, default=SHAKESPEARE, help="a file, or a folder of .txt")
    add("--out", type=Path, help="folder of the run (default: runs/ and the time)")
    add("--resume", action="store_true", help="go on from the newest checkpoint there")
    add("--log-json", type=Path, help="metrics file (default: OUT/metrics.jsonl)")
    add("--global-batch", type=positive, default=32, help="sequences in a step")
    add("--seq", type=positive, default=128, help="tokens of a sequence")
    add("--learning-rate", type=float, default=3e-3, help="its peak")
    add("--save-every", type=positive, default=200, help="steps between checkpoints")
    add("--validate-every", type=positive, default=100, help="steps between looks")
    add("--stop-after", type=positive, help="save and stop after this step")
    add(
        "--sample-tokens",
        type=int,
        default=160,
        help="bytes of text to write at the end",
    )
    number = int(os.environ.get(ENVIRONMENT_VARIABLE, 8))
    add("--emulate", type=int, default=number, help="virtual CPU devices; 0: real ones")
    args = parser.parse_args(argv)
    if args.resume and args.out is None:
        parser.error("--resume needs the folder of the run: give --out DIR")
    args.out = args.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return args


def pretrain(args: argparse.Namespace) -> int:
    """Trains, validates, samples and saves."""
    console = wide_console()
    texts = read_tokens(args.text, args.seq)
    step = make_step(args)
    step.check_batch(args.global_batch)
    with Checkpoints(args.out / "checkpoints") as checkpoints:
        state = first_state(args, step, checkpoints)
        print_layout(console, args, step, state, texts)
        log_path = args.log_json or args.out / "metrics.jsonl"
        with JsonLines(log_path) as log, StopRequest() as stop:
            state = train(console, args, step, state, texts, log, checkpoints, stop)
            checkpoints.save(state, run_of(args, step))
        where = f"checkpoint in {checkpoints.directory}, metrics in {log_path}"
        if int(state.step) < args.steps:
            console.print(
                f"stopped after step {int(state.step)}; go on with --resume --out "
                f"{args.out}",
                markup=False,
                soft_wrap=True,
            )
        else:
            print_results(console, args, step, state, texts)
        console.print(where, soft_wrap=True, highlight=False, markup=False)
    return 0


def read_tokens(path: Path, seq: int) -> Texts:
    """Byte tokens; whole plays are held out, or the end of a single text."""
    texts = read_texts(path)
    held_out = [name for name in texts if name in HELD_OUT]
    if len(texts) > 1:
        held_out = held_out or [list(texts)[-1]]
        train = "\n".join(text for name, text in texts.items() if name not in held_out)
        validation = "\n".join(texts[name] for name in held_out)
    else:
        (text,) = texts.values()
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        train, validation = text[:cut], text[cut:]
    split = Texts(byte_tokens(train), byte_tokens(validation))
    for tokens in (split.train, split.validation):
        TokenWindows(tokens, seq)
    return split


def make_step(args: argparse.Namespace) -> TrainStep:
    """The compiled step of the options."""
    layout = Layout.parse(args.layout)
    if args.dtype:
        layout = replace(layout, precision=args.dtype)
    devices = devices_of(layout)
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
    return make_train_step(model, optimizer, layout, devices=devices, max_grad_norm=1.0)


def devices_of(layout: Layout) -> list[jax.Device]:
    """The first devices, as many as the layout needs; all of them for a -1."""
    devices = jax.devices()
    absorbs = any(getattr(layout, mesh_axis) == -1 for mesh_axis in MESH_AXES)
    if absorbs or layout.num_devices > len(devices):
        layout.resolve(len(devices))
        return devices
    return devices[: layout.num_devices]


def run_of(args: argparse.Namespace, step: TrainStep) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    return {
        **{key: getattr(args, key) for key in RUN_KEYS},
        "precision": step.layout.precision,
        "text": str(args.text.resolve()),
        "layout": str(step.layout),
    }


def first_state(
    args: argparse.Namespace, step: TrainStep, checkpoints: Checkpoints
) -> TrainState:
    """The newest checkpoint's state when resuming, else initial values."""
    if not args.resume:
        if checkpoints.latest_step is not None:
            raise InputError(
                f"{str(args.out)!r} holds a run at step {checkpoints.latest_step}; add "
                "--resume to go on with it, or name another --out"
            )
        return step.init(args.seed)
    before, now = checkpoints.run_of_latest(), run_of(args, step)
    for key in (*RUN_KEYS, "precision", "text"):
        if before[key] != now[key]:
            raise InputError(
                f"the checkpoint was made with {key}={before[key]}, not {now[key]}; "
                "only the layout may change when resuming"
            )
    return checkpoints.restore(step.state_shapes, step.shardings)


def train(
    console: Console,
    args: argparse.Namespace,
    step: TrainStep,
    state: TrainState,
    texts: Texts,
    log: JsonLines,
    checkpoints: Checkpoints,
    stop: StopRequest,
) -> TrainState:
    """Steps until `--steps`, or until a stop is requested."""
    windows = TokenWindows(texts.train, args.seq)
    batch_of = shuffled_batches(windows, global_batch=args.global_batch, seed=args.seed)
    with progress_bar(console) as progress:
        task = progress.add_task(
            "training", total=args.steps, completed=int(state.step), loss=0.0, rate=0.0
        )
        for number in range(int(state.step), args.steps):
            state, row = timed_step(step, state, batch_of(number))
            log.write(step=number, **row)
            progress.update(task, advance=1, loss=row["loss"], rate=row["tokens_per_s"])
            done = number + 1
            if done % args.validate_every == 0 and done < args.steps:
                loss = validate(args, step, state, texts, QUICK_BATCHES)
                log.write(step=number, validation_loss=loss)
                progress.console.print(
                    f"step {done}: loss {row['loss']:.4f}, "
                    f"{row['tokens_per_s']:,.0f} tokens/s, validation {loss:.4f}"
                )
            if done % args.save_every == 0:
                checkpoints.save(state, run_of(args, step))
            if stop.requested or done == args.stop_after:
                break
    return state


def timed_step(
    step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[TrainState, dict[str, float]]:
    """One step, and its row of metrics."""
    start = time.perf_counter()
    state, metrics = step(state, batch)
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    step_s = time.perf_counter() - start
    tokens_per_s = batch["tokens"].size / step_s
    return state, {
        "loss": loss,
        "grad_norm": norm,
        "tokens_per_s": tokens_per_s,
        "step_s": step_s,
    }


def validate(
    args: argparse.Namespace,
    step: TrainStep,
    state: TrainState,
    texts: Texts,
    num_batches: int | None = None,
) -> float:
    """Mean loss per token over the validation text, or over its first batches."""
    windows = TokenWindows(texts.validation, args.seq)
    loss_sum = weight_sum = 0.0
    for index, batch in enumerate(padded_batches(windows, args.global_batch)):
        if index == num_batches:
            break
        sums = step.evaluate(state, batch)
        loss_sum += float(sums[0])
        weight_sum += float(sums[1])
    return loss_sum / weight_sum


def print_layout(
    console: Console,
    args: argparse.Namespace,
    step: TrainStep,
    state: TrainState,
    texts: Texts,
) -> None:
    """The layout, every parameter, and the bytes of the state on each device."""
    report = lint(step.model, step.layout, global_batch=args.global_batch, seq=args.seq)
    device = step.mesh.devices.flat[0]
    console.print(
        f"layout {step.layout} on {step.mesh.size} {device.device_kind} devices, "
        f"{step.model.num_parameters:,} parameters",
        highlight=False,
    )
    console.print(parameter_table(report.parameters))
    for finding in report.findings:
        console.print(f"{finding.kind}: {finding.message}", highlight=False)
    expected, actual = state_bytes(step, state)
    console.print(
        f"state per device: {expected:,} bytes expected, {actual:,} actual; "
        f"text: {len(texts.train):,} bytes to train on, {len(texts.validation):,} held "
        "out",
        highlight=False,
    )


def state_bytes(step: TrainStep, state: TrainState) -> tuple[int, int]:
    """Bytes of the state on the first device: by the shardings, and as found there."""
    expected = sum(
        int(np.prod(sharding.shard_shape(shape.shape))) * shape.dtype.itemsize
        for shape, sharding in zip(
            jax.tree.leaves(step.state_shapes),
            jax.tree.leaves(step.shardings),
            strict=True,
        )
    )
    device = step.mesh.devices.flat[0]
    actual = sum(
        shard.data.nbytes
        for array in jax.tree.leaves(state)
        for shard in array.addressable_shards
        if shard.device == device
    )
    return expected, actual


def print_results(
    console: Console,
    args: argparse.Namespace,
    step: TrainStep,
    state: TrainState,
    texts: Texts,
) -> None:
    """Validation loss beside the baselines, and a sample."""
    loss = validate(args, step, state, texts)
    with JsonLines(args.log_json or args.out / "metrics.jsonl") as log:
        log.write(step=int(state.step) - 1, validation_loss=loss)
    pair = (texts.train, texts.validation, BYTE_VOCAB)
    console.print(
        f"validation loss {loss:.4f} nats per byte; "
        f"unigram {unigram_loss(*pair):.4f}, bigram {bigram_loss(*pair):.4f}",
        highlight=False,
    )
    prompt = texts.validation[:32]
    tokens = sample_tokens(
        step,
        state,
        prompt,
        num_tokens=args.sample_tokens,
        seq=args.seq,
        vocab=BYTE_VOCAB,
        seed=args.seed,
    )
    text = bytes(tokens.astype(np.uint8)).decode(errors="replace")
    console.print("sample:", text, sep="\n", highlight=False, markup=False)


def progress_bar(console: Console) -> Progress:
    """A bar with loss, tokens per second and the time left."""
    return Progress(
        TextColumn("{task.description} {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or os.getcwd()}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
