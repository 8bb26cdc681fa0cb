"""Simulate, check and draw one pipeline schedule."""

from __future__ import annotations

import argparse
import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

from meshpar.cli.options import add_counts, add_values
from meshpar.cli.parsing import PAGES, PICTURES, check_picture, output_file
from meshpar.errors import InputError, local_path
from meshpar.schedules import (
    SCHEDULES,
    Schedule,
    StageTimes,
    Timeline,
    WeightVersions,
    check_size,
    idle_fraction,
    lock_step_span_s,
    make_schedule,
    peak_in_flight,
    problems,
    read_csv,
    simulate,
    tick_table,
)
from meshpar.schedules.render import ascii_timeline, summary, trace_events
from meshpar.schedules.simulate import Memory

_PIPE_COLUMNS = 160
_LONGEST_MS = 10**9

_MOST_FORWARDS, _MOST_PLACES = 100_000, 1_000_000
"""Limits. So many forwards take 35 s to simulate; places are the ticks of all ranks."""

EXAMPLE = "meshpar schedule --schedule 1f1b --stages 4 --microbatches 8"
STATUSES = "0 done, 1 the schedule is wrong, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--schedule",
        required=True,
        metavar="NAME|FILE.csv",
        help=f"{', '.join(SCHEDULES)}, or a file with one row per rank, such as "
        "0F0,0F1,0B0,0B1 (required)",
    )
    add_counts(
        parser,
        {
            "--stages": "size of the stage mesh axis: number of ranks (default: the "
            "file's)",
            "--microbatches": "microbatches per step (default: the file's)",
            "--chunks": "stages per rank (default: the schedule's, or 1)",
            "--max-pending-w": "most weight gradients that wait on a rank (default: no "
            "limit)",
            "--max-in-flight": "most microbatches in a rank's buffers (default: no "
            "limit)",
        },
    )
    each = (
        ", divided evenly over its chunks; 3/3/4 sets one per rank, or one per stage "
        "of all chunks (default: 1)"
    )
    times = {
        "--forward-ms MS": f"time of a rank's forward of one microbatch{each}",
        "--input-grad-ms MS": f"time of its backward for the input{each}",
        "--weight-grad-ms MS": f"time of its backward for the weights{each}",
    }
    add_values(parser, _times, times, default=(Fraction(1),))
    hop = {"--hop-ms MS": "latency between two ranks (default: 0)"}
    add_values(parser, _time, hop, default=Fraction(0))
    memory = {
        "--activation-mb MB": "what a rank's forwards of one microbatch keep, to plot "
        "memory (default: microbatches in flight are plotted)",
        "--stash SHARE": "share of it that input gradients leave for weight gradients "
        "(default: 1)",
    }
    add_values(parser, _share, memory)
    parser.add_argument(
        "--compare",
        metavar="NAME|FILE.csv",
        help="another schedule of the same sizes and times; a page plots it below on "
        "the same time axis (default: none)",
    )
    files = {
        "--plot FILE": "draw the timeline as .svg, .png or .html (default: text only; "
        "needs meshpar[plots])",
        "--trace FILE": "write a Perfetto trace (JSON)",
    }
    add_values(parser, output_file, files)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the timeline; return 1 if the schedule is wrong."""
    if args.plot:
        check_picture("--plot", args.plot, {**PICTURES, **PAGES})
    memory = _memory(args)
    schedules = [_checked_schedule(args)]
    if args.compare is not None:
        schedules.append(_compared_schedule(args, schedules[0]))
    for schedule in schedules:
        found = problems(schedule, max_in_flight=args.max_in_flight)
        if found:
            report = {**_sizes(schedule), "problems": found}
            print(json.dumps(report) if args.json else "\n".join(found))
            return 1
    of_each = [_simulated(schedule, args, memory) for schedule in schedules]
    _write_files([timeline for timeline, _ in of_each], args, memory)
    _, report = of_each[0]
    for _, other in of_each[1:]:
        report["compare"] = other
    texts = (_text(timeline, report) for timeline, report in of_each)
    print(json.dumps(report) if args.json else "\n\n".join(texts))
    return 0


def _simulated(
    schedule: Schedule, args: argparse.Namespace, memory: Memory | None
) -> tuple[Timeline, dict[str, Any]]:
    """Return the timeline of a schedule, and what is reported of it."""
    times = StageTimes(
        forward_s=_stage_s(schedule, "--forward-ms", args.forward_ms),
        input_grad_s=_stage_s(schedule, "--input-grad-ms", args.input_grad_ms),
        weight_grad_s=_stage_s(schedule, "--weight-grad-ms", args.weight_grad_ms),
    )
    hop_s = args.hop_ms / 1000
    timeline = simulate(schedule, times, hop_s=hop_s)
    report = _report(timeline, _lock_step(timeline, times, hop_s))
    if memory is not None:
        report["peak_memory_bytes"] = [
            round(peak_mb * 1e6) for peak_mb in memory.peak_mb(timeline)
        ]
    return timeline, report


def _memory(args: argparse.Namespace) -> Memory | None:
    if args.activation_mb is not None:
        stash = Fraction(1) if args.stash is None else args.stash
        return Memory(float(args.activation_mb), float(stash))
    if args.stash is not None:
        raise InputError(
            f"--stash {float(args.stash):g} is a share of --activation-mb, which is "
            "not given; give both, or neither",
            key="schedule.stash_of_nothing",
        )
    return None


def _compared_schedule(args: argparse.Namespace, like: Schedule) -> Schedule:
    """Return the schedule of `--compare`, of the ranks and microbatches of another."""
    method = SCHEDULES.get(args.compare)
    splits = method is None or method.splits_backward
    limit = args.max_pending_w if splits else None
    given = {"schedule": args.compare, "chunks": None, "max_pending_w": limit}
    sizes = {"stages": like.num_ranks, "microbatches": like.num_microbatches}
    return _checked_schedule(argparse.Namespace(**{**vars(args), **given, **sizes}))


def _checked_schedule(args: argparse.Namespace) -> Schedule:
    if args.schedule.endswith(".csv"):
        schedule = read_csv(args.schedule)
        check_size(
            schedule,
            num_ranks=args.stages,
            num_microbatches=args.microbatches,
            chunks=args.chunks,
        )
        limit = args.max_pending_w
        return schedule.with_most_pending(limit) if limit else schedule
    if args.stages is None or args.microbatches is None:
        raise InputError(
            f"--schedule {args.schedule} needs sizes: give --stages N and "
            "--microbatches N",
            key="schedule.no_size",
        )
    actions = args.stages * args.microbatches * (args.chunks or 1)
    if actions > _MOST_FORWARDS:
        raise InputError(
            f"--stages {args.stages} of --microbatches {args.microbatches} are "
            f"{actions} forwards; give at most {_MOST_FORWARDS}",
            key="schedule.too_large",
        )
    places = 2 * args.stages * (args.stages + args.microbatches) * (args.chunks or 1)
    if places > _MOST_PLACES:
        raise InputError(
            f"--stages {args.stages} of --microbatches {args.microbatches} are "
            f"{places} places in a timeline; give at most {_MOST_PLACES}",
            key="schedule.too_large",
        )
    return make_schedule(
        args.schedule,
        args.stages,
        args.microbatches,
        args.chunks,
        max_pending_w=args.max_pending_w or 0,
    )


def _stage_s(
    schedule: Schedule, option: str, times_ms: tuple[Fraction, ...]
) -> tuple[Any, ...]:
    """Return exact seconds of every stage, from one time, one a rank or one a stage."""
    num_ranks, num_stages = schedule.num_ranks, schedule.num_stages
    if len(times_ms) == num_stages:
        return tuple(time_ms / 1000 for time_ms in times_ms)
    if len(times_ms) not in (1, num_ranks):
        raise InputError(
            f"{option} has {len(times_ms)} times for {num_ranks} ranks and "
            f"{num_stages} stages; give 1, {num_ranks} or {num_stages}",
            key="schedule.wrong_number_of_times",
        )
    rank_ms = times_ms * num_ranks if len(times_ms) == 1 else times_ms
    return tuple(
        rank_ms[schedule.rank_of_stage[stage]] / schedule.num_chunks / 1000
        for stage in range(num_stages)
    )


def _report(timeline: Timeline, lock_step: dict[str, Any]) -> dict[str, Any]:
    return {
        **_sizes(timeline.schedule),
        "bubble_fraction": timeline.bubble_fraction,
        "span_s": float(timeline.span_s),
        "peak_in_flight": list(peak_in_flight(timeline.schedule)),
        "execution": "asynchronous",
        "ticks": lock_step["ticks"],
        "lock_step": lock_step,
        **_weight_versions(timeline.schedule),
    }


def _weight_versions(schedule: Schedule) -> dict[str, list[int]]:
    """Return how many versions of its weights each rank keeps, if it has several."""
    method = SCHEDULES.get(schedule.name)
    if method is None or not method.updates_each_microbatch:
        return {}
    versions = WeightVersions(schedule, tick_table(schedule, divergent=True))
    return {"weight_versions": list(versions.kept)}


def _lock_step(timeline: Timeline, times: StageTimes, hop_s: Any) -> dict[str, Any]:
    """Return the report's values if all ranks move together (uniform execution)."""
    schedule = timeline.schedule
    table = tick_table(schedule)
    span_s = lock_step_span_s(schedule, table, times, hop_s=hop_s)
    work_s = timeline.all_ranks_work_s
    return {
        "ticks": table.num_ticks,
        "forward_ticks": table.num_forward_ticks,
        "backward_ticks": table.num_backward_ticks,
        "bubble_fraction": idle_fraction(span_s, work_s, schedule.num_ranks),
        "span_s": float(span_s),
        "peak_in_flight": list(table.peak_in_flight),
    }


