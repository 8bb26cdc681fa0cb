"""`meshpar plan --curve`: how far a model scales on a machine, and why no further."""

from __future__ import annotations

import argparse
import json
import sys

from meshpar.cli.parsing import given_options
from meshpar.cli.plan_training import OF_TRAINING
from meshpar.cli.report.destination import PICTURES, check_picture, output_file
from meshpar.errors import InputError, local_path
from meshpar.planner.curve import BATCHES, bend_in_words, curve_in_words, scaling_curve
from meshpar.planner.plan import PlanRequest
from meshpar.planner.search.search import Request

_OF_PLANS = ("measure", "confirm", "plans", *OF_TRAINING)


def add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add(
        "--curve",
        nargs="?",
        choices=BATCHES,
        const=BATCHES[0],
        help="instead: the efficiency of the fastest plan on the devices, on half of "
        "them, and so on, where it bends and why; strong keeps the batch, weak as many "
        "examples a device (default: no curve; strong where no word follows)",
    )
    add(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="with --curve: draw it into a .png or .svg (needs meshpar[plots])",
    )


def check_curve(args: argparse.Namespace) -> None:
    """Refuses options that do not go together.

    Raises:
        InputError: An option of plans with `--curve`, or `--plot` without it.
    """
    if args.curve is None:
        if args.plot is not None:
            raise InputError(
                "--plot draws a curve; give --curve too, or --html",
                key="command.plot_without_curve",
            )
        return
    for option in given_options(args, _OF_PLANS):
        raise InputError(
            f"{option} is of plans, which --curve does not list; leave one out",
            key="command.option_with_curve",
        )
    if args.plot is not None:
        check_picture("--plot", args.plot, PICTURES)


def run_curve(args: argparse.Namespace, request: Request | PlanRequest) -> int:
    """Prints the curve; 0 if anything fits, 1 if nothing does."""
    name = request.workload.name if isinstance(request, Request) else request.name
    curve = scaling_curve(request, args.curve)
    text = "\n".join(curve_in_words(curve))
    found = json.dumps({"curve": curve.as_json()}) if args.json else text
    if not args.json or not curve.fitting:
        print(found)
    if not curve.fitting:
        none = f"meshpar plan: {bend_in_words(curve)}; give more --devices"
        print(none, file=sys.stderr)
        return 1
    if args.html:
        from meshpar.cli.report.curve_plot import curve_page

        page = curve_page(name, curve)
        local_path("--html", args.html).write_text(page, encoding="utf-8")
    if args.plot:
        from meshpar.cli.report.curve_plot import write_curve_picture

        write_curve_picture(name, curve, args.plot)
    if args.json:  # last: an error is the one object
        print(found)
    return 0
