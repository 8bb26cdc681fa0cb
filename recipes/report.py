"""Log records of a training run: layout, progress and results."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from meshpar import TrainState, TrainStep, batch_shapes, lint
from meshpar.cli.lint import parameter_table
from meshpar.errors import printable
from meshpar.planner.from_model import slow_links
from meshpar.recipes.bubble import Bubble
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus import Corpus
from meshpar.recipes.resume import Position
from meshpar.recipes.run_log import Drawn
from meshpar.train.data import bigram_loss, unigram_loss
from meshpar.train.faults import BadStepError
from meshpar.train.stashed_steps import stash_note

LOGGER = logging.getLogger("meshpar.recipes.pretrain")

_MOST_OF_BIGRAM = 1024
"""The vocabulary, whose square it counts."""


def log_config(config: RunConfig, saved_as: Path) -> None:
    """Every option of the run, and where they are saved."""
    told = [
        f"{name}={', '.join(value) if isinstance(value, list) else value}"
        for name, value in config.values().items()
        if value is not None and value is not False and value != []
    ]
    LOGGER.info(f"run ({saved_as}):")
    columns = Columns([Text(one) for one in told], padding=(0, 2))
    LOGGER.info(Drawn(Padding(columns, (0, 0, 0, 2))))


def log_resumed(done: int, changes: list[str], position: Position) -> None:
    """Where the run goes on, and what is not as it was."""
    lines = [f"resumed after step {done}, {position.windows:,} windows into the text"]
    lines += [f"  changed: {change}" for change in changes]
    LOGGER.info("\n".join(lines))


def log_line(line: str) -> None:
    """A line as it is, which may name a file like [b].txt."""
    LOGGER.info(line)


def log_fitted(told: str) -> None:
    """Says how the layout changes with the number of devices, if it does."""
    if told:
        LOGGER.info(told)


def log_damaged(step: int, why: str) -> None:
    """Says that a checkpoint was passed over."""
    line = f"checkpoint of step {step} is damaged: {why}; the one before it is taken"
    LOGGER.warning(line)


def log_renamed(path: Path, name: Path) -> None:
    """Says where the metrics of a start without a checkpoint are."""
    line = f"no checkpoint to go on from: the metrics in {path} are kept as {name}"
    LOGGER.info(line)


def log_rolled_back(bad: BadStepError, step: int, windows: int) -> None:
    """Says from where a run goes on after a bad step."""
    line = f"{bad}; back to step {step}, and on {windows:,} windows into the text"
    LOGGER.warning(line)


def log_replay(number: int, told: str) -> None:
    """Says that a device miscalculates, and that the run goes on all the same."""
    line = f"step {number}: {told}; the run goes on, as on_bad_step is skip"
    LOGGER.warning(line)


def log_not_saved(error: Exception) -> None:
    """Says that a checkpoint is missing, and that the run goes on."""
    line = f"{error}; the run goes on, and the checkpoint before stays"
    LOGGER.warning(line)


def log_stopped(done: int, command: str) -> None:
    """How to go on: one line that a shell takes."""
    lines = f"stopped after step {done}; go on with\n  {command}"
    LOGGER.info(lines)


def log_layout(step: TrainStep, config: RunConfig) -> None:
    """The layout, every parameter, and what the lint finds."""
    sizes = {"global_batch": config.global_batch, "seq": config.seq}
    found = lint(step.model, step.layout, **sizes)
    device, number = step.mesh.devices.flat[0], step.mesh.size
    there = jax.device_count()
    which = f"{number}" if number == there else f"the first {number} of {there}"
    LOGGER.info(
        f"layout {step.layout} on {which} {device.device_kind} devices, "
        f"{step.model.num_parameters:,} parameters"
    )
    if step.options.execution_reason:
        LOGGER.info(step.options.execution_reason)
    if step.layout.updates_each_microbatch:
        LOGGER.info(stash_note(step.layout))
    LOGGER.info(Drawn(parameter_table(found.parameters)))
    for finding in found.findings:
        line = f"{finding.kind}: {finding.message}"
        LOGGER.info(line)


def log_slow_links(step: TrainStep, config: RunConfig) -> None:
    """The mesh axes that lie on a slower link than they could, with the cure."""
    batch = batch_shapes(config.global_batch, config.seq)
    for one in slow_links(step, batch):
        LOGGER.info(str(one))


def log_bytes(step: TrainStep, state: TrainState, texts: Corpus) -> None:
    """Bytes of the state on a device, expected and found, and what data there are."""
    expected, actual = expected_bytes(step), actual_bytes(step, state)
    LOGGER.info(
        f"state per device: {expected:,} bytes expected, {actual:,} actual; "
        + "\n".join(texts.lines)
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


def log_where(checkpoints: Path, metrics: Path) -> None:
    """Says where everything is."""
    where = f"checkpoint in {checkpoints}, metrics in {metrics}"
    LOGGER.info(where)


def log_warning(line: str) -> None:
    """A line that the run goes on after."""
    LOGGER.warning(line)


def log_skipped(number: int, row: dict[str, float]) -> None:
    """Say that a step changed nothing, and why."""
    why = f"loss {row['loss']}, gradient norm {row['grad_norm']}: not finite"
    if row["weight_sum"] == 0:
        why = "no token counts, all weights are 0"
    LOGGER.warning(
        f"step {number}: {why}, so nothing was changed; {row['skipped']:.0f} steps "
        "skipped so far"
    )


def log_look(done: int, row: dict[str, float], validation_loss: float) -> None:
    """A line on the training after `done` steps."""
    LOGGER.info(
        f"step {done}: loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, "
        f"validation {validation_loss:.4f}"
    )


def log_waits(done: int, line: str | None) -> None:
    """Says who waits for data, where somebody does."""
    if line:
        LOGGER.info(f"step {done}: {line}")


def log_goodput(line: str) -> None:
    """Says where the time of the run went."""
    LOGGER.info(line)


def log_profiled(steps: range, folder: Path) -> None:
    """Says where the trace of some steps is."""
    line = (
        f"trace of steps {steps[0]} to {steps[-1]} in {folder}: `tensorboard --logdir "
        f"{folder}` with the XProf plugin, or its perfetto_trace.json.gz at "
        "https://ui.perfetto.dev"
    )
    LOGGER.info(line)


def log_results(loss: float, texts: Corpus) -> None:
    """The validation loss beside baselines of the same text, where it is one."""
    line = f"validation loss {loss:.4f} nats per {texts.tokenizer.unit}"
    if texts.counted is not None:
        line += f"; unigram {unigram_loss(*texts.counted, texts.vocab):.4f}"
        if texts.vocab <= _MOST_OF_BIGRAM:
            line += f", bigram {bigram_loss(*texts.counted, texts.vocab):.4f}"
    LOGGER.info(line)


def log_sample(texts: Corpus, tokens: np.ndarray) -> None:
    """Sampled tokens as text."""
    text = printable(texts.tokenizer.decode(tokens))
    LOGGER.info("sample:\n%s", text)


def log_bubble(step: TrainStep, predicted: float, measured: Bubble | None) -> None:
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
    LOGGER.info(line)
