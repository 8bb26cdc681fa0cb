"""Choices: how a mesh shape may be run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, STAGE_REMATS, ZERO_AXES, Layout
from meshpar.layout.layout import ATTENTION_MIXED, BLOCK_INPUT
from meshpar.layout.requirements import own_collective
from meshpar.planner.cost.activations import OF_MATMULS
from meshpar.planner.cost.memory import fullest_memory, least_state_bytes
from meshpar.planner.cost.run import Run
from meshpar.planner.search.method import with_method
from meshpar.planner.search.space import (
    Constraints,
    Scheduled,
    Splits,
    State,
    Variant,
    chunk_counts,
    divisors,
    mesh_layouts,
    with_variant,
)
from meshpar.planner.search.states import LARGE_STATE, mesh_states, state_share
from meshpar.planner.workload.problems import (
    layout_stage_blocks,
    residual_names,
)
from meshpar.schedules import SCHEDULES, plan_refusal
from meshpar.schedules.stage_splits import split_evenly

_PLAIN = Layout()
_MOST_SPLIT_RANKS = 16
"""Most ranks of split backwards that a search considers, unless their schedule is kept:
they are replayed, and 16 ranks take a tenth of a second."""

# What computes again least, and keeps most, comes first.
_WORDS = ("none", "selective", "dots")

_OF_ROUTED = ("attention_qkv", "attention_out", "experts_gate_up")
"""`OF_MATMULS` for blocks with routed experts; a shared expert's matmuls are small."""


class MeshChoices(NamedTuple):
    """Values of each key of a layout that its mesh shape leaves open.

    Args:
        ranks: Ranks of the pipeline.
        one_is_two: True if ZeRO-1 is ZeRO-2 in a step without ticks, whose blocks
            scatter their gradients either way.
        microbatches: Numbers of microbatches.
        schedules: Schedules, each with chunks and splits; not every one exists for
            every number of microbatches.
        states: Ways to lay replicas out and to keep parameters and optimizer state.
        sequence_parallel: Values of it.
        remats: Values of `remat`, those first that compute least again.
    """

    ranks: int
    one_is_two: bool
    microbatches: tuple[int, ...]
    schedules: tuple[Scheduled, ...]
    states: tuple[State, ...]
    sequence_parallel: tuple[bool, ...]
    remats: tuple[str, ...]

    @property
    def num_variants(self) -> int:
        """Number of ways to run the mesh shape."""
        total = 0
        for part in self._by_ticks():
            scheduled = _num_scheduled(part.ranks, part.microbatches, part.schedules)
            total += scheduled * len(part.states) * len(part.remats)
        return total * len(self.sequence_parallel)

    @property
    def splits_backward(self) -> bool:
        """True if the backwards of its schedules are split (`by_backwards`)."""
        return self.ranks > 1 and self.schedules[0].splits_backward

    @property
    def is_one(self) -> bool:
        """True if there is at most one value for every key."""
        return max(map(len, self[2:])) == 1

    @property
    def only_remats(self) -> bool:
        """True if there is at most one value for every key but `remat`."""
        return max(map(len, self[2:-1])) == 1

    def variants(self) -> Iterator[Variant]:
        """Yield every way to run the mesh shape."""
        for part in map(self.with_microbatches, self.microbatches):
            (count,) = part.microbatches
            for scheduled, state, sequence, remat in product(
                part._scheduled(count),
                part.states,
                part.sequence_parallel,
                part.remats,
            ):
                values: tuple[Any, ...] = (count, *scheduled, *state, sequence, remat)
                yield Variant(*values)

    def with_sequence_parallel(self, variant: Variant) -> list[Variant]:
        """Return the variant with each value of `sequence_parallel`."""
        return [
            variant._replace(sequence_parallel=one) for one in self.sequence_parallel
        ]

    def with_microbatches(self, *counts: int) -> MeshChoices:
        """Return the choices that these leave: all run in ticks, or none do."""
        in_ticks = self.ranks > 1 or counts[0] > 1
        if in_ticks:
            # In ticks residuals wait in slots on the device (`layout_errors`).
            remats = tuple(one for one in self.remats if "offload:" not in one)
            return self._replace(microbatches=counts, remats=remats)
        # A single microbatch's gather or scatter is the step's.
        states = tuple(
            state
            for state in self.states
            if state.fsdp_gather == _PLAIN.fsdp_gather
            and not (state.zero == 2 and self.one_is_two)
        )
        return self._replace(microbatches=counts, states=states)

    def _by_ticks(self) -> Iterator[MeshChoices]:
        """Yield those that run in a single tick, and those that run in several."""
        one_tick = (1,) if self.ranks == 1 and 1 in self.microbatches else ()
        several = tuple(one for one in self.microbatches if one not in one_tick)
        for counts in filter(None, (one_tick, several)):
            yield self.with_microbatches(*counts)

    def _scheduled(self, count: int) -> Iterator[Scheduled]:
        """Yield the schedules that exist for so many microbatches."""
        for one in self.schedules:
            if self.ranks == 1 or _exists(one.schedule, self.ranks, count, one.chunks):
                yield one

    def groups(self) -> Iterator[MeshChoices]:
        """Yield those of whole and of split backwards, and of one and several ticks."""
        for splits in (False, True):
            own = [one for one in self.schedules if one.splits_backward == splits]
            if own:
                for part in self._replace(schedules=tuple(own))._by_ticks():
                    if part.num_variants:
                        yield part

    @property
    def open_key(self) -> str:
        """The key that `parts` opens: the first that has several values."""
        return next((key for key in _OPENED if len(getattr(self, key)) > 1), "")

    def parts(self) -> Iterator[tuple[int, MeshChoices, int]]:
        """Yield parts of an open key's values: the place of their first, their choices.

        And their number of variants. Microbatches are halved, other keys taken apart.
        """
        key = self.open_key
        values = getattr(self, key)
        size = math.ceil(len(values) / 2) if key == "microbatches" else 1
        for place in range(0, len(values), size):
            opened: dict[str, Any] = {key: values[place : place + size]}
            part = self._replace(**opened)
            number = part.num_variants
            if number:
                yield place, part, number


