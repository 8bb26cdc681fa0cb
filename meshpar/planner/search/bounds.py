"""Lower bounds of a layout's time and memory, cheaper than its estimate.

The cost of a block does not depend on the mesh axes outside it, so that a few hundred
blocks serve a hundred thousand layouts. A bound leaves out what is expensive to compute
(the schedule's replay, workspace); it never exceeds the estimate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, STAGE_REMATS, Layout
from meshpar.planner.cost.activations import (
    everything_bytes,
    kept_bytes,
    stage_input_bytes,
)
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.memory import (
    in_chunks_bytes,
    least_working_bytes,
    rank_memory,
)
from meshpar.planner.cost.run import (
    Run,
    rank_parameters,
    shared_out,
    stored_bytes,
    update_bytes,
)
from meshpar.planner.cost.seconds import (
    BLOCKS,
    LAST_BACKWARD,
    NEXT_FORWARD,
    exposed,
    memory_s,
    row_s,
)
from meshpar.planner.cost.step_time import straggler_fraction, tick_overhead
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import weight_rows
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.space import Splits, Variant, layout_variant, with_variant
from meshpar.planner.workload.problems import layout_stage_blocks
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


class _BlockTime(NamedTuple):
    """Seconds of one block and microbatch on one device, without FSDP's traffic.

    Each for the forward and the backward.
    """

    spare_s: tuple[float, float]
    total_s: tuple[float, float]


class _BlockMemory(NamedTuple):
    """Bytes of one block and microbatch on one device."""

    kept_bytes: float
    again_bytes: float
    input_bytes: float
    inner_bytes: float
    """Bytes kept while the stage of the block is recomputed."""


class _StepCost(NamedTuple):
    """Costs of a step that all variants of a mesh shape share.

    Args:
        state_bytes: Parameters, gradients, optimizer state, and what the backward needs
            of them besides.
        once_s: Gradient reduction and optimizer.
        gather_s: FSDP's traffic of each kind of block, in the forward and the backward.
        bare_s: The part of it that no work hides, however long that takes.
    """

    state_bytes: float
    once_s: float
    gather_s: tuple[tuple[float, float], ...]
    bare_s: tuple[tuple[float, float], ...]


class Bounds:
    """Bounds of the layouts of one workload, cluster and batch; blocks are cached.

    Args:
        run: Any run of them, for its workload, cluster, execution and batch.
        capacity_bytes: Layouts that need more get 0 as the bound of their time.
    """

    def __init__(self, run: Run, capacity_bytes: float = math.inf) -> None:
        self._like, self._capacity_bytes = run, capacity_bytes
        kinds = run.workload.block_kinds
        self._kinds = tuple((kind, count) for kind, count in kinds if count)
        self._times: dict[tuple, tuple[_BlockTime, ...]] = {}
        self._memories: dict[tuple, tuple[_BlockMemory, ...]] = {}
        self._step_costs: dict[tuple, _StepCost] = {}
        self._least_step_costs: dict[tuple, _StepCost] = {}
        self._overheads: dict[tuple, float] = {}
        self._slowest = 1 + straggler_fraction(run.cluster)

    def without_capacity(self) -> Bounds:
        """Return bounds of the same layouts that have the time of all of them."""
        return Bounds(self._like)

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""
        layout = with_variant(mesh, variant)
        blocks = layout_stage_blocks(self._like.workload, layout)
        return replace(self._like, layout=layout, stage_blocks=blocks)

    def least(self, mesh: Layout, choices: MeshChoices) -> Bound:
        """Return a bound of all these variants of a mesh shape.

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
        shared = [self._least_step_cost(mesh, variant, choices) for variant in plain]
        state_bytes = min(its.state_bytes for its in shared)
        # A microbatch's way to the last rank, unless a schedule says less.
        lock_step = self._like.execution.lock_step
        by_schedule = (
            _held(schedule, mesh.stage, many, each, lock_step)
            for schedule, each, _ in choices.schedules
        )
        held = min(many, mesh.stage, *by_schedule)
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
        """Return the fewest microbatches of each way to run a block.

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
        """Return the bound of one layout."""
        lock_step = self._like.execution.lock_step
        ticks = variant.microbatches * variant.chunks
        ticks += mesh.stage - 1 if lock_step else 0
        held = held_microbatches(mesh.stage, variant, lock_step=lock_step)
        shared = self._step_cost(mesh, variant)
        scheduled = variant.schedule, variant.chunks, variant.splits
        own = self._own_blocks(mesh, *scheduled)
        memory = self._memory(mesh, variant, shared.state_bytes, held, own)
        if memory > self._capacity_bytes:
            return Bound(0.0, memory)
        remats = (variant.remat,)
        return Bound(self._step_s(mesh, variant, shared, ticks, remats=remats), memory)

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
        shared: _StepCost,
        ticks: float,
        *,
        remats: tuple[str, ...],
    ) -> float:
        """Seconds of a step under the fastest of these remat policies."""
        layers = self._like.workload.layers
        # Blocks of the longest stage, or their mean where blocks are of two kinds.
        longest = layers / (mesh.stage * variant.chunks)
        longest = math.ceil(longest) if len(self._kinds) == 1 else longest
        overhead_s = self._overhead_s(mesh, variant)
        cores = self._like.cluster.device.efficiency.collective_cores
        key, fastest_s = self._block_key(mesh, variant), math.inf
        for remat in remats:
            tick_s = overhead_s
            for (_, count), block, gather_s, bare_s in zip(
                self._kinds,
                self._block_times(mesh, variant, remat, key),
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
        blocks = self._block_memories(mesh, variant, key)
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
        """Return the fewest blocks that the first rank can have."""
        layers = self._like.workload.layers
        if not any(splits) or splits == BY_COST:
            # By cost, some other rank has as many if the first has fewer.
            return layers // mesh.stage if not any(splits) else 1
        return _first_blocks(layers, mesh.stage, schedule, chunks, splits)

    def _overhead_s(self, mesh: Layout, variant: Variant) -> float:
        """Seconds of a tick besides its blocks, without ZeRO's."""
        execution = self._like.execution
        if not (execution.lock_step and execution.shared_ends):
            return self._head_s(mesh, variant)
        # Links over `stage` and `tensor` do not depend on the axes outside.
        inner = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        key = (inner, self._tokens(mesh, variant), variant.sequence_parallel)
        if key not in self._overheads:
            plain = layout_variant(_PLAIN)._replace(
                microbatches=variant.microbatches,
                sequence_parallel=variant.sequence_parallel,
                zero=1,
            )
            time = tick_overhead(self.run(replace(mesh, zero_axes=()), plain))
            self._overheads[key] = time.forward.total_s + time.backward.total_s
        return self._overheads[key]

    def _head_s(self, mesh: Layout, variant: Variant) -> float:
        """Seconds of the matmuls of the logits in one tick."""
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
        """Return all that a block's cost depends on, except its remat policy."""
        return (
            *(mesh.tensor, mesh.expert, mesh.context, self._tokens(mesh, variant)),
            variant.sequence_parallel,
            # Kept in slots; collectives that take turns with those of stages.
            mesh.stage > 1 or variant.microbatches > 1,
            mesh.stage > 1 and mesh.tensor > 1,
        )

    def _block_times(
        self, mesh: Layout, variant: Variant, remat: str, key: tuple
    ) -> tuple[_BlockTime, ...]:
        if (key, remat) not in self._times:
            run = self.run(mesh, variant._replace(remat=remat))
            times = [block_time(run, moe=moe) for moe, _ in self._kinds]
            self._times[key, remat] = tuple(
                _BlockTime(time.spare_s, (time.forward.total_s, time.backward.total_s))
                for time in times
            )
        return self._times[key, remat]

    def _block_memories(
        self, mesh: Layout, variant: Variant, key: tuple
    ) -> tuple[_BlockMemory, ...]:
        key = key, variant.remat
        if key not in self._memories:
            run = self.run(mesh, variant)
            inputs, memories = stage_input_bytes(run), []
            for moe, _ in self._kinds:
                again = everything_bytes(run, moe=moe) - in_chunks_bytes(run, moe=moe)
                inner = again if variant.remat == "stage" else inputs
                kept = kept_bytes(run, moe=moe)
                memories.append(_BlockMemory(kept, again, inputs, inner))
            self._memories[key] = tuple(memories)
        return self._memories[key]

    def _step_cost(self, mesh: Layout, variant: Variant) -> _StepCost:
        """Return the shared costs of one layout."""
        stored = (variant.param_dtype, variant.optimizer_memory, variant.splits)
        key = _shared_by(mesh, variant), variant.zero, variant.fsdp_gather, stored
        if key not in self._step_costs:
            if not any(variant.splits):
                variant = variant._replace(schedule=_PLAIN.schedule, chunks=1)
            run = self.run(mesh, variant)
            self._step_costs[key] = _step_cost(run, [moe for moe, _ in self._kinds])
        return self._step_costs[key]

    def _least_step_cost(
        self, mesh: Layout, like: Variant, choices: MeshChoices
    ) -> _StepCost:
        """Return the least of each shared cost over all of the choices."""
        key = _shared_by(mesh, like), choices.states, choices.schedules
        if key in self._least_step_costs:
            return self._least_step_costs[key]
        costs = []
        one_of_each_split = {one[2]: one for one in choices.schedules}
        for state, scheduled in product(choices.states, one_of_each_split.values()):
            even = (_PLAIN.schedule, 1, ())
            name, chunks, splits = scheduled if any(scheduled[2]) else even
            variant = like.with_state(state)
            variant = variant._replace(schedule=name, chunks=chunks, splits=splits)
            costs.append(self._step_cost(mesh, variant))
        state_bytes, once_s, gathers_s, bare_s = zip(*costs, strict=True)
        least_s, least_bare_s = (
            tuple(
                tuple(map(min, zip(*kind, strict=True)))
                for kind in zip(*each, strict=True)
            )
            for each in (gathers_s, bare_s)
        )
        least = _StepCost(min(state_bytes), min(once_s), least_s, least_bare_s)
        self._least_step_costs[key] = least
        return least


