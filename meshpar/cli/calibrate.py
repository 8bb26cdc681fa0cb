"""Measure this machine's devices and links for estimate and plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from meshpar.cli.parsing import output_file, positive
from meshpar.errors import InputError, local_path
from meshpar.hardware.devices import DEVICES
from meshpar.planner.machine.clusters import device_of

EXAMPLE = "meshpar calibrate --output mine.toml"
STATUSES = "0 done, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "--output",
        type=output_file,
        metavar="FILE.toml",
        help="file to write, for --hardware FILE.toml (default: standard output)",
    )
    add(
        "--like",
        metavar="NAME",
        help="keep this device's data sheet and measure the achieved fractions: "
        f"{', '.join(DEVICES)} (default: the measured rates are the peaks)",
    )
    add("--name", help="name of the device (default: the file's name)")
    add(
        "--rounds",
        type=positive,
        default=5,
        metavar="N",
        help="repetitions of each measurement",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; return 0."""
    import jax  # the devices start with it

    from meshpar.calibration.measure import calibrate, device_toml

    output = None if args.output is None else local_path("--output", args.output)
    if output is not None and output.suffix != ".toml":
        raise InputError(
            f"--output {args.output}: must end in .toml, for --hardware",
            key="command.unknown_suffix",
        )
    like = None if args.like is None else device_of(args.like)
    name = args.name or (output.stem if output else "measured")
    found = calibrate(jax.devices(), name=name, rounds=args.rounds, like=like)
    text = device_toml(found)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if args.json:
        trials = [{"name": one, "seconds": s} for one, s, _ in found.rows]
        print(json.dumps({"device": asdict(found.device), "trials": trials}))
        return 0
    print(text, end="")
    return 0
