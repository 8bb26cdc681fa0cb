"""Lower bounds of a layout's time and memory, cheaper than its estimate.

What a block costs does not depend on the mesh axes outside it, so that a few hundred
blocks serve a hundred thousand layouts. A bound leaves out what is dear to find (the
schedule's replay, workspace); it never exceeds the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, STAGE_REMATS, Layout
from meshpar.planner.cost.bound_blocks import (
    BoundMemory,
    BoundTime,
    bound_memory,
    bound_time,
    first_blocks,
    held_by,
    held_microbatches,
    places,
)
from meshpar.planner.cost.memory import rank_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.shared_bounds import SharedBounds
from meshpar.planner.cost.shared_costs import SharedCosts
from meshpar.planner.cost.stage_time import tick_overhead
from meshpar.planner.cost.step_time import straggler_fraction
from meshpar.planner.search.mesh_choices import MeshChoices
from meshpar.planner.search.refusals import stage_blocks_of
from meshpar.planner.search.space import Splits, Variant, variant_of, with_variant

_PLAIN = Layout()
_ROUNDING = 1e-12
"""Part of a time that two sums of the same parts may differ by."""


class Bound(NamedTuple):
    """What a layout takes at least.

    Args:
        step_s: Time of a step.
        memory_bytes: Memory of a device.
    """

    step_s: float
    memory_bytes: float


class Bounds:
    """Bounds of the layouts of one workload, cluster and batch; it remembers blocks.

    Args:
        run: Any run of them: its workload, cluster, execution and batch count.
        capacity_bytes: Of what needs more than this, no time is found: 0 is its bound.
    """

    def __init__(self, run: Run, capacity_bytes: float = math.inf) -> None:
        self._like, self._capacity_bytes = run, capacity_bytes
        kinds = run.workload.block_kinds
        self._kinds = tuple((kind, count) for kind, count in kinds if count)
        self._times: dict[tuple, tuple[BoundTime, ...]] = {}
        self._memories: dict[tuple, tuple[BoundMemory, ...]] = {}
        self._shared = SharedBounds(self.run, tuple(moe for moe, _ in self._kinds))
        self._overheads: dict[tuple, float] = {}
        self._slowest = 1 + straggler_fraction(run)

    def anew(self) -> Bounds:
        """Those of the same layouts, with the time of all."""
        return Bounds(self._like)

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """That layout as a run."""
        layout = with_variant(mesh, variant)
        blocks = stage_blocks_of(self._like.workload, layout)
        return replace(self._like, layout=layout, stage_blocks=blocks)

    def of_choices(self, mesh: Layout, choices: MeshChoices) -> Bound:
        """The bound of all these variants of a mesh shape.

        Fewest microbatches make the largest matmuls, and most of them keep least; what
        nothing recomputes is fastest, and what recomputes a stage smallest.
        """
        if choices.is_one:
            return self.bound(mesh, next(choices.variants()))
        many = max(choices.microbatches)
        fast, small = choices.remats[0], choices.remats[-1]
        chunks = max(chunks for _, chunks, _ in choices.schedules)
        some = next(choices.variants())._replace(schedule=_PLAIN.schedule, splits=())
        plain, least = (
            [
                some._replace(
                    microbatches=count,
                    chunks=each,
                    remat=remat,
                    sequence_parallel=sequence,
                )
                for sequence in choices.sequence_parallel
                for count in counts
            ]
            for counts, each, remat in (
                (self._fewest(mesh, choices), 1, fast),
                ((many,), chunks, small),
            )
        )
        shared = [self._shared.least(mesh, variant, choices) for variant in plain]
        state_bytes = min(its.state_bytes for its in shared)
        # A microbatch's way to the last rank, unless a schedule says less.
        held = min(many, mesh.stage, *self._least_held(mesh, choices, many))
        # What one of them makes again, another may have kept.
        again = len(choices.remats) == 1
        own = min(self._own_blocks(mesh, *one) for one in choices.schedules)
        memory = min(
            self._memory(mesh, variant, state_bytes, held, own, again=again)
            for variant in least
        )
        if memory > self._capacity_bytes:
            return Bound(0.0, memory)
        # Filling takes a tick of a chunk for every rank, and ticks are shortest with
        # most microbatches.
        fills = (mesh.stage - 1) / chunks / many
        ticks = 1.0 + fills if self._like.execution.lock_step else 1.0
        step_s = min(
            self._step_s(
                mesh,
                variant,
                its,
                ticks * variant.microbatches,
                remats=_remats_to_try(its, choices),
            )
            for variant, its in zip(plain, shared, strict=True)
        )
        return Bound(step_s, memory)

    def _fewest(self, mesh: Layout, choices: MeshChoices) -> tuple[int, ...]:
        """The fewest microbatches of each way to run a block.

        In ticks, what one gathers once another gathers twice; in parts of the batch,
        collectives hide that others show: one is no bound of the other.
        """
        like = self._like
        ways: dict[tuple[bool, bool], int] = {}
        for count in sorted(choices.microbatches):
            whole = like.execution.measured_overlap and mesh.tensor > 1
            if whole and any(choices.sequence_parallel):
                examples = self._examples(mesh, count)
                tokens = examples * like.seq // mesh.context
                platform = platform_named(like.cluster.device.platform)
                whole = platform.num_batch_parts(examples, tokens) == 1
            ways.setdefault((count > 1 and mesh.stage == 1, whole), count)
        return tuple(ways.values())

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """The bound of one layout."""
        lock_step = self._like.execution.lock_step
        ticks = variant.microbatches * variant.chunks
        ticks += mesh.stage - 1 if lock_step else 0
        held = held_microbatches(mesh.stage, variant, lock_step=lock_step)
        shared = self._shared.of(mesh, variant)
        scheduled = variant.schedule, variant.chunks, variant.splits
        own = self._own_blocks(mesh, *scheduled)
        memory = self._memory(mesh, variant, shared.state_bytes, held, own)
        if memory > self._capacity_bytes:
            return Bound(0.0, memory)
        remats = (variant.remat,)
        return Bound(self._step_s(mesh, variant, shared, ticks, remats=remats), memory)

    def memory_bytes(self, run: Run) -> float:
        """A closer bound of a run's memory: all of its first rank's."""
        layout, lock_step = run.layout, run.execution.lock_step
        variant = variant_of(layout)
        held = held_microbatches(layout.stage, variant, lock_step=lock_step)
        return rank_memory(run, 0, held * layout.chunks).total_bytes

    def _step_s(
        self,
        mesh: Layout,
        variant: Variant,
        shared: SharedCosts,
        ticks: float,
        *,
        remats: tuple[str, ...],
    ) -> float:
        """With the fastest of some policies."""
        layers = self._like.workload.layers
        longest = places(layers, mesh.stage, variant.chunks, self._kinds)
        overhead_s = self._overhead_s(mesh, variant)
        cores = self._like.cluster.device.efficiency.collective_cores
        key, fastest_s = self._block_key(mesh, variant), math.inf
        for remat in remats:
            tick_s = overhead_s
            for (_, count), block, gather_s, bare_s in zip(
                self._kinds,
                self._times_of(mesh, variant, remat, key),
                shared.gather_s,
                shared.bare_s,
                strict=True,
            ):
                for way in (0, 1):
                    hidden_s = min(gather_s[way] - bare_s[way], block.spare_s[way])
                    exposed_s = gather_s[way] - hidden_s * (1 - cores)
                    tick_s += (
                        longest * count / layers * (block.total_s[way] + exposed_s)
                    )
            fastest_s = min(fastest_s, tick_s)
        # What is hidden takes cores, and all devices wait for the slowest.
        return (ticks * fastest_s + shared.once_s) * self._slowest * (1 - _ROUNDING)

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
        key = self._block_key(mesh, variant)
        blocks = self._memories_of(mesh, variant, key)
        if variant.remat in STAGE_REMATS:
            # The stage that is computed again; all its inputs wait as well.
            kept = blocks[0].input_bytes * held
            if not self._like.execution.eager:
                inner = min(block.inner_bytes for block in blocks)
                kept += inner * own / variant.chunks
        else:
            kept = min(block.kept_bytes for block in blocks) * own * held
        total = state_bytes
        total += kept if again or variant.remat not in STAGE_REMATS else 0.0
        if self._like.execution.eager or variant.remat == "none" or not again:
            return total
        return total + min(block.again_bytes for block in blocks)

    def _own_blocks(
        self, mesh: Layout, schedule: str, chunks: int, splits: Splits
    ) -> int:
        """Blocks of the first rank, at least."""
        layers = self._like.workload.layers
        if not any(splits) or splits == BY_COST:
            # By cost, some other rank has as many if the first has fewer.
            return layers // mesh.stage if not any(splits) else 1
        return first_blocks(layers, mesh.stage, schedule, chunks, splits)

    def _overhead_s(self, mesh: Layout, variant: Variant) -> float:
        """Of a tick beside its blocks, whatever ZeRO adds to it."""
        execution = self._like.execution
        if not (execution.lock_step and execution.shared_ends):
            return self._head_s(mesh, variant)
        # Links over `stage` and `tensor` do not depend on the axes outside.
        inner = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        key = (inner, self._tokens(mesh, variant), variant.sequence_parallel)
        if key not in self._overheads:
            plain = variant_of(_PLAIN)._replace(
                microbatches=variant.microbatches,
                sequence_parallel=variant.sequence_parallel,
                zero=1,
            )
            found = tick_overhead(self.run(replace(mesh, zero_axes=()), plain))
            self._overheads[key] = found.forward.total_s + found.backward.total_s
        return self._overheads[key]

    def _head_s(self, mesh: Layout, variant: Variant) -> float:
        """Matmuls of the logits, of one tick."""
        like = self._like
        workload, device = like.workload, like.cluster.device
        flops = 6 * self._tokens(mesh, variant) * workload.hidden * workload.vocab
        peak = device.peak_flops[mesh.precision] * device.efficiency.matmul
        return flops / peak / mesh.tensor / mesh.stage / variant.chunks

    def _tokens(self, mesh: Layout, variant: Variant) -> int:
        examples = self._examples(mesh, variant.microbatches)
        return examples * self._like.seq // mesh.context

    def _examples(self, mesh: Layout, microbatches: int) -> int:
        replicas = mesh.data * mesh.fsdp * mesh.expert * microbatches
        return self._like.global_batch // replicas

    def _block_key(self, mesh: Layout, variant: Variant) -> tuple:
        """All that a block's cost depends on but the policy of its remat."""
        return (
            *(mesh.tensor, mesh.expert, mesh.context, self._tokens(mesh, variant)),
            variant.sequence_parallel,
            # Kept in slots; collectives that take turns with those of stages.
            mesh.stage > 1 or variant.microbatches > 1,
            mesh.stage > 1 and mesh.tensor > 1,
        )

    def _times_of(
        self, mesh: Layout, variant: Variant, remat: str, key: tuple
    ) -> tuple[BoundTime, ...]:
        found = self._times.get((key, remat))
        if found is None:
            run = self.run(mesh, variant._replace(remat=remat))
            found = tuple(bound_time(run, moe) for moe, _ in self._kinds)
            self._times[key, remat] = found
        return found

    def _memories_of(
        self, mesh: Layout, variant: Variant, key: tuple
    ) -> tuple[BoundMemory, ...]:
        found = self._memories.get((key, variant.remat))
        if found is None:
            run = self.run(mesh, variant)
            found = tuple(bound_memory(run, moe) for moe, _ in self._kinds)
            self._memories[key, variant.remat] = found
        return found

    def _least_held(
        self, mesh: Layout, choices: MeshChoices, microbatches: int
    ) -> Iterator[float]:
        """What the first rank holds of so many microbatches, by each schedule."""
        lock_step = self._like.execution.lock_step
        for schedule, chunks, _ in choices.schedules:
            yield held_by(schedule, mesh.stage, microbatches, chunks, lock_step)


def _remats_to_try(shared: SharedCosts, choices: MeshChoices) -> tuple[str, ...]:
    """The fastest policy; all, where computing more may hide more that moves weights.

    What keeps more puts more on its stack, which a backward that waits for weights does
    not win back.
    """
    hides = shared.gather_s != shared.bare_s
    return choices.remats if hides else choices.remats[:1]
