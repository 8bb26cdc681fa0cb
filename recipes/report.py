"""Printed output of a training run: layout, progress and results."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from meshpar import TrainState, TrainStep, batch_shapes, lint
from meshpar.cli.lint import parameter_table
from meshpar.errors import printable
from meshpar.planner.from_model import slow_links
from meshpar.recipes.bubble import Bubble
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus import Corpus
from meshpar.recipes.resume import Position
from meshpar.train.data import bigram_loss, unigram_loss
from meshpar.train.faults import BadStepError

_MOST_OF_BIGRAM = 1024
"""The vocabulary, whose square it counts."""


def print_config(console: Console, config: RunConfig, saved_as: Path) -> None:
    """Every option of the run, and where they are saved."""
    told = [
        f"{name}={', '.join(value) if isinstance(value, list) else value}"
        for name, value in config.values().items()
        if value is not None and value is not False and value != []
    ]
    console.print(f"run ({saved_as}):", highlight=False, markup=False, soft_wrap=True)
    columns = Columns([Text(one) for one in told], padding=(0, 2))
    console.print(Padding(columns, (0, 0, 0, 2)))


def print_resumed(
    console: Console, done: int, changes: list[str], position: Position
) -> None:
    """Where the run goes on, and what is not as it was."""
    lines = [f"resumed after step {done}, {position.windows:,} windows into the text"]
    lines += [f"  changed: {change}" for change in changes]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def print_line(console: Console, line: str) -> None:
    """A line as it is, which may name a file like [b].txt."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_fitted(console: Console, told: str) -> None:
    """Says how the layout changes with the number of devices, if it does."""
    if told:
        console.print(told, highlight=False, markup=False, soft_wrap=True)


def print_damaged(console: Console, step: int, why: str) -> None:
    """Says that a checkpoint was passed over."""
    line = f"checkpoint of step {step} is damaged: {why}; the one before it is taken"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_renamed(console: Console, path: Path, name: Path) -> None:
    """Says where the metrics of a start without a checkpoint are."""
    line = f"no checkpoint to go on from: the metrics in {path} are kept as {name}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_rolled_back(
    console: Console, bad: BadStepError, step: int, windows: int
) -> None:
    """Says from where a run goes on after a bad step."""
    line = f"{bad}; back to step {step}, and on {windows:,} windows into the text"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_replay(console: Console, number: int, told: str) -> None:
    """Says that a device miscalculates, and that the run goes on all the same."""
    line = f"step {number}: {told}; the run goes on, as on_bad_step is skip"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_not_saved(console: Console, error: Exception) -> None:
    """Says that a checkpoint is missing, and that the run goes on."""
    line = f"{error}; the run goes on, and the checkpoint before stays"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_stopped(console: Console, done: int, command: str) -> None:
    """How to go on: one line that a shell takes."""
    lines = f"stopped after step {done}; go on with\n  {command}"
    console.print(lines, highlight=False, markup=False, soft_wrap=True)


def print_layout(console: Console, step: TrainStep, config: RunConfig) -> None:
    """The layout, every parameter, and what the lint finds."""
    sizes = {"global_batch": config.global_batch, "seq": config.seq}
    found = lint(step.model, step.layout, **sizes)
    device, number = step.mesh.devices.flat[0], step.mesh.size
    there = jax.device_count()
    which = f"{number}" if number == there else f"the first {number} of {there}"
    console.print(
        f"layout {step.layout} on {which} {device.device_kind} devices, "
        f"{step.model.num_parameters:,} parameters",
        highlight=False,
    )
    console.print(parameter_table(found.parameters))
    for finding in found.findings:
        line = f"{finding.kind}: {finding.message}"
        console.print(line, highlight=False, markup=False)


def print_slow_links(console: Console, step: TrainStep, config: RunConfig) -> None:
    """The mesh axes that lie on a slower link than they could, with the cure."""
    batch = batch_shapes(config.global_batch, config.seq)
    for one in slow_links(step, batch):
        console.print(str(one), highlight=False, markup=False, soft_wrap=True)


def print_bytes(
    console: Console, step: TrainStep, state: TrainState, texts: Corpus
) -> None:
    """Bytes of the state on a device, expected and found, and what data there are."""
    expected, actual = expected_bytes(step), actual_bytes(step, state)
    console.print(
        f"state per device: {expected:,} bytes expected, {actual:,} actual; "
        + "\n".join(texts.lines),
        highlight=False,
        markup=False,
    )