_OPENED = ("sequence_parallel", "microbatches", "states", "schedules", "remats")
"""Keys in the order in which a search opens them; `remats` are bounded together."""


@lru_cache(maxsize=4096)
def _num_scheduled(
    ranks: int, counts: tuple[int, ...], schedules: tuple[Scheduled, ...]
) -> int:
    """Return the pairs of a schedule and a number of microbatches that exist."""
    if ranks == 1:
        return len(counts) * len(schedules)
    return sum(
        _exists(one.schedule, ranks, count, one.chunks)
        for count in counts
        for one in schedules
    )


@lru_cache(maxsize=4096)
def _exists(schedule: str, ranks: int, microbatches: int, chunks: int) -> bool:
    return SCHEDULES[schedule].exists(ranks, microbatches, chunks)


def mesh_choices(like: Run, mesh: Layout, constraints: Constraints) -> MeshChoices:
    """Return the choices of a mesh shape that suits the run's workload.

    Inputs of blocks and optimizer state go to the host only where a device has no room
    for them though it computes all blocks again: elsewhere other residuals can go.
    """
    own = _own_choices(like, mesh, constraints)
    choices = _with_states(own, like, mesh, constraints, moves_more=False)
    if not _has_host(like) or not choices.num_variants:
        return choices
    more = _with_states(own, like, mesh, constraints, moves_more=True)
    if more == choices or _has_room(like, mesh, choices, constraints):
        return choices
    return more


def _has_room(
    like: Run, mesh: Layout, choices: MeshChoices, constraints: Constraints
) -> bool:
    """True if inputs of all blocks and optimizer state fit, in few microbatches.

    A pipeline may have its most microbatches, which it needs.
    """
    count = (min if mesh.stage == 1 else max)(choices.microbatches)
    part = choices.with_microbatches(count)
    first = next(part.variants())._replace(
        remat="full", sequence_parallel=choices.sequence_parallel[-1]
    )
    capacity_bytes = constraints.capacity_bytes(like.cluster.device)
    for state in part.states:
        layout = with_variant(mesh, first.with_state(state))
        blocks = layout_stage_blocks(like.workload, layout)
        run = replace(like, layout=layout, stage_blocks=blocks)
        if least_state_bytes(run, 0) > capacity_bytes:
            continue
        if fullest_memory(run).total_bytes <= capacity_bytes:
            return True
    return False


