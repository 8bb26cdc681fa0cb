"""Options of a run that do not go together, by their values alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.data.sources import DataSource
from meshpar.errors import InputError

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
