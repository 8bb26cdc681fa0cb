"""Lower bounds of a layout's time and memory, cheaper than its estimate.

A bound adds up `shared_costs`, and leaves out what is expensive to compute (the
schedule's replay, workspace); it never exceeds the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, Layout
from meshpar.planner.cost.memory import rank_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import straggler_fraction
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.shared_costs import Array, SharedCosts, StepCost, Steps
from meshpar.planner.search.space import Splits, State, Variant, layout_variant
from meshpar.schedules import SCHEDULES
from meshpar.schedules.stage_splits import stage_sizes

_PLAIN = Layout()
_ROUNDING = 1e-12
"""Fraction by which two sums of the same times may differ."""


class Bound(NamedTuple):
    """Lower bounds of a layout.

    Args:
        step_s: Time of a step.
        memory_bytes: Memory of a device.
    """

    step_s: float
    memory_bytes: float


class BoundByRemat(NamedTuple):
    """Lower bounds of layouts that differ in their remat policy at least: arrays."""

    step_s: Array
    memory_bytes: Array

    @property
    def least(self) -> Bound:
        """Bound of all of them."""
        return Bound(float(self.step_s.min()), float(self.memory_bytes.min()))

    def at_least(self, known: BoundByRemat) -> BoundByRemat:
        """Return the closer of each of these bounds and others of more layouts."""
        return BoundByRemat(*map(np.maximum, self, known))

    def only(self, mask: np.ndarray | slice) -> BoundByRemat:
        """Return those of some policies."""
        return BoundByRemat(self.step_s[mask], self.memory_bytes[mask])


class LayoutBounds(Protocol):
    """Bounds of the layouts of a search, and the runs of those that are estimated."""

    def without_capacity(self) -> LayoutBounds:
        """Return bounds of the same layouts that have the time of all of them."""

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""

    def least_s(self, mesh: Layout, choices: MeshChoices) -> float:
        """Return a bound of the time of all these variants, from their blocks alone."""

    def in_memory(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound from their blocks and memory alone, for each remat policy."""

    def by_remat(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound of all these variants for each of their remat policies."""

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """Return the bound of one layout."""

    def memory_bytes(self, run: Run) -> float:
        """Return a closer bound of a run's memory."""


Seconds = TypeVar("Seconds", float, Array)
_CostOfStates = Callable[[Steps, np.ndarray], StepCost]


class Bounds:
    """Bounds of the layouts of one workload, cluster and batch; blocks are cached.

    Args:
        run: Any run of them, for its workload, cluster, execution and batch.
        capacity_bytes: Layouts that need more get 0 as the bound of their time.
    """

    def __init__(self, run: Run, capacity_bytes: float = math.inf) -> None:
        self._like, self._capacity_bytes = run, capacity_bytes
        self._costs = SharedCosts(run)
        self._slowest = 1 + straggler_fraction(run.cluster)
        self._free = 1 - run.cluster.device.efficiency.collective_cores
        counts = [count for _, count in self._costs.kinds]
        self._shares = np.array(counts) / run.workload.layers
        self._share, self._in_blocks = 1.0, True
        self._least_s: dict[tuple, float] = {}
        self._least_held: dict[tuple, tuple[float, int]] = {}

    def with_share(self, share: float, *, in_blocks: bool = True) -> Bounds:
        """Return bounds of layouts whose longest stage has `share` of an even one.

        In whole blocks, or in any fraction of one.
        """
        changed = copy(self)
        changed._share, changed._in_blocks, changed._least_s = share, in_blocks, {}
        return changed

    def without_capacity(self) -> Bounds:
        """Return bounds of the same layouts that have the time of all of them."""
        return Bounds(self._like)

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""
        return self._costs.run(mesh, variant)

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """Return the bound of one layout."""
        return self.bound_by_remat(mesh, variant).least

    def least_s(self, mesh: Layout, choices: MeshChoices) -> float:
        """Return a bound of the time of all these variants, from their blocks alone."""
        key = self._blocks_key(mesh, choices)
        if key not in self._least_s:
            self._least_s[key] = self._blocks_s(mesh, choices)
        return self._least_s[key]

    def _blocks_key(self, mesh: Layout, choices: MeshChoices) -> tuple:
        """Return all that the time of the blocks of these variants depends on.

        Not on how replicas lie over `data` and `fsdp`, but for what ZeRO-3 repacks.
        """
        inner = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        repacked = self._like.execution.repacks and choices.states
        ways = (choices.microbatches, choices.schedules, choices.sequence_parallel)
        return inner, mesh.batch_shards, ways, repacked

    def _blocks_s(self, mesh: Layout, choices: MeshChoices) -> float:
        lock_step = self._like.execution.lock_step
        fills = (
            0.0 if choices.splits_backward or not lock_step else _fills(mesh, choices)
        )
        seconds = []
        for variant in self._fastest(mesh, choices):
            # Whole backwards take no longer than split ones, which move a stash.
            variant = variant._replace(schedule=_PLAIN.schedule, execution="auto")
            blocks = self._longest_stage_blocks(mesh, variant)
            block_s = self._costs.blocks(mesh, variant).least_s.sum(1)
            tick_s = self._costs.overhead_s(mesh, variant) + float(blocks @ block_s)
            seconds.append(variant.microbatches * (1 + fills) * tick_s)
        return self._in_step(min(seconds))

    def in_memory(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound from their blocks and memory alone, for each remat policy."""
        small = choices._replace(states=_small_states(mesh, choices.states))
        return self._by_remat(mesh, small, lambda *_: self._costs.no_cost)

    def by_remat(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound of all these variants for each of their remat policies."""
        if choices.only_remats:
            return self.bound_by_remat(mesh, next(choices.variants()), choices.remats)
        return self._by_remat(mesh, choices, Steps.costs)

    def _by_remat(
        self, mesh: Layout, choices: MeshChoices, cost: _CostOfStates
    ) -> BoundByRemat:
        """Return a bound for each remat policy, if steps of some states cost so much.

        Fewest microbatches make the largest matmuls, and most of them keep least.
        """
        bounds = [
            self._bound_by_state(mesh, one, choices, cost)
            for one in self._fastest(mesh, choices)
        ]
        steps_s, memories = zip(*bounds, strict=True)
        return _known(np.min(steps_s, axis=0), np.min(memories, axis=0))

    def _bound_by_state(
        self,
        mesh: Layout,
        variant: Variant,
        choices: MeshChoices,
        cost: _CostOfStates,
    ) -> BoundByRemat:
        """Return the bounds of choices whose blocks run no faster than the variant's.

        Each state of them has its own time and memory.
        """
        many, chunks = max(choices.microbatches), _most_chunks(choices)
        held, own = self._held_by_any(mesh, many, choices)
        shared = self._costs.steps(mesh, variant, choices)
        small, remats = (
            variant._replace(microbatches=many, chunks=chunks),
            choices.remats,
        )
        memory = self._memory(mesh, small, shared, held, own, remats)
        ticks, fills = variant.microbatches, _fills(mesh, choices)
        return self._timed(
            remats,
            memory,
            lambda states, some: self._step_s(
                mesh, variant, cost(shared, states), ticks, fills * ticks, some
            ),
        )

    def _held_by_any(
        self, mesh: Layout, many: int, choices: MeshChoices
    ) -> tuple[float, int]:
        """Return the fewest microbatches and blocks of a first rank, of any schedule.

        A microbatch's way to the last rank, unless a schedule says less.
        """
        key = mesh.stage, many, choices.schedules
        if key not in self._least_held:
            lock_step = self._like.execution.lock_step
            by_schedule = (
                _held(schedule, mesh.stage, many, each, lock_step)
                for schedule, each, *_ in choices.schedules
            )
            own = (self._own_blocks(mesh, *one[:3]) for one in choices.schedules)
            self._least_held[key] = min(many, mesh.stage, *by_schedule), min(own)
        return self._least_held[key]

    def _fastest(self, mesh: Layout, choices: MeshChoices) -> list[Variant]:
        """Return variants of which one runs blocks as fast as any of the choices."""
        some = next(choices.variants())
        if not choices.splits_backward:
            some = some._replace(schedule=_PLAIN.schedule)
        diverges = any(one.execution == "divergent" for one in choices.schedules)
        execution = "divergent" if diverges else some.execution
        some = some.with_state(min(choices.states, key=_split_by_zero_3))
        some = some._replace(splits=(), execution=execution, chunks=1)
        return [
            variant
            for count in self._fewest(mesh, choices)
            for variant in choices.with_sequence_parallel(
                some._replace(microbatches=count)
            )
        ]

    def _timed(
        self,
        remats: tuple[str, ...],
        memory: Array,
        step_s: Callable[[np.ndarray, tuple[str, ...]], Array],
    ) -> BoundByRemat:
        """Return the least over states that fit; infinite seconds where none does."""
        fits = memory <= self._capacity_bytes
        some = np.logical_or.reduce(fits)
        seconds = np.full(len(remats), np.inf)
        if some.any():
            states = np.logical_or.reduce(fits, 1)
            every = step_s(states, tuple(compress(remats, some)))
            seconds[some] = np.where(fits[states][:, some], every, np.inf).min(0)
        return BoundByRemat(seconds, memory.min(0))

    def bound_by_remat(
        self, mesh: Layout, variant: Variant, remats: tuple[str, ...] = ()
    ) -> BoundByRemat:
        """Return the bounds of one layout with each of these policies, or its own."""
        remats = remats or (variant.remat,)
        lock_step = self._like.execution.lock_step
        ticks, fills = variant.microbatches * variant.chunks, mesh.stage - 1
        held = held_microbatches(mesh.stage, variant, lock_step=lock_step)
        shared = self._costs.step(mesh, variant)
        own = self._own_blocks(mesh, variant.schedule, variant.chunks, variant.splits)
        memory = self._memory(mesh, variant, shared, held, own, remats)
        bounds = self._timed(
            remats,
            memory,
            lambda states, some: self._step_s(
                mesh, variant, shared.costs(states), ticks, fills, some
            ),
        )
        return _known(*bounds)

    def _fewest(self, mesh: Layout, choices: MeshChoices) -> tuple[int, ...]:
        """Return the fewest microbatches of each way to run a block.

        In parts of the batch, collectives hide that others show: one is no bound of the
        other.
        """
        like = self._like
        ways: dict[bool, int] = {}
        for count in sorted(choices.microbatches):
            whole = like.execution.measured_overlap and mesh.tensor > 1
            if whole and any(choices.sequence_parallel):
                examples = self._costs.examples(mesh, count)
                tokens = examples * like.seq // mesh.context
                platform = platform_named(like.cluster.device.platform)
                whole = platform.num_batch_parts(examples, tokens) == 1
            ways.setdefault(whole, count)
        return tuple(ways.values())

    def memory_bytes(self, run: Run) -> float:
        """Return a closer bound of a run's memory: that of its first rank."""
        layout, lock_step = run.layout, run.execution.lock_step
        variant = layout_variant(layout)
        held = held_microbatches(layout.stage, variant, lock_step=lock_step)
        return rank_memory(run, 0, held * layout.chunks).total_bytes

    def _step_s(
        self,
        mesh: Layout,
        variant: Variant,
        shared: StepCost,
        ticks: float,
        fills: float,
        remats: tuple[str, ...],
    ) -> Array:
        """Seconds of a step in each state and under each of these remat policies.

        In lock step ranks wait for `fills` more ticks than they work in; if backwards
        are split, without their weight gradients, and if ranks diverge, for forwards
        only.
        """
        lock_step, costs = self._like.execution.lock_step, self._costs
        blocks = self._longest_stage_blocks(mesh, variant)
        times = costs.blocks(mesh, variant).times(remats)
        hidden_s = np.minimum(shared.gather_s - shared.bare_s, times.spare_s)
        # What is hidden takes cores.
        exposed_s = shared.gather_s - hidden_s * self._free
        both_s = _each_times(blocks, times.total_s + exposed_s)
        forward_s, backward_s = both_s[:, 0], both_s[:, 1]
        tick_s = costs.overhead_s(mesh, variant) + forward_s + backward_s
        fill_s = tick_s if lock_step else 0.0
        if lock_step and mesh.stage > 1 and variant.splits_backward:
            # With all traffic of the backward, of which W has the reductions.
            late_s = _each_times(blocks, times.late_s + exposed_s[:, :, 1])
            diverges = variant.execution == "divergent"
            fill_s = np.maximum(0.0, forward_s if diverges else tick_s - late_s)
        return self._in_step(ticks * tick_s + fills * fill_s + shared.once_s[:, None])

    def _in_step(self, busy_s: Seconds) -> Seconds:
        """Return the seconds of a step whose devices are busy for so long.

        All devices wait for the slowest, and for the host between steps.
        """
        step_s = busy_s * self._slowest + self._like.execution.host_s
        return step_s * (1 - _ROUNDING)

    def _longest_stage_blocks(self, mesh: Layout, variant: Variant) -> Array:
        """Return the blocks of each kind of the longest stage.

        Their mean where blocks are of two kinds.
        """
        longest = self._like.workload.layers / (mesh.stage * variant.chunks)
        longest *= self._share
        if self._in_blocks and len(self._shares) == 1:
            longest = math.ceil(longest)
        return longest * self._shares

    def _memory(
        self,
        mesh: Layout,
        variant: Variant,
        shared: Steps,
        held: float,
        own: int,
        remats: tuple[str, ...],
    ) -> Array:
        each = self._costs.blocks(mesh, variant).memories(remats)
        kept = each.per_block * (own * held) + each.per_stage * held
        blocks = kept + each.per_own * (own / variant.chunks) + each.working
        return shared.state_bytes[:, None] + blocks

    def _own_blocks(
        self, mesh: Layout, schedule: str, chunks: int, splits: Splits
    ) -> int:
        """Return the fewest blocks that the first rank can have."""
        layers = self._like.workload.layers
        if not any(splits) or splits == BY_COST:
            # By cost, some other rank has as many if the first has fewer.
            return layers // mesh.stage if not any(splits) else 1
        sizes = stage_sizes(layers, mesh.stage, chunks, splits)
        first = SCHEDULES[schedule].stages_of(0, mesh.stage, chunks)
        return sum(sizes[at] for at in first)


def _fills(mesh: Layout, choices: MeshChoices) -> float:
    """Return the least share of a step's ticks that ranks wait for others.

    Filling takes a tick of a chunk for every rank, and ticks are shortest with most
    microbatches.
    """
    many, chunks = max(choices.microbatches), _most_chunks(choices)
    return (mesh.stage - 1) / chunks / many


def _small_states(mesh: Layout, states: tuple[State, ...]) -> tuple[State, ...]:
    """Return states of which one needs as little memory as any.

    Of each way to keep them the one in most parts, if it is in parts at all.
    """
    smallest: dict[tuple, tuple[tuple[int, int], State]] = {}
    for state in states:
        parts = every, routed = state.num_parts(mesh)
        way = state._replace(data=1, fsdp=1, zero_axes=())
        key = way, every > 1, every // routed
        if key not in smallest or smallest[key][0] < parts:
            smallest[key] = parts, state
    return tuple(state for _, state in smallest.values())


def _split_by_zero_3(state: State) -> tuple:
    """Return a key by which those states come first that repack least weights."""
    return state.zero == 3, state.fsdp, state.zero_axes


def _most_chunks(choices: MeshChoices) -> int:
    return max(one.chunks for one in choices.schedules)


def _each_times(counts: Array, seconds: Array) -> Array:
    """Return the sum over kinds of blocks, the second axis, each so many times."""
    total = counts[0] * seconds[:, 0]
    for kind, count in enumerate(counts[1:], 1):
        total += count * seconds[:, kind]
    return total


def _known(step_s: Array, memory_bytes: Array) -> BoundByRemat:
    """Return bounds with 0 as the time of what does not fit."""
    return BoundByRemat(np.where(np.isinf(step_s), 0.0, step_s), memory_bytes)


def held_microbatches(ranks: int, variant: Variant, *, lock_step: bool) -> float:
    """Return the fewest microbatches that the first rank can hold.

    At least one chunk, where the schedule has no closed form.

    Reference: Narayanan et al. 2021, section 2.2.
    """
    count, chunks = variant.microbatches, variant.chunks
    return _held(variant.schedule, ranks, count, chunks, lock_step)


@lru_cache(maxsize=4096)
def _held(schedule: str, ranks: int, count: int, chunks: int, lock_step: bool) -> float:
    if ranks == 1:
        return 1
    forms = SCHEDULES[schedule].closed_forms
    if forms is None:
        return 1 / chunks
    in_flight = forms.lock_step_in_flight if lock_step else forms.in_flight
    return in_flight(ranks, count, chunks)[0] / chunks
