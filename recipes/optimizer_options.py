"""Optimizers of a run by name: the options of each, and how they are written."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from meshpar.errors import InputError, key_values, nearest

DECAY_MASKS = ("matrices", "all")
"""Parameters that weight decay applies to: matrices alone, or every parameter."""

FIRST_DEFAULT = "adamw,decay_mask=all"
"""Optimizer of the runs of version 0.2 and before, which had no option for it."""

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": dict(
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        decay_mask="matrices",
        nesterov=False,
    ),
    "lion": dict(beta1=0.9, beta2=0.99, weight_decay=0.1, decay_mask="matrices"),
    "adafactor": dict(
        momentum=0.0,
        decay_rate=0.8,
        clipping_threshold=1.0,
        min_dim_size_to_factor=128,
        weight_decay=0.0,
        decay_mask="matrices",
    ),
    "muon": dict(
        momentum=0.95,
        nesterov=True,
        ns_steps=5,
        rms=0.2,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        decay_mask="matrices",
    ),
    "sgd": dict(momentum=0.9, nesterov=False, weight_decay=0.0, decay_mask="matrices"),
    "schedule_free": dict(
        beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decay_mask="matrices"
    ),
}
"""Name of an optimizer -> its options and their defaults.

Muon's `beta1`, `beta2` and `epsilon` are of Adam, which updates what is no matrix.
"""

_SHOWN = 40
"""Characters of a wrong value that its error quotes."""

_BELOW_ONE = ("beta1", "beta2", "momentum", "decay_rate")
_WORDS = {"true": True, "false": False}


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of an optimizer and the value of each of its options.

    Raises:
        InputError: The optimizer, an option or a value is unknown or invalid.

    Example:
        >>> parse_optimizer("lion,beta2=0.98")
        ('lion', {'beta1': 0.9, 'beta2': 0.98, 'weight_decay': 0.1, \
'decay_mask': 'matrices'})
    """
    word, _, rest = str(text).partition(",")
    name = word.strip().replace("-", "_")
    if name not in OPTIMIZERS:
        raise InputError(
            f"optimizer={reprlib.repr(text)}: there is no optimizer "
            f"{reprlib.repr(name)}; {nearest(name[:_SHOWN], OPTIMIZERS)}",
            key="run.unknown_optimizer",
        )
    defaults = OPTIMIZERS[name]
    given = {}
    if rest.strip():
        example = f"{name},weight_decay=0.05"
        given = key_values(rest, noun="optimizer", example=example)
    for option, value in given.items():
        if option not in defaults:
            raise _unknown_option(name, option, value)
    values = {
        option: _value(option, given[option], default) if option in given else default
        for option, default in defaults.items()
    }
    if name == "schedule_free" and not values["beta1"]:
        raise InputError(
            "optimizer option beta1=0.0: schedule_free divides by it, so it must be "
            "above 0 (default 0.9)",
            key="value.out_of_range",
        )
    return name, values


def _unknown_option(name: str, option: str, value: str) -> InputError:
    owners = [other for other, options in OPTIMIZERS.items() if option in options]
    known = ", ".join(f"{one}={it}" for one, it in OPTIMIZERS[name].items())
    whose = f" (an option of {', '.join(owners)})" if owners else ""
    given = f"{option[:_SHOWN]}={value[:_SHOWN]}"
    return InputError(
        f"optimizer {name!r} has no option {given}{whose}; leave it out, or take "
        f"another optimizer; options of {name} and their defaults: {known}",
        key="run.unknown_optimizer_option",
    )


def _value(option: str, text: str, default: Any) -> Any:
    """Return the value of an option, of the type that its default has."""
    if option == "decay_mask":
        wanted, is_right, value = " or ".join(DECAY_MASKS), text in DECAY_MASKS, text
    elif isinstance(default, bool):
        wanted, is_right, value = "true or false", text in _WORDS, _WORDS.get(text)
    elif isinstance(default, int):
        is_right = text.isdecimal() and len(text) < 10 and int(text) >= 1
        wanted, value = "a whole number of at least 1", int(text) if is_right else None
    else:
        value = _number(text)
        limit = 1.0 if option in _BELOW_ONE else math.inf
        wanted = "at least 0 and below 1" if limit == 1 else "at least 0 and finite"
        is_right = value is not None and 0 <= value < limit
    if not is_right:
        raise InputError(
            f"optimizer option {option}={text[:_SHOWN]}: must be {wanted} "
            f"(default {default})",
            key="value.out_of_range",
        )
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def keeps_average(text: str, ema_decay: float | None) -> bool:
    """Return True if an optimizer keeps an average of the parameters."""
    return ema_decay is not None or parse_optimizer(text)[0] == "schedule_free"


def state_parts(text: str, ema_decay: float | None) -> dict[str, Any]:
    """Return what the arrays of an optimizer's state depend on.

    A checkpoint can be resumed if these values are equal; all other options may change.

    Example:
        >>> state_parts("sgd,momentum=0", None)
        {'optimizer': 'sgd', 'momentum': False, 'ema': False}
    """
    name, options = parse_optimizer(text)
    has_momentum = bool(options.get("momentum", 0)) and name in ("sgd", "adafactor")
    return {
        "optimizer": name,
        "momentum": has_momentum,
        "ema": ema_decay is not None,
    }
