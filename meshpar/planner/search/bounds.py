"""Lower bounds of a layout's time and memory, cheaper than its estimate.

A bound adds up `shared_costs`, and leaves out what is expensive to compute (the
schedule's replay, workspace); it never exceeds the estimate.
"""

from __future__ import annotations

import math
from copy import copy
from functools import lru_cache
from typing import NamedTuple, Protocol

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, STAGE_REMATS, Layout
from meshpar.planner.cost.memory import rank_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import straggler_fraction
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.shared_costs import SharedCosts, StepCost
from meshpar.planner.search.space import Splits, Variant, layout_variant
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


class LayoutBounds(Protocol):
    """Bounds of the layouts of a search, and the runs of those that are estimated."""

    def without_capacity(self) -> LayoutBounds:
        """Return bounds of the same layouts that have the time of all of them."""

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""

    def least(self, mesh: Layout, choices: MeshChoices) -> Bound:
        """Return a bound of all these variants of a mesh shape."""

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """Return the bound of one layout."""

    def memory_bytes(self, run: Run) -> float:
        """Return a closer bound of a run's memory."""


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
        self._share = 1.0

    def with_share(self, share: float) -> Bounds:
        """Return bounds of layouts whose longest stage has `share` of an even one."""
        changed = copy(self)
        changed._share = share
        return changed

    def without_capacity(self) -> Bounds:
        """Return bounds of the same layouts that have the time of all of them."""
        return Bounds(self._like)

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""
        return self._costs.run(mesh, variant)

    def least(self, mesh: Layout, choices: MeshChoices) -> Bound:
        """Return a bound of all these variants of a mesh shape.

        Fewest microbatches make the largest matmuls, and most of them keep least; what
        nothing recomputes is fastest, and what recomputes a stage smallest.
        """
        some = next(choices.variants())
        if choices.is_one:
            return self.bound(mesh, some)
        if not choices.splits_backward:
            some = some._replace(schedule=_PLAIN.schedule, splits=())
        diverges = any(one.execution == "divergent" for one in choices.schedules)
        some = some._replace(
            splits=(), execution="divergent" if diverges else some.execution
        )
        fewest = self._fewest(mesh, choices)
        plain = [
            (variant, self._costs.least_step_cost(mesh, variant, choices))
            for count in fewest
            for variant in choices.with_sequence_parallel(
                some._replace(microbatches=count, chunks=1, remat=choices.remats[0])
            )
        ]
        state_bytes = min(shared.state_bytes for _, shared in plain)
        memory = self._least_memory(mesh, choices, some, state_bytes)
        if memory > self._capacity_bytes:
            return Bound(0.0, memory)
        # Filling takes a tick of a chunk for every rank, and ticks are shortest with
        # most microbatches.
        many, chunks = max(choices.microbatches), _most_chunks(choices)
        fills = (mesh.stage - 1) / chunks / many
        step_s = min(
            self._step_s(
                mesh,
                variant,
                shared,
                variant.microbatches,
                fills * variant.microbatches,
                remats=_remats_to_try(shared, choices),
                smallest=choices.remats[-1],
            )
            for variant, shared in plain
        )
        return Bound(step_s, memory)

    def _least_memory(
        self, mesh: Layout, choices: MeshChoices, some: Variant, state_bytes: float
    ) -> float:
        """Return the least memory of these choices; `some` has their other values."""
        many = max(choices.microbatches)
        # A microbatch's way to the last rank, unless a schedule says less.
        lock_step = self._like.execution.lock_step
        by_schedule = (
            _held(schedule, mesh.stage, many, each, lock_step)
            for schedule, each, *_ in choices.schedules
        )
        held = min(many, mesh.stage, *by_schedule)
        # What one of them makes again, another may have kept.
        again = len(choices.remats) == 1
        own = min(self._own_blocks(mesh, *one[:3]) for one in choices.schedules)
        small = some._replace(
            microbatches=many, chunks=_most_chunks(choices), remat=choices.remats[-1]
        )
        return min(
            self._memory(mesh, variant, state_bytes, held, own, again=again)
            for variant in choices.with_sequence_parallel(small)
        )

    def _fewest(self, mesh: Layout, choices: MeshChoices) -> tuple[int, ...]:
        """Return the fewest microbatches of each way to run a block.

        In ticks, what one gathers once another gathers twice; in parts of the batch,
        collectives hide that others show: one is no bound of the other.
        """
        like = self._like
        ways: dict[tuple[bool, bool], int] = {}
        for count in sorted(choices.microbatches):
            whole = like.execution.measured_overlap and mesh.tensor > 1
            if whole and any(choices.sequence_parallel):
                examples = self._costs.examples(mesh, count)
                tokens = examples * like.seq // mesh.context
                platform = platform_named(like.cluster.device.platform)
                whole = platform.num_batch_parts(examples, tokens) == 1
            ways.setdefault((count > 1 and mesh.stage == 1, whole), count)
        return tuple(ways.values())

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """Return the bound of one layout."""
        lock_step = self._like.execution.lock_step
        ticks, fills = variant.microbatches * variant.chunks, mesh.stage - 1
        held = held_microbatches(mesh.stage, variant, lock_step=lock_step)
        shared = self._costs.step_cost(mesh, variant)
        scheduled = variant.schedule, variant.chunks, variant.splits
        own = self._own_blocks(mesh, *scheduled)
        memory = self._memory(mesh, variant, shared.state_bytes, held, own)
        if memory > self._capacity_bytes:
            return Bound(0.0, memory)
        remats = (variant.remat,)
        step_s = self._step_s(mesh, variant, shared, ticks, fills, remats=remats)
        return Bound(step_s, memory)

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
        *,
        remats: tuple[str, ...],
        smallest: str = "",
    ) -> float:
        """Seconds of a step under the fastest of these remat policies.

        If one stands for several, of which `smallest` keeps least, it stacks no more
        than that one does. In lock step ranks wait for `fills` more ticks than they
        work in; if backwards are split, without their weight gradients, and if ranks
        diverge, for forwards only.
        """
        lock_step, splits = self._like.execution.lock_step, False
        if lock_step and mesh.stage > 1:
            splits = variant.scheduled.splits_backward
        layers = self._like.workload.layers
        # Blocks of the longest stage, or their mean where blocks are of two kinds.
        longest = layers / (mesh.stage * variant.chunks) * self._share
        longest = math.ceil(longest) if len(self._costs.kinds) == 1 else longest
        overhead_s = self._costs.overhead_s(mesh, variant)
        cores = self._like.cluster.device.efficiency.collective_cores
        key, fastest_s = self._costs.block_key(mesh, variant), math.inf
        for remat in remats:
            tick_s, forward_s, late_s = overhead_s, 0.0, 0.0
            exposed_s = [0.0, 0.0]
            least = smallest if len(remats) == 1 and smallest else remat
            for (_, count), block, small, gather_s, bare_s in zip(
                self._costs.kinds,
                self._costs.block_times(mesh, variant, remat, key),
                self._costs.block_times(mesh, variant, least, key),
                shared.gather_s,
                shared.bare_s,
                strict=True,
            ):
                less_s = max(0.0, block.stacked_s - small.stacked_s)
                for way in (0, 1):
                    hidden_s = min(gather_s[way] - bare_s[way], block.spare_s[way])
                    exposed_s[way] = gather_s[way] - hidden_s * (1 - cores)
                    block_s = block.total_s[way] + exposed_s[way] - less_s
                    tick_s += longest * count / layers * block_s
                    forward_s += longest * count / layers * block_s * (1 - way)
                # With all traffic of the backward, of which W has the reductions.
                late_s += longest * count / layers * (block.late_s + exposed_s[1])
            fill_s = tick_s if lock_step else 0.0
            if splits:
                diverges = variant.execution == "divergent"
                fill_s = forward_s if diverges else tick_s - late_s
            fastest_s = min(fastest_s, ticks * tick_s + fills * max(0.0, fill_s))
        # What is hidden takes cores, and all devices wait for the slowest.
        return (fastest_s + shared.once_s) * self._slowest * (1 - _ROUNDING)

    def _memory(
        self,
        mesh: Layout,
        variant: Variant,
        state_bytes: float,
        held: float,
        own: int,
        *,
        again: bool = True,
    ) -> float:
        key = self._costs.block_key(mesh, variant)
        blocks = self._costs.block_memories(mesh, variant, key)
        if variant.remat in STAGE_REMATS:
            # The stage that is computed again; all its inputs wait as well.
            kept = blocks[0].input_bytes * held
            if not self._like.execution.eager:
                inner = min(block.inner_bytes for block in blocks)
                kept += inner * own / variant.chunks
        else:
            kept = min(block.kept_bytes for block in blocks) * own * held
        total = state_bytes
        # At least one weight gradient of a chunk waits.
        total += min(block.stash_bytes for block in blocks) * own / variant.chunks
        total += kept if again or variant.remat not in STAGE_REMATS else 0.0
        if self._like.execution.eager or variant.remat == "none" or not again:
            return total
        return total + min(block.again_bytes for block in blocks)

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


def _most_chunks(choices: MeshChoices) -> int:
    return max(one.chunks for one in choices.schedules)


def _remats_to_try(shared: StepCost, choices: MeshChoices) -> tuple[str, ...]:
    """Return what recomputes least; all if more may hide more of the weights.

    What keeps more puts more on its stack, too, which `_step_s` leaves out.
    """
    hides = shared.gather_s != shared.bare_s
    return choices.remats if hides else choices.remats[:1]


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