def _sizes(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "orders": [list(map(str, order)) for order in schedule.orders],
    }


def _text(timeline: Timeline, report: dict[str, Any]) -> str:
    columns = shutil.get_terminal_size((_PIPE_COLUMNS, 0)).columns
    lock_step = report["lock_step"]
    lines: tuple[str, ...] = (
        summary(timeline),
        ascii_timeline(timeline, max_width=columns),
        f"in flight a rank: {_numbers(report['peak_in_flight'])}",
        f"in lock step: {lock_step['ticks']} ticks ({lock_step['forward_ticks']} "
        f"with forwards, {lock_step['backward_ticks']} with backwards), span "
        f"{lock_step['span_s'] * 1e3:g} ms, bubble "
        f"{lock_step['bubble_fraction']:.2%}",
        f"in flight a rank in lock step: {_numbers(lock_step['peak_in_flight'])}",
    )
    if "peak_memory_bytes" in report:
        peaks = (f"{peak / 1e6:g}" for peak in report["peak_memory_bytes"])
        lines += (f"memory a rank: {' '.join(peaks)} MB",)
    if "weight_versions" in report:
        lines += (
            "an update after every backward, which changes what is trained; versions "
            f"of weights a rank: {_numbers(report['weight_versions'])}",
        )
    return "\n".join(lines)


