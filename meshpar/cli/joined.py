"""A command that several processes run together, of which the first one prints."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from meshpar.cli.parsing import (
    add_counts,
    import_function,
    one_line,
    positive,
    print_error,
)
from meshpar.distributed import Processes, exit_status, find_place, leave, start
from meshpar.distributed.cluster import is_kubernetes_pod
from meshpar.errors import InputError
from meshpar.machine.emulate import emulate

_REFUSE = "meshpar.recipes.joined:refuse_different"
"""What compares options: looked up when several processes run."""

_OWN = ("run", "parser", "process_id")
"""Of what is parsed, that which differs from process to process, or is no option."""


def add_joined_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options by which processes find one another."""
    add = parser.add_argument
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, to join processes by hand with the next two (default: as "
        "SLURM, Open MPI, a TPU pod or, with --emulate, Kubernetes says)",
    )
    started = "how many are started (default: likewise)"
    add_counts(parser, {"--num-processes": started})
    add(
        "--process-id",
        type=int,
        metavar="I",
        help="which this is, from 0 (default: likewise)",
    )
    add(
        "--start-timeout",
        type=positive,
        default=50,
        metavar="S",
        help="seconds in which all have to come (default: %(default)s)",
    )


def num_processes_of(args: argparse.Namespace) -> int | None:
    """How many processes the options or the scheduler speak of.

    None in a pod of Kubernetes, where it is known once all have been joined.
    """
    if args.num_processes is not None:
        return args.num_processes
    place = find_place()
    if place is None and is_kubernetes_pod():
        return None
    return 1 if place is None else place.num_processes


def run_joined(
    args: argparse.Namespace, devices: int, run: Callable[[Processes], int]
) -> int:
    """Runs a command in the processes of its job, once all have come.

    Args:
        args: Its options, which all must have alike.
        devices: Virtual CPU devices of each; 0 for the machine's own.
        run: Does it; a process that fails ends the others.

    Returns:
        The exit status.

    Raises:
        InputError: Of the only process; of several, each says so and ends.
    """
    alone = num_processes_of(args) == 1
    told = contextlib.nullcontext() if alone else _only_ours_on_stdout()
    try:
        with (
            told,
            start(
                coordinator=args.coordinator,
                num_processes=args.num_processes,
                process_id=args.process_id,
                emulate=devices or None,
                job=os.environ.get("SLURM_JOB_ID", ""),
                timeout_s=args.start_timeout,
            ) as processes,
        ):
            alone = processes.num_processes == 1
            if not alone:
                _refuse_different(args, processes)
            elif devices:
                emulate(devices)
            return run(processes)
    except (InputError, OSError) as error:
        if alone:
            raise
        print(f"meshpar {args.subcommand}: {one_line(error)}", file=sys.stderr)
        print_error(error, as_json=args.json and _is_first(args))
        return leave(exit_status(error))


def _is_first(args: argparse.Namespace) -> bool:
    """Return whether this is process 0; True in every pod, which does not know."""
    by_hand = (args.coordinator, args.num_processes, args.process_id)
    if any(one is not None for one in by_hand):
        return not args.process_id
    place = find_place()
    return place is None or place.process_id == 0


@contextlib.contextmanager
def _only_ours_on_stdout() -> Iterator[None]:
    """What gloo prints of its connections goes to stderr, where it breaks no JSON."""
    with os.fdopen(os.dup(1), "w") as ours, contextlib.redirect_stdout(ours):
        os.dup2(2, 1)
        try:
            yield
        finally:
            ours.flush()
            os.dup2(ours.fileno(), 1)


def _refuse_different(args: argparse.Namespace, processes: Processes) -> None:
    known: dict[str, Any] = {
        name: value for name, value in vars(args).items() if name not in _OWN
    }
    import_function(_REFUSE, "joined")(processes.gather(known))