def _has_host(like: Run) -> bool:
    """True if what a device keeps can go to the host's memory."""
    is_host = platform_named(like.cluster.device.platform).is_host
    return not (like.execution.eager or is_host)


def _own_choices(like: Run, mesh: Layout, constraints: Constraints) -> MeshChoices:
    """Return the choices besides states and remat policies."""
    seq = like.seq
    each = like.global_batch // mesh.batch_shards
    counts = constraints.choices("microbatches", divisors(each))
    splits = mesh.tensor > 1 and seq % (mesh.tensor * mesh.context) == 0
    ahead = like.execution.measured_overlap and mesh.fsdp_prefetch != "off"
    return MeshChoices(
        ranks=mesh.stage,
        one_is_two=ahead and "zero" not in constraints.kept,
        microbatches=tuple(count for count in counts if each % count == 0),
        schedules=_schedules(like, mesh, constraints),
        states=(),
        sequence_parallel=constraints.choices(
            "sequence_parallel", (False, True) if splits else (False,)
        ),
        remats=(),
    )


def _with_states(
    own: MeshChoices,
    like: Run,
    mesh: Layout,
    constraints: Constraints,
    *,
    moves_more: bool,
) -> MeshChoices:
    """Return choices with their states and remat policies."""
    remats = _remats(like, mesh, has_host=_has_host(like), moves_more=moves_more)
    choices = own._replace(
        states=tuple(mesh_states(like, mesh, constraints, moves_more=moves_more)),
        remats=constraints.choices("remat", remats),
    )
    if len(choices.microbatches) == 1:
        return choices.with_microbatches(*choices.microbatches)
    return choices


def _remats(
    like: Run, mesh: Layout, *, has_host: bool, moves_more: bool
) -> tuple[str, ...]:
    """Return policies, from those that keep most to those that compute most again.

    Policies by name only mention residuals that spare a matmul, or all of attention:
    every way to keep some, move some to the host, and compute the others again. If it
    `moves_more`, the block's input goes there too, and then none is kept: to keep the
    input in its place is as good.
    """
    stage = STAGE_REMATS if mesh.stage > 1 else ()
    if like.execution.eager or like.workload.traced:
        return (*_WORDS, "full", *stage)
    log_sums = replace(like, layout=mesh).keeps_log_sums
    key = "remats", bool(stage), mesh.expert > 1, log_sums, has_host, moves_more
    if key not in like.known:
        to_host = has_host and not stage
        named = _named_remats(
            like, log_sums=log_sums, to_host=to_host, moves_more=moves_more
        )
        resends = (f"save:{BLOCK_INPUT}",) if mesh.expert > 1 else ()
        kept, without_input = named
        like.known[key] = (*_WORDS, *kept, "full", *resends, *without_input, *stage)
    return like.known[key]


def _named_remats(
    like: Run, *, log_sums: bool, to_host: bool, moves_more: bool
) -> tuple[list[str], list[str]]:
    """Return policies by name, and those that keep no input, least moved first."""
    makers = _OF_ROUTED if like.workload.experts else OF_MATMULS
    named_by_blocks = residual_names(like.workload)
    spared = [name for name in makers if name in named_by_blocks]
    matmuls = len(spared)
    if log_sums:
        spared.append(ATTENTION_MIXED)
    ways = ("", "save", "offload") if to_host else ("", "save")
    named, without_input = [], []
    for chosen in product(ways, repeat=len(spared)):
        names = {
            way: [name for name, its in zip(spared, chosen, strict=True) if its == way]
            for way in ways[1:]
        }
        text = "+".join(f"{way}:{'/'.join(its)}" for way, its in names.items() if its)
        if to_host and moves_more and not names["save"]:
            moved = (BLOCK_INPUT, *names["offload"])
            without_input.append(f"offload:{'/'.join(moved)}")
        # All matmuls saved is `dots`, and none is `full`.
        if text and names["save"] != spared[:matmuls]:
            named.append(text)
    return named, without_input[::-1]


def _schedules(
    like: Run, mesh: Layout, constraints: Constraints
) -> tuple[Scheduled, ...]:
    apart = own_collective(mesh) is None
    key = "schedules", mesh.stage, apart, tuple(constraints.kept.items())
    if key not in like.known:
        like.known[key] = tuple(_every_schedule(like, mesh, constraints))
    return like.known[key]