def _numbers(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _write_files(
    timelines: list[Timeline], args: argparse.Namespace, memory: Memory | None
) -> None:
    timeline = timelines[0]
    if args.plot and Path(args.plot).suffix in PAGES:
        from meshpar.cli.report.timeline import timeline_page

        local_path("--plot", args.plot).write_text(
            timeline_page(*timelines, memory=memory), encoding="utf-8"
        )
    elif args.plot:
        from meshpar.cli.report.timeline import write_timeline_picture

        write_timeline_picture(timeline, args.plot, memory)
    if args.trace:
        local_path("--trace", args.trace).write_text(
            json.dumps(trace_events(timeline)), encoding="utf-8"
        )


def _share(text: str) -> Fraction:
    """Return a number of 0 or more."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(-1)
    if not 0 <= number <= _LONGEST_MS:
        problem = InputError(
            f"{text!r} must be a number, 0 or more and at most {_LONGEST_MS}",
            key="value.out_of_range",
        )
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return number


def _times(text: str) -> tuple[Fraction, ...]:
    return tuple(map(_time, text.split("/")))


def _time(text: str) -> Fraction:
    """Return milliseconds as an exact number, so that closed forms come out exactly."""
    try:
        time_ms = Fraction(text)
    except ValueError:
        time_ms = Fraction(-1)
    if not 0 <= time_ms <= _LONGEST_MS or "/" in text:
        problem = InputError(
            f"{text!r} must be milliseconds, 0 or more and at most {_LONGEST_MS}",
            key="value.out_of_range",
        )
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return time_ms
