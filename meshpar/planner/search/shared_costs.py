"""Costs that many layouts share, cached: of a block, and of a step besides its blocks.

The cost of a block does not depend on the mesh axes outside it, so that a few hundred
blocks serve a hundred thousand layouts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import compress, product
from typing import Any, NamedTuple

import numpy as np

from meshpar.layout import STAGE_REMATS, Layout
from meshpar.planner.cost.activations import (
    kept_bytes,
    stage_input_bytes,
    stash_bytes,
)
from meshpar.planner.cost.block_time import BlockWork
from meshpar.planner.cost.memory import least_state_bytes
from meshpar.planner.cost.pipeline_time import Ticks
from meshpar.planner.cost.run import (
    Run,
    shared_out,
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
from meshpar.planner.cost.step_time import tick_overhead
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import weight_rows
from meshpar.planner.cost.workspace import recomputed_bytes
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.space import (
    Scheduled,
    State,
    Variant,
    layout_variant,
    with_variant,
)
from meshpar.planner.workload.problems import layout_stage_blocks

_PLAIN = Layout()
_MANY_TICKS = Ticks(10**9, 10**9)

Array = np.ndarray[Any, np.dtype[np.float64]]


class BlockTimes(NamedTuple):
    """Seconds of one microbatch on one device, without FSDP's traffic.

    Arrays over kinds of blocks, over forward and backward (but of `late_s`), and over
    remat policies. `late_s` is the part of the backward that is W where backwards are
    split.
    """

    spare_s: Array
    total_s: Array
    late_s: Array


class BlockMemory(NamedTuple):
    """Bytes of one microbatch on one device, at least; arrays over remat policies.

    Args:
        per_block: For each block of a rank and each microbatch that it holds.
        per_stage: For each microbatch that a rank holds.
        per_own: For each block of a chunk, while its stage is recomputed, or until its
            weight gradient.
        working: While a block is recomputed.
    """

    per_block: Array
    per_stage: Array
    per_own: Array
    working: Array


class StepCost(NamedTuple):
    """Seconds of a step that all variants of a mesh shape share, in several states.

    Args:
        once_s: Gradient reduction and optimizer.
        gather_s: FSDP's traffic: an array over states, as the others are, over kinds of
            blocks, over the forward and the backward, and of 1 for all remat policies.
        bare_s: The part of it that no work hides, however long that takes.
    """

    once_s: Array
    gather_s: Array
    bare_s: Array


class SharedCosts:
    """Cached costs of blocks and steps of one workload, cluster and batch.

    Args:
        run: Any run of them, for its workload, cluster, execution and batch.
    """

    def __init__(self, run: Run) -> None:
        self._like = run
        kinds = run.workload.block_kinds
        self.kinds = tuple((kind, count) for kind, count in kinds if count)
        """True for routed experts, and the number of such blocks."""
        no_s = np.zeros((1, len(self.kinds), 2, 1))
        self.no_cost = StepCost(np.zeros(1), no_s, no_s)
        """Costs of a step that only runs its blocks."""
        self._blocks: dict[tuple, _Blocks] = {}
        self._steps: dict[tuple, _Step] = {}
        self._all_steps: dict[tuple, Steps] = {}
        self._overheads: dict[tuple, float] = {}

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant."""
        layout = with_variant(mesh, variant)
        blocks = layout_stage_blocks(self._like.workload, layout)
        return replace(self._like, layout=layout, stage_blocks=blocks)

    def overhead_s(self, mesh: Layout, variant: Variant) -> float:
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
                data=mesh.data,
                fsdp=mesh.fsdp,
                zero=1,
            )
            time = tick_overhead(self.run(mesh, plain))
            self._overheads[key] = time.forward.total_s + time.backward.total_s
        return self._overheads[key]

    def _head_s(self, mesh: Layout, variant: Variant) -> float:
        """Seconds of the matmuls of the logits in one tick."""
        like = self._like
        workload, device = like.workload, like.cluster.device
        flops = 6 * self._tokens(mesh, variant) * workload.hidden * workload.vocab
        peak = device.peak_flops[mesh.precision] * like.matmul_fraction
        return flops / peak / mesh.tensor / mesh.stage / variant.chunks

    def _tokens(self, mesh: Layout, variant: Variant) -> int:
        examples = self.examples(mesh, variant.microbatches)
        return examples * self._like.seq // mesh.context

    def examples(self, mesh: Layout, microbatches: int) -> int:
        """Return the examples of one microbatch on one device."""
        replicas = mesh.data * mesh.fsdp * mesh.expert * microbatches
        return self._like.global_batch // replicas

    def blocks(self, mesh: Layout, variant: Variant) -> _Blocks:
        """Return the costs of blocks, by all that these depend on but their remat."""
        key = (
            *(mesh.tensor, mesh.expert, mesh.context, self._tokens(mesh, variant)),
            variant.sequence_parallel,
            # Kept in slots; collectives that take turns with those of stages.
            mesh.stage > 1 or variant.microbatches > 1,
            mesh.stage > 1 and mesh.tensor > 1,
            mesh.stage > 1 and variant.splits_backward,
            variant.execution == "divergent",
            # Repacked for the collectives of ZeRO-3.
            self._like.execution.repacks and (variant.zero, variant.data, variant.fsdp),
        )
        if key not in self._blocks:
            # In a step of many ticks most of what experts send is hidden.
            run = replace(self.run(mesh, variant), ticks=_MANY_TICKS)
            self._blocks[key] = _Blocks(run, [moe for moe, _ in self.kinds])
        return self._blocks[key]

    def step(self, mesh: Layout, variant: Variant) -> Steps:
        """Return the shared costs of one layout."""
        state, split = variant.state, _split(variant.scheduled)
        return Steps((self._step(mesh, variant, state, split),))

    def steps(self, mesh: Layout, like: Variant, choices: MeshChoices) -> Steps:
        """Return the shared costs of all states and splits of the choices."""
        key = self._shared_by(mesh, like), choices.states, choices.schedules
        if key not in self._all_steps:
            splits = dict.fromkeys(map(_split, choices.schedules))
            self._all_steps[key] = Steps(
                tuple(
                    self._step(mesh, like, state, split)
                    for state, split in product(choices.states, splits)
                )
            )
        return self._all_steps[key]

    def _step(
        self, mesh: Layout, like: Variant, state: State, split: Scheduled
    ) -> _Step:
        key = self._shared_by(mesh, like), state, split
        if key not in self._steps:
            kinds = [moe for moe, _ in self.kinds]
            variant = like.with_state(state)._replace(**split._asdict())
            self._steps[key] = _Step(self.run(mesh, variant), kinds)
        return self._steps[key]

    def _shared_by(self, mesh: Layout, variant: Variant) -> tuple:
        """Return what a step's shared costs depend on, except its states and splits.

        Mesh sizes but those of replicas; whether it runs in ticks; whether parts of the
        batch may hide what moves weights.
        """
        in_ticks = mesh.stage > 1 or variant.microbatches > 1
        sizes = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        examples = self.examples(mesh, variant.microbatches)
        num_parts = self._like.platform.num_batch_parts(
            examples, self._tokens(mesh, variant)
        )
        in_parts = variant.sequence_parallel and num_parts > 1
        return sizes, in_ticks, in_parts