def _every_schedule(
    like: Run, mesh: Layout, constraints: Constraints
) -> Iterator[Scheduled]:
    if mesh.stage == 1:
        if not mesh.splits:
            yield Scheduled(mesh.schedule, mesh.chunks, ())
        return
    # A schedule that another one beats is considered only if it is kept.
    searched = tuple(
        name
        for name, method in SCHEDULES.items()
        if method.no_better_than is None and plan_refusal(name) is None
    )
    several = chunk_counts(like.workload.layers, mesh.stage)
    for name in constraints.choices("schedule", searched):
        method = SCHEDULES[name]
        has_one = method.num_chunks == 1
        for chunks in constraints.choices("chunks", (1,) if has_one else several):
            # With one chunk a schedule of several is another schedule.
            if (chunks == 1) == has_one and method.has_chunks(chunks):
                stages = mesh.stage * chunks
                others = tuple(_splits(like, mesh)) if chunks == 1 else ()
                for splits in constraints.choices("splits", ((), *others)):
                    if splits in ((), BY_COST) or len(splits) == stages:
                        yield from _ways(like, mesh, constraints, name, chunks, splits)


def _ways(
    like: Run,
    mesh: Layout,
    constraints: Constraints,
    name: str,
    chunks: int,
    splits: Splits,
) -> Iterator[Scheduled]:
    """Yield a schedule in every execution.

    Ranks diverge only where a block has no collective of its own. What may wait is
    limited later, if a layout does not fit (`fitted`).
    """
    method, kept = SCHEDULES[name], constraints.kept
    limit = kept.get("max_pending_w", 0)
    executions: tuple[str, ...] = (_PLAIN.execution,)
    if method.splits_backward and like.execution.lock_step:
        apart = own_collective(mesh) is None
        executions = ("uniform", "divergent") if apart else ("uniform",)
    if "schedule" not in kept:
        if method.splits_backward and mesh.stage > _MOST_SPLIT_RANKS:
            return
        if limit and not method.splits_backward:
            return
    fixed = kept.get("execution", _PLAIN.execution)
    if fixed != _PLAIN.execution:
        executions = (fixed,)
    for execution in executions:
        left_out = execution == "uniform" and method.for_divergent
        if not left_out or "schedule" in kept:
            yield Scheduled(name, chunks, splits, limit, execution)


def _splits(like: Run, mesh: Layout) -> Iterator[Splits]:
    """Yield splits other than the even one that may be faster or smaller.

    By cost if layers differ in cost. If layers do not divide: with the shorter stages
    first, whose ranks hold most microbatches; and with the shorter ones at both ends,
    if the program has embedding and head there.
    """
    workload, stages = like.workload, mesh.stage
    if stages > workload.layers:
        return
    even = split_evenly(workload.layers, stages)
    by_cost = replace(_PLAIN, stage=stages, splits=BY_COST)
    if workload.dense_layers and layout_stage_blocks(workload, by_cost) != even:
        yield BY_COST
    longer = even.count(even[0])
    if longer == stages:
        return
    yield even[::-1]
    if not like.execution.shared_ends:
        before = (stages - longer) // 2
        yield (*even[longer:][:before], *even[:longer], *even[longer:][before:])


def searched_meshes(like: Run, constraints: Constraints) -> Iterator[Layout]:
    """Yield every mesh shape with its attention method and values of `zero_axes`.

    Those with `context` are added only where optimizer state would otherwise fill more
    than `LARGE_STATE` of a device: all axes that split tokens, and `context` alone.
    """
    are_free = not {"zero_axes", "sync_every"} & constraints.kept.keys()
    for mesh in mesh_layouts(like.cluster.num_devices, constraints):
        mesh = with_method(mesh, like, constraints)
        yield mesh
        if not (are_free and mesh.zero and mesh.context > 1):
            continue
        sizes = mesh.mesh_shape
        splits = math.prod(sizes[axis] for axis in replace(mesh, zero=1).split_axes)
        if state_share(like, mesh, splits) > LARGE_STATE:
            every = tuple(axis for axis in ZERO_AXES if sizes[axis] > 1)
            for names in dict.fromkeys((every, ("context",))):
                yield replace(mesh, zero_axes=names)
