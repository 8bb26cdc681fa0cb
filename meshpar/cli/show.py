"""Draws one layout: machine, shards, traffic, memory and timeline in one page."""

from __future__ import annotations

import argparse
import json

from meshpar.cli.estimate import (
    add_layout_and_workload,
    cluster_for,
    estimated,
    workload_for,
)
from meshpar.cli.plan_other import is_other
from meshpar.cli.report.destination import PAGES, check_picture, output_file
from meshpar.errors import InputError, local_path
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate
from meshpar.train.layout_refusals import layout_errors

EXAMPLE = (
    "meshpar show --model llama3-8b --layout fsdp=4,stage=2,tensor=4,microbatches=8 "
    "--seq 4096 --html layout.html"
)
STATUSES = "0 done, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subcommand's options."""
    add_layout_and_workload(parser)
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="where the page goes, one file (default: no page; needs meshpar[plots])",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page, or prints its facts; 0 once that is done."""
    if args.html:
        check_picture("--html", args.html, PAGES)
    elif not args.json:
        raise InputError(
            "show draws a page; give --html FILE, or --json for its facts",
            key="command.no_output",
        )
    found = _estimate_of(args)
    import jax

    from meshpar.cli.confirm import chosen_model
    from meshpar.cli.report.laid_out import laid_out

    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    page = laid_out(chosen_model(args), found)
    if args.html:
        from meshpar.cli.report.show_page import show_page

        local_path("--html", args.html).write_text(show_page(page), encoding="utf-8")
    if args.json:
        print(json.dumps(page.as_json()))
    else:
        where = found.run.cluster.text
        print(f"{args.html}: {found.run.workload.name} on {where}")
    return 0


def _estimate_of(args: argparse.Namespace) -> Estimate:
    """The planner's estimate of what a page is drawn of.

    Raises:
        InputError: It cannot be, or no training step lays it out.
    """
    if is_other(args):
        name = args.preset or args.model
        raise InputError(
            f"show draws transformers, which {name} is not; meshpar estimate says what "
            "a layout of volumes or tables takes, meshpar audit what it sends",
            key="command.only_transformers",
        )
    layout = Layout.parse(args.layout)
    cluster = cluster_for(args, layout)
    for error in layout_errors(layout.resolve(cluster.num_devices)).values():
        raise error
    return estimated(args, workload_for(args), layout, cluster)
