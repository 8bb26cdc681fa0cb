"""The configuration of a training run: every option, typed, with its default."""

from __future__ import annotations

import math
import os
import reprlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshpar.errors import InputError, local_path, whole_number
from meshpar.recipes.option_checks import (
    OF_DATA,
    check_data,
    check_rollback,
    check_texts,
)
from meshpar.train.faults import check_spike

LAYOUT = "data=2,stage=2,tensor=2,microbatches=4"
PRESET = "tiny"
NUM_VIRTUAL_DEVICES = 8
ENVIRONMENT_VARIABLE = "MESHPAR_EMULATE"  # of meshpar.emulate, which imports jax

_AT_LEAST_ONE = (
    *("steps", "global_batch", "seq", "save_every", "validate_every"),
    *("stop_after", "decay_steps", "num_processes", "start_timeout", "heartbeat"),
    *("keep", "keep_every", "rollback_steps", "sync_every"),
)
_AT_LEAST_ZERO = (
    *("seed", "sample_tokens", "bubble_rounds", "emulate", "process_id"),
    *("hang_timeout", "replay_every", "profile"),
)
_OR_NONE = (
    *("stop_after", "decay_steps", "keep_every", "num_processes", "process_id"),
    "sync_every",
)


_MOST = 2**31 - 1
"""Of a count, which a device may hold in 32 bits."""
_MOST_SEED = 2**32 - 1

PATHS = (
    *("schedule", "from_weights", "out", "log_json", "tensorboard"),
    *("tokenizer", "data_cache"),
)
"""Options that are a path."""

SEVERAL = ("text", "data", "validation_data")
"""Options that may be given again, and are then all meant."""


