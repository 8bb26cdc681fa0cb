"""Search an order for given times under a memory limit, by list scheduling.

Ranks take what is ready: an input gradient first, else a forward, else a weight
gradient if the wait is long enough. What remains to choose are three numbers of
`Preferences`; every combination is replayed. The shortest span is kept, of these and
of ZB-H1 and ZB-H2 where they fit.

Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3, whose
heuristic also fills waits with weight gradients (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.method import Orders, ScheduleMethod
from meshpar.schedules.simulate import StageTimes, simulate
from meshpar.schedules.zero_bubble_h1 import zero_bubble_h1
from meshpar.schedules.zero_bubble_h2 import zero_bubble_h2

_TOLERANCE = 1e-9


class Preferences(NamedTuple):
    """Preferences of ranks where more than one action is possible.

    Args:
        warmup: Forwards ahead of the input gradients on the last rank but `behind` are
            at most `warmup[0] behind + warmup[1]`.
        patience: A rank does a weight gradient if it would wait longer than `patience`
            times its seconds.
        alternates: True to prefer a forward to an input gradient after an input
            gradient.
    """

    warmup: tuple[int, int]
    patience: float
    alternates: bool


_EVERY = tuple(
    Preferences(*choice)
    for choice in product(
        ((1, 1), (2, 1), (2, 2), (2, 3)), (0, 0.25, 0.5, 0.75, 1), (False, True)
    )
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory of a rank, in the bytes that a forward keeps of one microbatch.

    Args:
        memory: Most that a rank holds.
        stash: What stays from an input gradient until its weight gradient.
        pending: Most weight gradients that wait; None is any number.

    Raises:
        InputError: One microbatch does not fit.
    """

    memory: float
    stash: float = 1.0
    pending: int | None = None

    def __post_init__(self) -> None:
        least = max(1.0, self.stash)
        if self.memory < least:
            raise InputError(
                f"memory={self.memory}: one microbatch needs {least}; allow as much",
                key="schedule.too_little_memory",
            )
        if self.pending is not None and self.pending < 1:
            raise InputError(
                f"pending={self.pending}: a split backward leaves 1 weight gradient "
                "pending; allow 1 or more",
                key="schedule.too_few_pending",
            )

    def change(self, op: Op) -> float:
        """Return what an F, I or W adds to the memory of its rank."""
        return {Op.F: 1.0, Op.I: self.stash - 1, Op.W: -self.stash}[op]

    def allow(self, order: Sequence[Action]) -> bool:
        """Return True if a rank's order of F, I and W stays within the limits."""
        held = accumulate(self.change(action.op) for action in order)
        waiting = accumulate(
            (action.op is Op.I) - (action.op is Op.W) for action in order
        )
        most = len(order) if self.pending is None else self.pending
        return max(held) <= self.memory + _TOLERANCE and max(waiting) <= most


def search_schedule(
    num_microbatches: int,
    times: StageTimes,
    *,
    limits: Limits,
    hop_s: float = 0.0,
    name: str = "auto",
) -> Schedule:
    """Return the shortest split schedule found, one stage a rank.

    Args:
        num_microbatches: Microbatches of one step.
        times: Seconds of the actions, one a rank.
        limits: Memory of a rank.
        hop_s: Latency between two ranks.
        name: What reports call it.

    Example:
        >>> from meshpar.schedules import peak_in_flight, simulate
        >>> found = search_schedule(8, StageTimes.uniform(4), limits=Limits(memory=7))
        >>> simulate(found).bubble_fraction, max(peak_in_flight(found))
        (0.0, 7)
    """
    found = [
        _Replay(num_microbatches, times, limits, hop_s, preferences).run()
        for preferences in _EVERY
    ]
    for method in (zero_bubble_h1, zero_bubble_h2):
        schedule = method(len(times.forward_s), num_microbatches)
        if all(limits.allow(order) for order in schedule.orders):
            span_s = simulate(schedule, times, hop_s=hop_s).span_s
            found.append((span_s, schedule.orders))
    _, orders = min(found, key=lambda one: one[0])
    return Schedule(orders, len(orders), num_microbatches, name)


class _Choice(NamedTuple):
    start_s: float
    op: Op


