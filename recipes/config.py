"""The configuration of a training run: every option, typed, with its default."""

from __future__ import annotations

import functools
import math
import os
import reprlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from meshpar.errors import InputError, local_path, whole_number
from meshpar.recipes.optimizer_options import keeps_average, parse_optimizer
from meshpar.recipes.option_checks import (
    DATA_OPTIONS,
    check_data,
    check_optimizer,
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
    *("keep", "keep_every", "rollback_steps", "sync_every", "cooldown_steps"),
    "log_every",
)
_AT_LEAST_ZERO = (
    *("seed", "sample_tokens", "bubble_rounds", "emulate", "process_id"),
    *("hang_timeout", "replay_every", "profile", "warmup_steps"),
)
_OR_NONE = (
    *("stop_after", "decay_steps", "keep_every", "num_processes", "process_id"),
    *("sync_every", "warmup_steps", "cooldown_steps"),
)


_MOST = 2**31 - 1
"""Largest count: a device may hold it in 32 bits."""
_MOST_SEED = 2**32 - 1

PATHS = (
    *("schedule", "from_weights", "out", "log_json", "tensorboard"),
    *("tokenizer", "data_cache"),
)
"""Names of the options whose value is a path."""

SEVERAL = ("text", "data", "validation_data", "tracker", "callback")
"""Names of the options that may be repeated."""

TRACKERS = ("jsonl", "tensorboard", "wandb", "mlflow")
"""Programs that may track a run."""

_UNKNOWN = {
    "outer_optimizer": "run.unknown_outer_optimizer",
    "dtype": "run.unknown_dtype",
    "on_bad_line": "run.unknown_bad_line_policy",
    "on_bad_step": "run.unknown_bad_step_policy",
    "on_low_memory": "run.unknown_low_memory_policy",
    "resume": "run.unknown_resume",
}
"""Name of an option whose type lists its values -> key of the error of another one."""


