"""Options of `meshpar plan` about the whole training: its time, money and failures."""

from __future__ import annotations

import argparse

from meshpar.cli.parsing import above_zero, given_options
from meshpar.errors import InputError
from meshpar.planner.search.training_cost import RESTART_S, Training

_HOUR_S = 3600.0
_NEED_FAILURES = ("checkpoint_s", "restart_s")
_NEED_TOKENS = ("price", "mtbf", *_NEED_FAILURES)
OF_TRAINING = ("tokens", *_NEED_TOKENS)
"""Names of these options."""


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
    if args.tokens is None:
        for option in given_options(args, _NEED_TOKENS):
            raise InputError(
                f"{option} is of a whole training; give --tokens N",
                key="command.option_without_tokens",
            )
        return None
    if args.mtbf is None:
        for option in given_options(args, _NEED_FAILURES):
            raise InputError(
                f"{option} matters where devices fail; give --mtbf",
                key="command.option_without_failures",
            )
    return Training(
        tokens=args.tokens,
        price=args.price,
        mtbf_s=None if args.mtbf is None else args.mtbf * _HOUR_S,
        checkpoint_s=args.checkpoint_s,
        restart_s=args.restart_s or RESTART_S,
    )
