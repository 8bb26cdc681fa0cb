"""Draw one layout on one page: machine, shards, traffic, memory and timeline."""

from __future__ import annotations

import argparse
import json

from meshpar.cli.estimate import estimated
from meshpar.cli.options import (
    add_layout_and_workload,
    chosen_cluster,
    chosen_workload,
    planned_model,
)
from meshpar.cli.parsing import PAGES, check_picture, output_file
from meshpar.cli.plan_options import is_other
from meshpar.errors import InputError, local_path
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate

EXAMPLE = (
    "meshpar show --model llama3-8b --layout fsdp=4,stage=2,tensor=4,microbatches=8 "
    "--seq 4096 --html layout.html"
)
STATUSES = "0 done, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_layout_and_workload(parser)
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="write the page, one file (default: no page; needs meshpar[plots])",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, or print its facts; return 0."""
    if args.html:
        check_picture("--html", args.html, PAGES)
    elif not args.json:
        raise InputError(
            "show draws a page; give --html FILE, or --json for its facts",
            key="command.no_output",
        )
    estimate = _checked_estimate(args)
    import jax

    from meshpar.cli.report.laid_out import laid_out

    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    page = laid_out(planned_model(args), estimate)
    if args.html:
        from meshpar.cli.report.show_page import show_page

        local_path("--html", args.html).write_text(show_page(page), encoding="utf-8")
    if args.json:
        print(json.dumps(page.as_json()))
    else:
        run = estimate.run
        print(f"{args.html}: {run.workload.name} on {run.cluster.text}")
    return 0


def _checked_estimate(args: argparse.Namespace) -> Estimate:
    """Return the planner's estimate of the layout to draw.

    Raises:
        InputError: The model or layout cannot be drawn.
    """
    if is_other(args):
        name = args.preset or args.model
        raise InputError(
            f"show draws transformers, which {name} is not; meshpar estimate says what "
            "a layout of volumes or tables takes, meshpar audit what it sends",
            key="command.only_transformers",
        )
    layout = Layout.parse(args.layout)
    cluster = chosen_cluster(args, layout)
    return estimated(args, chosen_workload(args), layout, cluster)