def _num_virtual_devices() -> int:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return int(text) if text.isdecimal() else NUM_VIRTUAL_DEVICES


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of one training run.

    Args:
        layout: Layout of the run; no other option depends on it.
        schedule: CSV file of a custom pipeline schedule, one row per rank.
        preset: Name of a model; "tiny" unless --model gives all sizes.
        model: Sizes that differ from the preset, such as layers=2,hidden=64; all sizes
            if there is no preset; or the path of a Hugging Face config.json.
        steps: Total number of optimizer steps.
        seed: Seed of the initial values, the data order and the samples.
        dtype: Dtype of the blocks' arithmetic; the layout's by default.
        from_weights: Folder of a Hugging Face model whose weights the run starts from.
            Its config gives the sizes, unless `model` or `preset` does.
        text: Text file, or folder of .txt files; may be repeated. Shakespeare's plays
            by default.
        data: Source of training data instead of --text: a file, folder or glob pattern
            of text, JSON lines, Parquet, or tokens of Megatron or nanoGPT; in a
            mixture path=web/*.jsonl,weight=0.7,field=text. Repeat it for each source.
        validation_data: Source of validation data, written as --data is. By default a
            tenth of each source is held out, at most a million tokens.
        tokenizer: A tokenizer.json of the package tokenizers; bytes are the tokens by
            default.
        eos: Token that ends a document: a text of the tokenizer (by default its own),
            or the number of the token in files of tokens.
        pack: Pack whole documents into a row, each of which attends to itself only,
            instead of cutting windows across documents.
        on_bad_line: Action on a malformed JSON line or a Parquet row without text:
            "stop", or "skip" and count it.
        data_cache: Folder that caches the tokens of texts; OUT/tokens by default.
        out: Folder of the run; runs/ and the time by default.
        resume: Resume from the newest checkpoint of --out. Options you omit keep their
            saved values. "auto" starts a new run if there is no checkpoint.
        log_json: File of metrics, one JSON object per line; OUT/metrics.jsonl by
            default.
        tracker: Program that tracks the run: "wandb", "mlflow", "tensorboard" (events
            in OUT/tensorboard), or "jsonl", the file of metrics that every run has.
            Repeat it for several.
        tensorboard: Folder of TensorBoard event files, with that tracker.
        callback: MODULE:FUNCTION, called with the step and a dict of metrics for every
            row of metrics. Repeat it for several.
        sync_every: Local steps of each replica along the layout's `data` axis between
            averages of their parameters (for slow links); the layout's by default.
        outer_optimizer: Optimizer that applies the averaged local updates: "nesterov",
            "sgd" or "adam".
        outer_learning_rate: Learning rate of the outer optimizer.
        outer_momentum: Momentum of the outer optimizer: nesterov's momentum, or
            Adam's b1; unused by sgd.
        gradient_reduction: "by_host" sums gradients within each host first, on CPUs of
            several processes; GPUs and TPUs do that by themselves.
        mesh_order: Mesh axes from the slowest link to the fastest, such as
            stage,data,fsdp; the layout's own by default.
        global_batch: Sequences per optimizer step.
        seq: Tokens per sequence.
        optimizer: Name of an optimizer and the options that differ from its defaults,
            such as adamw,beta2=0.99,weight_decay=0.05. Names: adamw, lion, adafactor,
            muon, sgd, schedule_free. Weight decay applies to matrices only, unless
            decay_mask=all.
        learning_rate: Peak learning rate, after a linear warm-up.
        learning_rate_schedule: Decay after the warm-up: "cosine", "linear", "constant",
            or "wsd": constant, then linear over the cooldown steps. Cosine by default,
            constant with schedule_free.
        warmup_steps: Steps of the warm-up; a tenth of the decay steps by default.
        cooldown_steps: Steps of the decay of wsd; a fifth of the decay steps by
            default.
        decay_steps: Steps of the whole schedule; --steps by default.
        final_rate_ratio: Learning rate after the decay, as a ratio to the peak.
        max_grad_norm: Scale gradients down to this global norm; 0 for no limit.
        ema_decay: Keep a moving average of the parameters that retains this share of
            itself at each step, such as 0.999.
        validate_with: Parameters to validate and sample with: "average", the default
            if the run keeps one, or "trained".
        save_every: Steps between checkpoints.
        keep: Number of newest checkpoints to keep.
        keep_every: Keep every checkpoint whose step is a multiple of this, too.
        validate_every: Steps between evaluations on the validation data.
        log_every: Steps between rows of metrics.
        stop_after: Save a checkpoint and stop after this step.
        on_bad_step: Action on a loss or gradients that are not finite (such a step
            never changes the parameters): "skip" continues, but stops after ten in a
            row; "rollback" restores a checkpoint and skips the data up to the bad
            step; "stop" ends the run.
        spike: With rollback or stop, also treat a loss above this multiple of the
            median of the last 32 losses as bad.
        rollback_steps: Least number of steps that a rollback goes back.
        replay_every: Steps between steps whose gradients are computed twice and
            compared bit for bit, to detect devices that miscalculate; 0 disables it.
        hang_timeout: Seconds that a step, save or other phase may take before every
            process prints its stacks and exits; four times that while programs
            compile; 0 disables it.
        on_low_memory: Action if the run is estimated to need more memory than there
            is: "stop" before any parameter is built, or "warn" and continue.
        profile: Number of steps to profile into OUT/profile, for XProf and Perfetto,
            after the second step of this start.
        sample_tokens: Bytes of sample text to generate at the end.
        bubble_rounds: Pairs of steps that measure the pipeline bubble at the end; 0
            skips it.
        emulate: Number of virtual CPU devices per process; 0 uses the real devices.
        coordinator: HOST:PORT of process 0, to join processes by hand; SLURM,
            Kubernetes, Open MPI and TPU pods are detected.
        num_processes: Number of processes, with --coordinator.
        process_id: Number of this process, from 0.
        start_timeout: Seconds within which all processes must join.
        heartbeat: Seconds of silence after which a process is taken to be lost and
            the others exit.

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
    tracker: tuple[str, ...] = ()
    tensorboard: Path | None = None
    callback: tuple[str, ...] = ()
    sync_every: int | None = None
    outer_optimizer: Literal["nesterov", "sgd", "adam"] = "nesterov"
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    gradient_reduction: Literal["flat", "by_host"] = "flat"
    mesh_order: str | None = None
    global_batch: int = 32
    seq: int = 128
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    learning_rate_schedule: Literal["cosine", "linear", "constant", "wsd"] | None = None
    warmup_steps: int | None = None
    cooldown_steps: int | None = None
    decay_steps: int | None = None
    final_rate_ratio: float = 0.1
    max_grad_norm: float = 1.0
    ema_decay: float | None = None
    validate_with: Literal["average", "trained"] | None = None
    save_every: int = 200
    keep: int = 2
    keep_every: int | None = None
    validate_every: int = 100
    log_every: int = 1
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
        self._set_plain_types()
        check_texts(self.values())
        check_data({name: getattr(self, name) for name in ("text", *DATA_OPTIONS)})
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for name in names:
                self._check_whole(name, least)
        self._check_rates()
        check_optimizer(self.values())
        for name in self.tracker:
            if name not in TRACKERS:
                raise InputError(
                    f"tracker={reprlib.repr(name)}: must be one of "
                    f"{', '.join(TRACKERS)}",
                    key="run.unknown_tracker",
                )
        for name, key in _UNKNOWN.items():
            choices, value = _choices(name), getattr(self, name)
            if value not in choices:
                *others, last = (repr(one) for one in choices if one is not None)
                words = f"{', '.join(others)} or {last}"
                shown = reprlib.repr(value)
                raise InputError(f"{name}={shown}: must be {words}", key=key)
        check_spike(self.on_bad_step, self.spike)
        if self.on_bad_step == "rollback" and not self.keep_every:
            check_rollback(self.steps, self.save_every, self.keep, self.rollback_steps)
        if self.resume and self.out is None:
            raise InputError(
                "--resume needs the folder of the run: give --out DIR",
                key="run.resume_without_folder",
            )

    def _set_plain_types(self) -> None:
        """Make tuples of the options that may be repeated, and local paths of paths."""
        for name in SEVERAL:
            value = getattr(self, name)
            several = (value,) if isinstance(value, str | Path) else tuple(value)
            if name == "text":
                several = tuple(local_path("--text", path) for path in several)
            elif name in DATA_OPTIONS:
                several = tuple(map(str, several))
            object.__setattr__(self, name, several)
        for name in PATHS:
            if (path := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                object.__setattr__(self, name, local_path(option, path))

    def _check_rates(self) -> None:
        for name in ("learning_rate", "outer_learning_rate"):
            rate = getattr(self, name)
            if not (isinstance(rate, int | float) and 0 < rate < math.inf):
                raise InputError(
                    f"{name}={rate!r}: must be a positive number",
                    key="value.not_positive",
                )
        momentum = self.outer_momentum
        if not (isinstance(momentum, int | float) and 0 <= momentum < 1):
            raise InputError(
                f"outer_momentum={momentum!r}: must be at least 0 and below 1",
                key="value.out_of_range",
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
        """Folder of the run.

        Raises:
            InputError: `out` is not set.
        """
        if self.out is None:
            raise InputError(
                "the run has no folder yet: give out=", key="run.no_folder"
            )
        return self.out

    @property
    def metrics_path(self) -> Path:
        """File of the run's metrics."""
        return self.log_json or self.folder / "metrics.jsonl"

    @property
    def rate_schedule(self) -> str:
        """Name of the learning rate's schedule, the optimizer's own by default."""
        is_free = parse_optimizer(self.optimizer)[0] == "schedule_free"
        return self.learning_rate_schedule or ("constant" if is_free else "cosine")

    @property
    def validates_average(self) -> bool:
        """True if the run validates with the average of its parameters."""
        keeps = keeps_average(self.optimizer, self.ema_decay)
        return keeps and self.validate_with != "trained"

    def values(self) -> dict[str, Any]:
        """Return the plain value of every option."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their default."""
        default = RunConfig().values()
        return {
            name: value
            for name, value in self.values().items()
            if value != default[name]
        }


@functools.cache
def _choices(name: str) -> tuple[Any, ...]:
    """Return the values that the type of an option lists."""
    choices: tuple[Any, ...] = ()
    hint = get_type_hints(RunConfig)[name]
    for kind in get_args(hint) if get_origin(hint) is not Literal else (hint,):
        if kind is bool:
            choices += (True, False)
        else:
            choices += (None,) if kind is type(None) else get_args(kind)
    return choices


START_OPTIONS = (
    *("out", "resume", "stop_after", "profile", "callback"),
    *("coordinator", "num_processes", "process_id", "start_timeout", "heartbeat"),
)
"""Names of the options of one start, which config.toml does not keep."""

OPTIONS = tuple(one.name for one in fields(RunConfig))
"""Names of all options; the command line writes `-` for `_`."""


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [str(path) for path in value]
    return value
