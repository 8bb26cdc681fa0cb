"""Options of `meshpar plan` about the whole training: its time, money and failures."""

from __future__ import annotations

import argparse

from meshpar.cli.parsing import above_zero
from meshpar.errors import InputError
from meshpar.planner.search.training_cost import RESTART_S, Training

_HOUR_S = 3600.0
_NEED_TOKENS = ("price", "mtbf", "checkpoint_s", "restart_s")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add(
        "--tokens",
        type=above_zero,
        metavar="N",
        help="tokens of the whole training, such as 15e12: prints the time and device "
        "hours that every plan takes (default: no training is counted)",
    )
    add(
        "--price",
        type=above_zero,
        metavar="P",
        help="of a device for an hour: prints what the training costs (default: none)",
    )
    add(
        "--mtbf",
        type=above_zero,
        metavar="HOURS",
        help="mean time between failures of the whole machine: prints the best time "
        "between checkpoints, and counts what failures cost (default: no failures)",
    )
    add(
        "--checkpoint-s",
        type=above_zero,
        metavar="S",
        help="time that a checkpoint stops the training (default: that of copying a "
        "device's state to its host)",
    )
    add(
        "--restart-s",
        type=above_zero,
        metavar="S",
        help=f"from a failure to the next step (default: {RESTART_S:g})",
    )


def training_of(args: argparse.Namespace) -> Training | None:
    """The training of the options; None where no tokens are given.

    Raises:
        InputError: What depends on `--tokens` or `--mtbf` is given without it.
    """
    given = [name for name in _NEED_TOKENS if getattr(args, name) is not None]
    if args.tokens is None and given:
        raise InputError(f"{_option(given[0])} is of a whole training; give --tokens N")
    for name in ("checkpoint_s", "restart_s"):
        if name in given and args.mtbf is None:
            raise InputError(f"{_option(name)} matters where devices fail; give --mtbf")
    if args.tokens is None:
        return None
    return Training(
        tokens=args.tokens,
        price=args.price,
        mtbf_s=None if args.mtbf is None else args.mtbf * _HOUR_S,
        checkpoint_s=args.checkpoint_s,
        restart_s=args.restart_s or RESTART_S,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