class _Replay:
    """One list schedule: the state of every rank while time goes on."""

    def __init__(
        self,
        num_microbatches: int,
        times: StageTimes,
        limits: Limits,
        hop_s: float,
        preferences: Preferences,
    ) -> None:
        ranks = range(len(times.forward_s))
        self._limits, self._hop_s, self._preferences = limits, hop_s, preferences
        self._num_microbatches = num_microbatches
        self._seconds = {
            Op.F: times.forward_s,
            Op.I: times.input_grad_s,
            Op.W: times.weight_grad_s,
        }
        self._free_s = [0.0 for _ in ranks]
        self._memory = [0.0 for _ in ranks]
        self._orders: list[list[Action]] = [[] for _ in ranks]
        self._done = {op: [0 for _ in ranks] for op in (Op.F, Op.I, Op.W)}
        # When the input of each microbatch's F, or I, is on the rank.
        self._there: dict[Op, list[list[float]]] = {
            op: [[] for _ in ranks] for op in (Op.F, Op.I)
        }
        self._there[Op.F][0] = [0.0] * num_microbatches

    def run(self) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """Return the longest span of a rank, and the orders."""
        ranks = range(len(self._free_s))
        starts: dict[int, float] = {}
        choices = [self._choice(rank) for rank in ranks]
        while any(choices):
            rank, (start_s, op) = min(
                ((rank, choice) for rank, choice in enumerate(choices) if choice),
                key=lambda of_rank: of_rank[1].start_s,
            )
            starts.setdefault(rank, start_s)
            self._do(rank, op, start_s)
            for other in {rank - 1, rank, rank + 1} & {*ranks}:
                choices[other] = self._choice(other)
        spans = (self._free_s[rank] - starts[rank] for rank in ranks)
        return max(spans), tuple(map(tuple, self._orders))

    def _choice(self, rank: int) -> _Choice | None:
        """Return what a rank does next if nothing more arrives; None to wait."""
        now = self._free_s[rank]
        ready = min(self._ready(rank), default=None)
        num_input_grads, num_weight_grads = (
            self._done[op][rank] for op in (Op.I, Op.W)
        )
        if num_weight_grads < num_input_grads:
            wait_s = float("inf") if ready is None else ready[0] - now
            patience_s = self._preferences.patience * self._seconds[Op.W][rank]
            if wait_s > 0 and wait_s >= patience_s:
                return _Choice(now, Op.W)
        return None if ready is None else _Choice(ready[0], ready[2])

    def _ready(self, rank: int) -> Iterator[tuple[float, int, Op]]:
        """Yield start, order of preference and kind of the F and the I that may run."""
        now, order, limits = self._free_s[rank], self._orders[rank], self._limits
        held, done = self._memory[rank] - _TOLERANCE, self._done
        forwards, input_grads, weight_grads = (done[op][rank] for op in done)
        pending = input_grads - weight_grads
        forward_first = (
            self._preferences.alternates and bool(order) and order[-1].op is Op.I
        )
        slope, least = self._preferences.warmup
        behind = len(self._free_s) - 1 - rank
        if (
            forwards < len(self._there[Op.F][rank])
            and forwards - input_grads < slope * behind + least
            and held + 1 <= limits.memory
        ):
            start_s = max(now, self._there[Op.F][rank][forwards])
            yield start_s, 0 if forward_first else 1, Op.F
        fits = held + limits.stash - 1 <= limits.memory and (
            limits.pending is None or pending < limits.pending
        )
        if input_grads < len(self._there[Op.I][rank]) and (fits or not pending):
            start_s = max(now, self._there[Op.I][rank][input_grads])
            yield start_s, 1 if forward_first else 0, Op.I

    def _do(self, rank: int, op: Op, start_s: float) -> None:
        end_s = start_s + self._seconds[op][rank]
        self._free_s[rank] = end_s
        self._orders[rank].append(Action(rank, op, self._done[op][rank]))
        self._done[op][rank] += 1
        self._memory[rank] += self._limits.change(op)
        last = len(self._free_s) - 1
        if op is Op.F and rank < last:
            self._there[Op.F][rank + 1].append(end_s + self._hop_s)
        elif op is Op.F:
            self._there[Op.I][rank].append(end_s)
        elif op is Op.I and rank > 0:
            self._there[Op.I][rank - 1].append(end_s + self._hop_s)


def _orders(
    num_ranks: int, num_microbatches: int, _: int, max_pending_w: int | None = None
) -> Orders:
    found = search_schedule(
        num_microbatches,
        StageTimes.uniform(num_ranks),
        limits=Limits(memory=num_ranks, pending=max_pending_w),
    )
    return found.orders


auto = ScheduleMethod(
    name="auto",
    orders=_orders,
    orders_within=_orders,
    splits_backward=True,
    no_better_than="zero_bubble_h1",
    reference="searched here for equal F, I and W in the memory of 1F1B; after the "
    "heuristic of Qi et al., 'Zero Bubble Pipeline Parallelism', ICLR 2024, section 3",
)