def expected_bytes(step: TrainStep) -> int:
    """Bytes of the state on a device, by the shardings."""
    return sum(
        int(np.prod(sharding.shard_shape(shape.shape))) * shape.dtype.itemsize
        for shape, sharding in zip(
            jax.tree.leaves(step.state_shapes),
            jax.tree.leaves(step.shardings),
            strict=True,
        )
    )


def actual_bytes(step: TrainStep, state: TrainState) -> int:
    """Bytes of the state as found on the first device."""
    device = step.mesh.devices.flat[0]
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(state)
        for shard in array.addressable_shards
        if shard.device == device
    )


def progress_bar(console: Console) -> Progress:
    """A bar with loss, tokens per second and the time left."""
    return Progress(
        TextColumn("{task.description} {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


def compiling(progress: Progress, steps: int, done: int) -> TaskID:
    """The bar's task, before the first step has ended."""
    return progress.add_task(
        "compiling", total=steps, completed=done, loss=0.0, rate=0.0
    )


def print_where(console: Console, checkpoints: Path, metrics: Path) -> None:
    """Says where everything is."""
    where = f"checkpoint in {checkpoints}, metrics in {metrics}"
    console.print(where, soft_wrap=True, highlight=False, markup=False)


def print_warning(console: Console, line: str) -> None:
    """A line that the run goes on after."""
    console.print(f"warning: {line}", highlight=False, markup=False, soft_wrap=True)


def print_skipped(console: Console, number: int, row: dict[str, float]) -> None:
    """Say that a step changed nothing, and why."""
    why = f"loss {row['loss']}, gradient norm {row['grad_norm']}: not finite"
    if row["weight_sum"] == 0:
        why = "no token counts, all weights are 0"
    console.print(
        f"step {number}: {why}, so nothing was changed; {row['skipped']:.0f} steps "
        "skipped so far",
        highlight=False,
    )


def print_look(
    console: Console, done: int, row: dict[str, float], validation_loss: float
) -> None:
    """A line on the training after `done` steps."""
    console.print(
        f"step {done}: loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, "
        f"validation {validation_loss:.4f}"
    )


def print_waits(console: Console, done: int, line: str | None) -> None:
    """Says who waits for data, where somebody does."""
    if line:
        console.print(f"step {done}: {line}", highlight=False, markup=False)


def print_goodput(console: Console, line: str) -> None:
    """Says where the time of the run went."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_profiled(console: Console, steps: range, folder: Path) -> None:
    """Says where the trace of some steps is."""
    line = (
        f"trace of steps {steps[0]} to {steps[-1]} in {folder}: `tensorboard --logdir "
        f"{folder}` with the XProf plugin, or its perfetto_trace.json.gz at "
        "https://ui.perfetto.dev"
    )
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_results(console: Console, loss: float, texts: Corpus) -> None:
    """The validation loss beside baselines of the same text, where it is one."""
    line = f"validation loss {loss:.4f} nats per {texts.tokenizer.unit}"
    if texts.counted is not None:
        line += f"; unigram {unigram_loss(*texts.counted, texts.vocab):.4f}"
        if texts.vocab <= _MOST_OF_BIGRAM:
            line += f", bigram {bigram_loss(*texts.counted, texts.vocab):.4f}"
    console.print(line, highlight=False)


def print_sample(console: Console, texts: Corpus, tokens: np.ndarray) -> None:
    """Sampled tokens as text."""
    text = printable(texts.tokenizer.decode(tokens))
    console.print("sample:", text, sep="\n", highlight=False, markup=False)


def print_bubble(
    console: Console, step: TrainStep, predicted: float, measured: Bubble | None
) -> None:
    """The bubble by the schedule, and by the clock with how that was measured."""
    layout = step.layout
    line = (
        f"bubble of {step.schedule.name}, stage={layout.stage}, "
        f"microbatches={layout.microbatches}: predicted {predicted:.3f}"
    )
    if measured is not None:
        useful_s = measured.useful_s
        ticks_s = useful_s / (1 - predicted)
        line += (
            f", measured {measured.fraction:.3f}: of a step of {measured.step_s:.3f} s "
            f"another {layout.microbatches} microbatches would add {useful_s:.3f} s "
            f"(steps in turn, medians of {measured.rounds}); at that rate filling and "
            f"draining the pipeline takes {ticks_s - useful_s:.3f} s, and what is done "
            f"once a step {measured.step_s - ticks_s:.3f} s"
        )
    console.print(line, highlight=False, soft_wrap=True)
