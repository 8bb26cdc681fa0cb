"""Checks of a schedule: lost work, misplaced stages, deadlocks, other sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshpar.errors import InputError
from meshpar.schedules.base import Action, Op, Schedule

_MOST_NAMED = 8


class ScheduleError(InputError):
    """The orders are no schedule: work lost or doubled, misplaced, or a deadlock."""


def check_schedule(schedule: Schedule, *, max_in_flight: int | None = None) -> None:
    """Check that every rank can run the schedule to its end.

    Args:
        schedule: What to check.
        max_in_flight: Microbatches that a rank's buffers hold, if limited.

    Raises:
        ScheduleError: All that is wrong, one finding a line; its key is the first's.
    """
    found = _findings(schedule, max_in_flight)
    if found:
        raise ScheduleError("\n".join(map(str, found)), key=found[0].key)


def problems(schedule: Schedule, *, max_in_flight: int | None = None) -> list[str]:
    """Return every finding of `check_schedule`; none if the schedule is right."""
    return [str(found) for found in _findings(schedule, max_in_flight)]


def _findings(schedule: Schedule, max_in_flight: int | None) -> list[ScheduleError]:
    found = [
        *_wrong_work(schedule),
        *_misplaced_stages(schedule),
        *_deadlock(schedule),
    ]
    if max_in_flight is not None:
        found.extend(_overfull(schedule, max_in_flight))
    return found


def check_size(
    schedule: Schedule,
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
) -> None:
    """Check the sizes that a schedule was made for; None accepts any.

    Raises:
        InputError: One differs.
    """
    sizes = (
        ("stages", schedule.num_ranks, num_ranks),
        ("chunks", schedule.num_chunks, chunks),
        ("microbatches", schedule.num_microbatches, num_microbatches),
    )
    for name, found, asked in sizes:
        if asked is not None and asked != found:
            raise InputError(
                f"schedule {schedule.name!r} has {name}={found}, but {name}={asked} "
                f"was asked for; ask for {found}, or give a schedule that has {asked}",
                key="schedule.wrong_size",
            )


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most stage inputs that each rank keeps, run in its own order.

    One is kept from its forward F until its B (or W) is done.
    """
    return tuple(
        max((held for _, held in _held(order)), default=0) for order in schedule.orders
    )


def _held(order: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Yield each action with the number of forwards kept while it runs."""
    held = 0
    for action in order:
        held += action.op is Op.F
        yield action, held
        held -= action.op in (Op.B, Op.W)


def _wrong_work(schedule: Schedule) -> Iterator[ScheduleError]:
    counts = Counter(action for order in schedule.orders for action in order)
    work = [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
    known = set(work)
    unknown = [a for a in counts if (a.stage, a.microbatch) not in known]
    missing = [a for pair in work for a in _missing(counts, *pair)]
    doubled = [a for a, count in counts.items() if count > 1]
    both = [
        a
        for a in counts
        if a.op is Op.B
        and (a._replace(op=Op.I) in counts or a._replace(op=Op.W) in counts)
    ]
    yield from _finding("missing work", missing, "missing_work")
    yield from _finding("doubled work", doubled, "doubled_work")
    yield from _finding("doubled work, as B and as I or W", both, "doubled_backward")
    sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
    yield from _finding(f"work that {sizes} do not have", unknown, "unknown_work")


def _missing(counts: Counter[Action], stage: int, microbatch: int) -> list[Action]:
    forward, backward, split, weights = (
        Action(stage, op, microbatch) for op in (Op.F, Op.B, Op.I, Op.W)
    )
    needed = [forward]
    is_split = split in counts or weights in counts
    needed.extend((split, weights) if is_split else (backward,))
    return [
        action
        for action in needed
        if action not in counts and (action == forward or backward not in counts)
    ]


def _finding(
    what: str, actions: Sequence[Action], fault: str
) -> Iterator[ScheduleError]:
    if actions:
        named = ", ".join(map(str, actions[:_MOST_NAMED]))
        more = len(actions) - _MOST_NAMED
        text = f"{what}: {named}" + (f" and {more} more" if more > 0 else "")
        yield ScheduleError(text, key=f"schedule.{fault}")


def _misplaced_stages(schedule: Schedule) -> Iterator[ScheduleError]:
    for rank, order in enumerate(schedule.orders):
        for stage in sorted({action.stage for action in order}):
            home = schedule.rank_of_stage[stage]
            if home != rank:
                yield ScheduleError(
                    f"misplaced stage: stage {stage} is on rank {home} and on rank "
                    f"{rank}; its parameters are on one",
                    key="schedule.misplaced_stage",
                )
    chunks = schedule.num_chunks
    for rank, stages in enumerate(schedule.stages_of_rank):
        if len(stages) > chunks:
            named = ", ".join(map(str, stages))
            yield ScheduleError(
                f"misplaced stage: rank {rank} has stages {named}, more than the "
                f"{chunks} of {schedule.num_stages} stages over {schedule.num_ranks} "
                "ranks",
                key="schedule.too_many_stages",
            )


def _deadlock(schedule: Schedule) -> Iterator[ScheduleError]:
    """Run the orders tick by tick; name who waits for what where all ranks stop."""
    done: set[Action] = set()
    positions = [0] * schedule.num_ranks
    lengths = [len(order) for order in schedule.orders]
    tick = 0
    while positions != lengths:
        ready = [
            _ready(schedule, order[position : position + 2], done)
            for order, position in zip(schedule.orders, positions, strict=True)
        ]
        if not any(ready):
            yield ScheduleError(
                f"deadlock at tick {tick}:{_waiting(schedule, positions, done)}",
                key="schedule.deadlock",
            )
            return
        for rank, actions in enumerate(ready):
            positions[rank] += len(actions)
            done.update(actions)
        tick += 1


def _ready(
    schedule: Schedule, next_two: Sequence[Action], done: set[Action]
) -> list[Action]:
    """Return a rank's work in one tick: one action, or a forward and then a backward.

    The backward may read the forward of the same tick.
    """
    actions: list[Action] = []
    for action in next_two:
        one_of_each = not actions or (actions[0].op is Op.F) > (action.op is Op.F)
        if not one_of_each or any(
            source not in done and source not in actions
            for source in schedule.inputs(action)
        ):
            break
        actions.append(action)
    return actions


def _waiting(schedule: Schedule, positions: list[int], done: set[Action]) -> str:
    lines = []
    for rank, order in enumerate(schedule.orders):
        if positions[rank] == len(order):
            continue
        wanted = order[positions[rank]]
        lacking = [str(a) for a in schedule.inputs(wanted) if a not in done]
        lines.append(
            f"\n  rank {rank} wants {wanted}, which needs {', '.join(lacking)}"
        )
    return "".join(lines)


def _overfull(schedule: Schedule, max_in_flight: int) -> Iterator[ScheduleError]:
    for rank, order in enumerate(schedule.orders):
        for action, held in _held(order):
            if held > max_in_flight:
                yield ScheduleError(
                    f"over-full buffers: rank {rank} holds {held} microbatches at "
                    f"{action}, but has room for {max_in_flight}",
                    key="schedule.overfull_buffers",
                )
                break