def _remats_to_try(shared: _StepCost, choices: MeshChoices) -> tuple[str, ...]:
    """Return the fastest policy; all if computing more may hide more of the weights.

    What keeps more puts more on its stack, which a backward that waits for weights does
    not win back.
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


@lru_cache(maxsize=4096)
def _first_blocks(
    layers: int, ranks: int, schedule: str, chunks: int, splits: tuple[int, ...]
) -> int:
    """Return the number of blocks of the first rank's stages."""
    sizes = stage_sizes(layers, ranks, chunks, splits)
    return sum(sizes[at] for at in SCHEDULES[schedule].stages_of(0, ranks, chunks))


def _shared_by(mesh: Layout, variant: Variant) -> tuple:
    """Return what a step's shared costs depend on, except its states and splits.

    Mesh sizes; whether it runs in ticks; else whether parts of the batch may hide what
    moves weights.
    """
    in_ticks = mesh.stage > 1 or variant.microbatches > 1
    sizes = (mesh.data, mesh.fsdp, mesh.stage, mesh.context, mesh.expert, mesh.tensor)
    return sizes, in_ticks, not in_ticks and variant.sequence_parallel


def _step_cost(run: Run, kinds: list[bool]) -> _StepCost:
    """Shared costs of a run whose kinds of blocks have routed experts or not."""
    layout, parameters = run.layout, rank_parameters(run, 0)
    own = shared_out(run, 0)
    whole = layout.zero == 3 and run.gathers_once
    weight_bytes, state_bytes = stored_bytes(run)
    if layout.optimizer_memory == "host":
        state_bytes = 0
    state = sum(
        each * (own if layout.zero >= level else parameters)
        for each, level in (
            (weight_bytes, 3),
            (run.execution.gradient_bytes, 4 if whole else 2),
            (state_bytes, 1),
        )
    )
    state += least_working_bytes(run, 0)
    hides = {BLOCKS: math.inf}
    if run.execution.reduction_overlap:
        hides[LAST_BACKWARD] = math.inf
    if run.execution.update_overlap:
        hides[NEXT_FORWARD] = math.inf
    waits_s = exposed(run, step_rows(run, ranks=(0,)), hides).exposed_s
    once_s = memory_s(run, own * update_bytes(run)) + sum(waits_s.values())
    gather_s, bare_s = [], []
    for moe in kinds:
        seconds = {"forward": 0.0, "backward": 0.0}
        bare = dict(seconds)
        for row in weight_rows(run, moe=moe):
            own_s = row_s(run, row)
            seconds[row.passes] += own_s
            bare[row.passes] += own_s * (1 - row.share)
        gather_s.append((seconds["forward"], seconds["backward"]))
        bare_s.append((bare["forward"], bare["backward"]))
    return _StepCost(state, once_s, tuple(gather_s), tuple(bare_s))