def _split(one: Scheduled) -> Scheduled:
    """Return the same for all schedules whose first ranks have the same blocks."""
    plain = Scheduled(_PLAIN.schedule, 1, (), execution=one.execution)
    if not any(one.splits):
        return plain
    if one.chunks == 1:
        return plain._replace(splits=one.splits)
    return one._replace(max_pending_w=0)


class Steps:
    """Shared costs of steps in several states; times only of those that may fit."""

    def __init__(self, steps: tuple[_Step, ...]) -> None:
        self._steps = steps
        self._costs: dict[bytes, StepCost] = {}
        self.state_bytes: Array = np.array([one.state_bytes for one in steps])
        """Parameters, gradients, optimizer state, and what the backward needs besides
        of them, in each state."""

    def costs(self, mask: np.ndarray) -> StepCost:
        """Return the seconds of some of the states."""
        key = mask.tobytes()
        if key not in self._costs:
            costs = (one.cost for one in compress(self._steps, mask))
            columns = zip(*costs, strict=True)
            self._costs[key] = StepCost(*map(np.concatenate, columns))
        return self._costs[key]


class _Step:
    """Costs of a step in one state, each computed once.

    Args:
        run: A run of it.
        kinds: True for each kind of block that has routed experts.
    """

    def __init__(self, run: Run, kinds: list[bool]) -> None:
        self._run, self._kinds = run, kinds

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the state, at least."""
        return least_state_bytes(self._run, 0)

    @cached_property
    def cost(self) -> StepCost:
        """Seconds of the step, in arrays of one state."""
        return _step_cost(self._run, self._kinds)


class _Blocks:
    """Costs of blocks under remat policies, each computed once.

    Args:
        run: A run of the blocks, of any policy.
        kinds: True for each kind of block that has routed experts.
    """

    def __init__(self, run: Run, kinds: list[bool]) -> None:
        layout = replace(run.layout, remat=_PLAIN.remat)
        self._run, self._kinds = replace(run, layout=layout), kinds
        self._each_work: dict[bool, list[BlockWork]] = {}
        self._times: dict[str, tuple] = {}
        self._memories: dict[str, tuple[float, ...]] = {}
        self._tables: dict[tuple[str, ...], BlockTimes] = {}
        self._memory_tables: dict[tuple[str, ...], BlockMemory] = {}

    def _works(self, *, recomputes_stage: bool) -> list[BlockWork]:
        """Return the work of blocks, which differs where whole stages run again."""
        if recomputes_stage not in self._each_work:
            remat = STAGE_REMATS[0] if recomputes_stage else _PLAIN.remat
            run = replace(self._run, layout=replace(self._run.layout, remat=remat))
            works = [BlockWork(run, moe=moe) for moe in self._kinds]
            self._each_work[recomputes_stage] = works
        return self._each_work[recomputes_stage]

    @cached_property
    def least_s(self) -> Array:
        """Seconds under any policy: an array over kinds, over forward and backward."""
        ways = (False, True) if self._run.pairs_ticks else (False,)
        works = [self._works(recomputes_stage=way) for way in ways]
        return np.min([[work.least_s for work in each] for each in works], axis=0)

    def times(self, remats: tuple[str, ...]) -> BlockTimes:
        """Return the times under each of these policies."""
        if remats not in self._tables:
            for remat in remats:
                if remat not in self._times:
                    staged = self._run.pairs_ticks and remat in STAGE_REMATS
                    works = self._works(recomputes_stage=staged)
                    each = (self._block_times(work, remat) for work in works)
                    self._times[remat] = tuple(zip(*each, strict=True))
            columns = zip(*map(self._times.__getitem__, remats), strict=True)
            tables = (np.moveaxis(np.array(one), 0, -1) for one in columns)
            self._tables[remats] = BlockTimes(*tables)
        return self._tables[remats]

    def _block_times(self, work: BlockWork, remat: str) -> tuple:
        time = work.time(remat)
        backward_s, late_s = time.backward.total_s, 0.0
        if self._run.splits_backward:
            input_grad, weight_grad = time.split_backward
            late_s = weight_grad.total_s
            backward_s = input_grad.total_s + late_s
        return time.spare_s, (time.forward.total_s, backward_s), late_s

    def memories(self, remats: tuple[str, ...]) -> BlockMemory:
        """Return the bytes under each of these policies."""
        if remats not in self._memory_tables:
            for remat in remats:
                if remat not in self._memories:
                    self._memories[remat] = self._block_memory(remat)
            columns = zip(*map(self._memories.__getitem__, remats), strict=True)
            self._memory_tables[remats] = BlockMemory(*map(np.array, columns))
        return self._memory_tables[remats]

    def _block_memory(self, remat: str) -> tuple[float, ...]:
        """Return the least of each number of `BlockMemory` over kinds of blocks."""
        run, kinds = self._run, self._kinds
        inputs, compiled = stage_input_bytes(run), not run.execution.eager
        again = min(recomputed_bytes(run, moe=moe, remat=remat) for moe in kinds)
        per_own = min(stash_bytes(run, moe=moe, remat=remat) for moe in kinds)
        working = again if compiled and remat != "none" else 0.0
        if remat not in STAGE_REMATS:
            kept = min(kept_bytes(run, moe=moe, remat=remat) for moe in kinds)
            return kept, 0.0, per_own, working
        if compiled:
            # All inputs wait as well, or all that its blocks keep.
            per_own += again if remat == "stage" else inputs
        return 0.0, inputs, per_own, working


def _step_cost(run: Run, kinds: list[bool]) -> StepCost:
    """Seconds of a step of a run whose kinds of blocks have routed experts or not."""
    hides = {BLOCKS: math.inf}
    late = run.prefetches or run.reduces_in_last_microbatch
    if run.execution.reduction_overlap or late:
        hides[LAST_BACKWARD] = math.inf
    if run.execution.update_overlap or run.prefetches:
        hides[NEXT_FORWARD] = math.inf
    waits_s = exposed(run, step_rows(run, ranks=(0,)), hides).exposed_s
    own = shared_out(run, 0)
    once_s = memory_s(run, own * update_bytes(run)) + sum(waits_s.values())
    gather_s, bare_s = [], []
    for moe in kinds:
        seconds = {"forward": 0.0, "backward": 0.0}
        bare = dict(seconds)
        for row in weight_rows(run, moe=moe):
            own_s = row_s(run, row)
            way = "forward" if row.passes == "forward" else "backward"
            seconds[way] += own_s
            bare[way] += own_s * (1 - row.share)
        gather_s.append((seconds["forward"], seconds["backward"]))
        bare_s.append((bare["forward"], bare["backward"]))
    of_kinds = (np.array(each)[None, :, :, None] for each in (gather_s, bare_s))
    return StepCost(np.array([once_s]), *of_kinds)
