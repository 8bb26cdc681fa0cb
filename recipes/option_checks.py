"""Check that the options of a run fit together, by their values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from meshpar.data.sources import DataSource
from meshpar.errors import InputError
from meshpar.recipes.optimizer_options import keeps_average, parse_optimizer

RATE_SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""Names of learning rate schedules."""

DATA_OPTIONS = ("data", "validation_data", "tokenizer", "eos", "pack", "data_cache")
"""Options that are none of a run on `text`."""


def check_texts(values: Mapping[str, Any]) -> None:
    """Refuses names that the run's `config.toml` cannot hold.

    Args:
        values: Of every option, plain.

    Raises:
        InputError: One is no UTF-8.
    """
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{name}={text!r}: character {error.start} is a byte that is no "
                    "UTF-8, and config.toml could not name it; rename the file",
                    key="run.option_not_utf8",
                ) from error


def check_data(values: Mapping[str, Any]) -> None:
    """Refuses options of data without data, or that would have no effect.

    Args:
        values: Of `text` and `DATA_OPTIONS`.

    Raises:
        InputError: There is one.
    """
    text, data, held_out = (values[name] for name in ("text", *DATA_OPTIONS[:2]))
    if text and data:
        raise InputError(
            f"text {str(text[0])!r} and data {data[0]!r} are both given; give one of "
            "them: data reads text files, too",
            key="run.text_and_data",
        )
    for name in DATA_OPTIONS[1:]:
        if values[name] and not data:
            raise InputError(
                f"{name}={values[name]} goes with data: give --data PATH",
                key="run.option_without_data",
            )
    for one in data:
        DataSource.parse(one)
    for one in held_out:
        if (weight := DataSource.parse(one).weight) is not None:
            raise InputError(
                f"weight={weight} of validation_data {one!r}: every row of all of it "
                "is looked at once; leave the weight out",
                key="data.weight_of_validation",
            )
    eos = values["eos"]
    if eos and not values["tokenizer"] and not eos.isdecimal():
        raise InputError(
            f"eos={eos!r}: without a tokenizer it is the number of a token, in files "
            "of tokens; give the number, or --tokenizer FILE",
            key="data.eos_not_number",
        )


def check_rollback(steps: int, save_every: int, keep: int, rollback_steps: int) -> None:
    """Refuses to keep fewer checkpoints than a rollback may have to go back by.

    With the newest of `save_every` just before the bad step, the oldest that is kept
    is `(keep - 1) * save_every` steps before it.

    Raises:
        InputError: That is less than `rollback_steps` ask for.

    Example:
        >>> check_rollback(100, save_every=5, keep=2, rollback_steps=6)
    """
    needed = 1 + -(-(rollback_steps - 1) // save_every)
    num_checkpoints = steps // save_every + 1  # And that of step 0.
    if keep < min(needed, num_checkpoints):
        raise InputError(
            f"rollback_steps={rollback_steps} with save_every={save_every} may need "
            f"{needed} checkpoints, but keep={keep}; give --keep {needed}, or "
            "--keep-every",
            key="run.too_few_checkpoints",
        )


def check_optimizer(values: Mapping[str, Any]) -> None:
    """Refuse options of the optimizer that contradict one another.

    Args:
        values: Plain value of every option.

    Raises:
        InputError: There are such, or a value is unknown or out of its range.
    """
    optimizer, decay = values["optimizer"], values["ema_decay"]
    name, _ = parse_optimizer(optimizer)
    for option, choices in (
        ("learning_rate_schedule", RATE_SCHEDULES),
        ("validate_with", ("average", "trained")),
    ):
        if values[option] not in (None, *choices):
            shown = reprlib.repr(values[option])
            raise InputError(
                f"{option}={shown}: must be one of {', '.join(choices)}",
                key=f"run.unknown_{option}",
            )
    _check_share("final_rate_ratio", values["final_rate_ratio"], "at most 1", most=1.0)
    _check_share("max_grad_norm", values["max_grad_norm"], "finite", most=None)
    if decay is not None:
        _check_share("ema_decay", decay, "below 1", most=None)
        if decay >= 1:
            raise _out_of_range("ema_decay", decay, "below 1")
    _check_rate_schedule(name, values)
    if decay is not None and name == "schedule_free":
        raise InputError(
            f"ema_decay={decay} with optimizer={optimizer!r}: schedule_free keeps an "
            "average of the parameters already; leave ema_decay out",
            key="run.two_averages",
        )
    if values["validate_with"] == "average" and not keeps_average(optimizer, decay):
        raise InputError(
            f"validate_with='average', but optimizer={optimizer!r} without ema_decay "
            "keeps no average; give --ema-decay 0.999, or leave validate_with out",
            key="run.no_average",
        )


def _check_rate_schedule(name: str, values: Mapping[str, Any]) -> None:
    """Refuse options of the learning rate that its schedule has no place for."""
    kind, cooldown = values["learning_rate_schedule"], values["cooldown_steps"]
    if name == "schedule_free" and kind not in (None, "constant"):
        raise InputError(
            f"learning_rate_schedule={kind!r} with optimizer={values['optimizer']!r}: "
            "schedule_free averages instead of decaying its learning rate; leave the "
            "schedule out, or take adamw",
            key="run.schedule_of_schedule_free",
        )
    if cooldown is not None and kind != "wsd":
        raise InputError(
            f"cooldown_steps={cooldown} is an option of learning_rate_schedule='wsd', "
            f"which is {kind or 'cosine'!r} here; leave it out, or give "
            "--learning-rate-schedule wsd",
            key="run.cooldown_without_wsd",
        )
    steps = values["decay_steps"] or values["steps"]
    warmup = values["warmup_steps"]
    given = (warmup or 0) + (cooldown or 0)
    if (warmup or cooldown) and given > steps - (kind in (None, "cosine", "linear")):
        names = {"warmup_steps": warmup, "cooldown_steps": cooldown}
        told = " and ".join(f"{one}={it}" for one, it in names.items() if it)
        raise InputError(
            f"{told} of a schedule of {steps} steps: the learning rate would not "
            "decay; give fewer, or a larger --decay-steps",
            key="run.warmup_too_long",
        )


def _check_share(name: str, value: Any, limit: str, *, most: float | None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf and (most is None or value <= most)):
        raise _out_of_range(name, value, limit)


def _out_of_range(name: str, value: Any, limit: str) -> InputError:
    return InputError(
        f"{name}={value!r}: must be at least 0 and {limit}", key="value.out_of_range"
    )