def _num_virtual_devices() -> int:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return int(text) if text.isdecimal() else NUM_VIRTUAL_DEVICES


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run of the recipe.

    Args:
        layout: The layout's line; nothing else changes with it.
        schedule: CSV file of a pipeline schedule of one's own, one row a rank.
        preset: A model by name; "tiny" where --model gives no other.
        model: What differs from the preset, such as layers=2,hidden=64; without one,
            all sizes of a model; or the path of a Hugging Face config.json.
        steps: Optimizer steps in all.
        seed: Of initial values, order of the text, and samples.
        dtype: Arithmetic of the blocks; the layout's by default.
        from_weights: Also --from: a folder of a Hugging Face model, whose config is
            the model's unless another is given, and whose weights it starts from.
        text: A file, or a folder of .txt files; give it again for more. Shakespeare's
            plays by default.
        data: In place of text: a file, a folder or a pattern of text, JSON lines,
            Parquet, or tokens of Megatron or nanoGPT; or of a mixture
            path=web/*.jsonl,weight=0.7,field=text, and again for each source.
        validation_data: To validate on, alike; by default a tenth of each source, at
            most a million tokens.
        tokenizer: A tokenizer.json, of the package tokenizers; bytes by default.
        eos: The token that ends a document, of the tokenizer; without one the number
            of that of files of tokens. By default the tokenizer's.
        pack: Whole documents side by side in a row, where each sees itself alone, and
            not windows across them.
        on_bad_line: What follows a broken line of JSON or a row of Parquet without
            text: "stop", or "skip", which counts them.
        data_cache: Folder for the tokens of texts, made once; OUT/tokens by default.
        out: Folder of the run; runs/ and the time by default.
        resume: Go on from the newest checkpoint of --out; what is not given is as it
            was there. "auto" begins where there is none.
        log_json: File of metrics, a JSON object a line; OUT/metrics.jsonl by default.
        tensorboard: Folder to write TensorBoard's events to.
        sync_every: Steps that each part of the layout's `data` does by itself before
            all average their parameters, for slow links; the layout's by default.
        outer_optimizer: What takes that average further: "nesterov", "sgd" or "adam".
        outer_learning_rate: Its.
        outer_momentum: Its, and Adam's first one; sgd has none.
        gradient_reduction: "by_host" sums gradients inside each host first, on CPUs of
            several processes; GPUs and TPUs do so by themselves.
        mesh_order: Mesh axes from the slowest link to the fastest, such as
            stage,data,fsdp; the layout's own by default.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence.
        learning_rate: Its peak: it rises to it over a tenth of --decay-steps, and
            falls to a tenth of it along a cosine.
        decay_steps: Steps over which it does; --steps by default.
        save_every: Steps between checkpoints.
        keep: How many of the newest stay.
        keep_every: Those whose step divides by it stay, too.
        validate_every: Steps between looks at the validation text.
        stop_after: Save and stop after this step.
        on_bad_step: What follows a loss or gradients that are not finite, which change
            nothing: "skip" goes on unless ten come in a row, "rollback" goes back to
            a checkpoint and on with the text after the bad step, "stop" ends.
        spike: With rollback or stop: a loss above this many times the median of the
            last 32 is bad too.
        rollback_steps: Steps at least by which a rollback goes back.
        replay_every: Steps between those whose gradients are computed twice and
            compared bit by bit, which finds devices that miscalculate; 0 for none.
        hang_timeout: Seconds that a step, a save or another phase may take before all
            processes write their stacks and end, four times that where programs are
            compiled; 0 waits for ever.
        on_low_memory: What follows where the run needs more memory than there is, by
            arithmetic: "stop" before any parameter is built, "warn" goes on.
        profile: Steps to trace into OUT/profile, for XProf and Perfetto: those after
            the second of this start.
        sample_tokens: Bytes to write at the end.
        bubble_rounds: Pairs of steps that time the pipeline's bubble at the end; 0
            leaves it out.
        emulate: Virtual CPU devices of each process; 0 uses the machine's own.
        coordinator: HOST:PORT of process 0, to join processes by hand; SLURM,
            Kubernetes, Open MPI and TPU pods are found.
        num_processes: How many are started.
        process_id: Which this is, from 0.
        start_timeout: Seconds in which all have to come.
        heartbeat: Seconds of silence after which a process ends the others.

    Raises:
        InputError: A number is out of its range.

    Example:
        >>> RunConfig(steps=5, layout="data=8").changed()
        {'layout': 'data=8', 'steps': 5}
    """

    layout: str = LAYOUT
    schedule: Path | None = None
    preset: str | None = None
    model: str | None = None
    steps: int = 150
    seed: int = 0
    dtype: Literal["fp32", "bf16"] | None = None
    from_weights: Annotated[Path | None, tyro.conf.arg(aliases=("--from",))] = None
    text: tuple[Path, ...] = ()
    data: tuple[str, ...] = ()
    validation_data: tuple[str, ...] = ()
    tokenizer: Path | None = None
    eos: str | None = None
    pack: bool = False
    on_bad_line: Literal["stop", "skip"] = "stop"
    data_cache: Path | None = None
    out: Path | None = None
    resume: bool | Literal["auto"] = False
    log_json: Path | None = None
    tensorboard: Path | None = None
    sync_every: int | None = None
    outer_optimizer: Literal["nesterov", "sgd", "adam"] = "nesterov"
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    gradient_reduction: Literal["flat", "by_host"] = "flat"
    mesh_order: str | None = None
    global_batch: int = 32
    seq: int = 128
    learning_rate: float = 3e-3
    decay_steps: int | None = None
    save_every: int = 200
    keep: int = 2
    keep_every: int | None = None
    validate_every: int = 100
    stop_after: int | None = None
    on_bad_step: Literal["skip", "rollback", "stop"] = "skip"
    spike: float | None = None
    rollback_steps: int = 1
    replay_every: int = 0
    hang_timeout: int = 1800
    on_low_memory: Literal["stop", "warn"] = "stop"
    profile: int = 0
    sample_tokens: int = 160
    bubble_rounds: int = 5
    emulate: int = field(default_factory=_num_virtual_devices)
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout: int = 50
    heartbeat: int = 30

    def __post_init__(self) -> None:
        if isinstance(self.text, str | Path):
            object.__setattr__(self, "text", (self.text,))
        texts = tuple(local_path("--text", path) for path in self.text)
        object.__setattr__(self, "text", texts)
        for name in PATHS:
            if (path := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                object.__setattr__(self, name, local_path(option, path))
        check_texts(self.values())
        self._check_data()
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for name in names:
                self._check_whole(name, least)
        rate = self.learning_rate
        if not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise InputError(
                f"learning_rate={rate!r}: must be a positive number",
                key="value.not_positive",
            )
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise InputError(
                f"outer_learning_rate={rate!r}: must be a positive number",
                key="value.not_positive",
            )
        if not (isinstance(momentum, int | float) and 0 <= momentum < 1):
            raise InputError(
                f"outer_momentum={momentum!r}: must be at least 0 and below 1",
                key="value.out_of_range",
            )
        if self.outer_optimizer not in ("nesterov", "sgd", "adam"):
            raise InputError(
                f"outer_optimizer={self.outer_optimizer!r}: must be 'nesterov', 'sgd' "
                "or 'adam'",
                key="run.unknown_outer_optimizer",
            )
        if self.dtype not in (None, "fp32", "bf16"):
            raise InputError(
                f"dtype={self.dtype!r}: must be 'fp32' or 'bf16'",
                key="run.unknown_dtype",
            )
        if self.on_bad_step not in ("skip", "rollback", "stop"):
            raise InputError(
                f"on_bad_step={self.on_bad_step!r}: must be 'skip', 'rollback' or "
                "'stop'",
                key="run.unknown_bad_step_policy",
            )
        if self.on_low_memory not in ("stop", "warn"):
            raise InputError(
                f"on_low_memory={self.on_low_memory!r}: must be 'stop' or 'warn'",
                key="run.unknown_low_memory_policy",
            )
        check_spike(self.on_bad_step, self.spike)
        if self.on_bad_step == "rollback" and not self.keep_every:
            check_rollback(self.steps, self.save_every, self.keep, self.rollback_steps)
        if self.resume not in (False, True, "auto"):
            raise InputError(
                f"resume={self.resume!r}: must be True, False or 'auto'",
                key="run.unknown_resume",
            )
        if self.resume and self.out is None:
            raise InputError(
                "--resume needs the folder of the run: give --out DIR",
                key="run.resume_without_folder",
            )

    def _check_data(self) -> None:
        for name in ("data", "validation_data"):
            value = getattr(self, name)
            texts = (value,) if isinstance(value, str | Path) else value
            object.__setattr__(self, name, tuple(map(str, texts)))
        check_data({name: getattr(self, name) for name in ("text", *OF_DATA)})
        if self.on_bad_line not in ("stop", "skip"):
            raise InputError(
                f"on_bad_line={self.on_bad_line!r}: must be 'stop' or 'skip'",
                key="run.unknown_bad_line_policy",
            )

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and name in _OR_NONE:
            return
        most = _MOST_SEED if name == "seed" else _MOST
        if whole_number(name, value, least) > most:
            raise InputError(
                f"{name}={reprlib.repr(value)}: must be at most {most}",
                key="value.above_limit",
            )

    @property
    def folder(self) -> Path:
        """Where the run lies, once `out` is decided.

        Raises:
            InputError: It is not.
        """
        if self.out is None:
            raise InputError(
                "the run has no folder yet: give out=", key="run.no_folder"
            )
        return self.out

    @property
    def metrics_path(self) -> Path:
        """The file of its metrics."""
        return self.log_json or self.folder / "metrics.jsonl"

    def values(self) -> dict[str, Any]:
        """Every option as a plain value, paths as text and several as a list."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    def changed(self) -> dict[str, Any]:
        """The options that are not at their default."""
        default = RunConfig().values()
        return {
            name: value
            for name, value in self.values().items()
            if value != default[name]
        }


OF_ONE_START = (
    *("out", "resume", "stop_after", "profile"),
    *("coordinator", "num_processes", "process_id", "start_timeout", "heartbeat"),
)
"""Options of one start of a run, not of the run."""

OPTIONS = tuple(one.name for one in fields(RunConfig))
"""The name of every option; the command line writes `-` for `_`."""


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [str(path) for path in value]
    return value
