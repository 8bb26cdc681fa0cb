"""Mesh choices: what a mesh shape leaves to choose, and what of it is worth trying."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product, repeat
from typing import Any, NamedTuple

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BY_COST, STAGE_REMATS, Layout
from meshpar.planner.cost.run import Run
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.search.refusals import residual_names_of, stage_blocks_of
from meshpar.planner.search.space import (
    Scheduled,
    Splits,
    State,
    Variant,
    chunk_counts,
    divisors,
)
from meshpar.planner.workload.activations import OF_MATMULS
from meshpar.schedules import SCHEDULES, step_refusal
from meshpar.schedules.stage_splits import split_evenly

_PLAIN = Layout()
# What computes again least, and keeps most, comes first.
_WORDS = ("none", "selective", "dots")
_OF_ROUTED = ("attention_qkv", "attention_out", "experts_gate_up")
"""`OF_MATMULS` of blocks with routed experts; a shared expert's matmuls are small."""


class MeshChoices(NamedTuple):
    """What a mesh shape leaves to choose.

    Args:
        ranks: Its pipeline's.
        microbatches: Their numbers.
        schedules: Schedules, each with chunks and splits; not all exist for all
            microbatches.
        states: What ZeRO splits, when it gathers, how parameters are stored and where
            the optimizer's state lies.
        sequence_parallel: Whether the residual stream is split.
        remats: What is computed again, least of it first.
    """

    ranks: int
    microbatches: tuple[int, ...]
    schedules: tuple[Scheduled, ...]
    states: tuple[State, ...]
    sequence_parallel: tuple[bool, ...]
    remats: tuple[str, ...]

    @property
    def num_variants(self) -> int:
        """Ways to run the mesh shape."""
        return len(self.sequence_parallel) * sum(
            sum(1 for _ in self._scheduled(count))
            * sum(map(self._has_state, self.states, repeat(count)))
            * sum(map(self._has_remat, self.remats, repeat(count)))
            for count in self.microbatches
        )

    @property
    def is_one(self) -> bool:
        """Whether nothing is left to choose."""
        return max(map(len, self[1:])) == 1

    def variants(self) -> Iterator[Variant]:
        """Every way to run the mesh shape."""
        for part in map(self.with_microbatches, self.microbatches):
            (count,) = part.microbatches
            for (name, chunks, splits), state, sequence, remat in product(
                part._scheduled(count),
                part.states,
                part.sequence_parallel,
                part.remats,
            ):
                how = (name, chunks, splits, *state)
                yield Variant(count, *how, sequence, remat)

    def with_microbatches(self, count: int) -> MeshChoices:
        """The choices that so many leave."""
        return self._replace(
            microbatches=(count,),
            states=tuple(one for one in self.states if self._has_state(one, count)),
            remats=tuple(one for one in self.remats if self._has_remat(one, count)),
        )

    def _has_state(self, state: State, count: int) -> bool:
        """Without microbatches, a microbatch's gather is the step's."""
        return self.ranks > 1 or count > 1 or state[1] == _PLAIN.fsdp_gather

    def _has_remat(self, remat: str, count: int) -> bool:
        """With them, residuals wait in slots on the device (`layout_errors`)."""
        return "offload:" not in remat or (self.ranks == 1 and count == 1)

    def _scheduled(self, count: int) -> Iterator[Scheduled]:
        """The schedules that exist for so many microbatches."""
        for name, chunks, splits in self.schedules:
            if self.ranks == 1 or _exists(name, self.ranks, count, chunks):
                yield name, chunks, splits

    def parts(self) -> Iterator[tuple[MeshChoices, int]]:
        """The same choices apart, by the first that is open, and how many each is."""
        key = next(key for key in _OPENED if len(getattr(self, key)) > 1)
        for value in getattr(self, key):
            opened: dict[str, Any] = {key: (value,)}
            part = self._replace(**opened)
            if key == "microbatches":
                part = part.with_microbatches(*part.microbatches)
            number = part.num_variants
            if number:
                yield part, number


# Those that bounds tell most of come first.
_OPENED = (
    "microbatches",
    "states",
    "remats",
    "sequence_parallel",
    "schedules",
)


@lru_cache(maxsize=4096)
def _exists(schedule: str, ranks: int, microbatches: int, chunks: int) -> bool:
    return SCHEDULES[schedule].exists(ranks, microbatches, chunks)


def choices_of(like: Run, mesh: Layout, constraints: Constraints) -> MeshChoices:
    """The choices of a mesh shape whose axes suit the run's workload; maybe none."""
    seq = like.seq
    each = like.global_batch // mesh.batch_shards
    counts = constraints.choices("microbatches", divisors(each))
    splits = mesh.tensor > 1 and seq % (mesh.tensor * mesh.context) == 0
    compiled = not like.execution.eager
    is_host = platform_named(like.cluster.device.platform).is_host
    has_host = compiled and not is_host
    choices = MeshChoices(
        ranks=mesh.stage,
        microbatches=tuple(count for count in counts if each % count == 0),
        schedules=tuple(_schedules(like, mesh, constraints)),
        states=tuple(_states(like, mesh, constraints)),
        sequence_parallel=constraints.choices(
            "sequence_parallel", (False, True) if splits else (False,)
        ),
        remats=constraints.choices("remat", _remats(like, mesh, has_host=has_host)),
    )
    if len(choices.microbatches) == 1:
        return choices.with_microbatches(*choices.microbatches)
    return choices


def _remats(like: Run, mesh: Layout, *, has_host: bool) -> tuple[str, ...]:
    """Policies, least of what they compute again first, least of what they keep last.

    Of residuals with names those alone that spare a matmul: every way to keep some of
    them, move some to the host, and make the others again.
    """
    stage = STAGE_REMATS if mesh.stage > 1 else ()
    if like.execution.eager or like.workload.traced:
        return (*_WORDS, "full", *stage)
    known = residual_names_of(like.workload)
    makers = _OF_ROUTED if like.workload.experts else OF_MATMULS
    spared = [name for name in makers if name in known]
    ways = ("", "save", "offload") if has_host and mesh.stage == 1 else ("", "save")
    named = []
    for chosen in product(ways, repeat=len(spared)):
        of_way = {
            way: [name for name, its in zip(spared, chosen, strict=True) if its == way]
            for way in ways[1:]
        }
        text = "+".join(f"{way}:{'/'.join(of)}" for way, of in of_way.items() if of)
        # All saved is `dots`, and none is `full`.
        if text and len(of_way["save"]) < len(spared):
            named.append(text)
    return (*_WORDS, *named, "full", *stage)


def _states(like: Run, mesh: Layout, constraints: Constraints) -> Iterator[State]:
    """What ZeRO splits, when it gathers, how parameters are stored, and state where.

    Of two that are the same (ZeRO-1 over `data` or over `fsdp` alone) one is left out;
    so is what cannot help: parameters of 16 bits where they are split, whose master
    makes them larger.
    """
    workload = like.workload
    if mesh.zero_axes or "zero" in constraints.kept:
        levels: tuple[int, ...] = (mesh.zero,)
    elif mesh.fsdp > 1:
        levels = (3, 2, 1) if mesh.data > 1 else (3,)
    else:  # Replicas that train by themselves share nothing out.
        shares = mesh.data > 1 and mesh.sync_every == 1
        levels = (3, 2, 1) if shares else (_PLAIN.zero,)
    for zero in levels:
        splits = math.prod(
            mesh.mesh_shape[axis] for axis in replace(mesh, zero=zero).split_axes
        )
        if workload.hidden % splits:
            continue  # our parameters are split along it, evenly
        gathers = ("step", "microbatch") if zero == 3 and splits > 1 else ("step",)
        whole = zero < 3 or splits == 1
        half = mesh.precision == "bf16" and whole and not like.execution.eager
        yield from product(
            (zero,),
            constraints.choices("fsdp_gather", gathers),
            constraints.choices("param_dtype", ("fp32", "bf16") if half else ("fp32",)),
            constraints.choices("optimizer_memory", (_PLAIN.optimizer_memory,)),
        )


def _schedules(
    like: Run, mesh: Layout, constraints: Constraints
) -> Iterator[Scheduled]:
    if mesh.stage == 1:
        if not mesh.splits:
            yield mesh.schedule, mesh.chunks, ()
        return
    # One that another schedule beats is considered only if it is kept.
    searched = tuple(
        name
        for name, method in SCHEDULES.items()
        if method.no_better_than is None and step_refusal(name) is None
    )
    several = chunk_counts(like.workload.layers, mesh.stage)
    for name in constraints.choices("schedule", searched):
        method = SCHEDULES[name]
        has_one = method.num_chunks == 1
        for chunks in constraints.choices("chunks", (1,) if has_one else several):
            # One that may have any number is another schedule when it has one.
            if (chunks == 1) == has_one and method.has_chunks(chunks):
                stages = mesh.stage * chunks
                others = tuple(_splits(like, mesh)) if chunks == 1 else ()
                for splits in constraints.choices("splits", ((), *others)):
                    if splits in ((), BY_COST) or len(splits) == stages:
                        yield name, chunks, splits


def _splits(like: Run, mesh: Layout) -> Iterator[Splits]:
    """Splits other than the even one that may be faster or smaller.

    By cost where layers cost differently. Where layers do not divide, with the shorter
    stages first, whose ranks hold most microbatches; and with the shorter ones at both
    ends, where embedding and head are, if the program leaves them there.
    """
    workload, stages = like.workload, mesh.stage
    if stages > workload.layers:
        return
    even = split_evenly(workload.layers, stages)
    by_cost = replace(_PLAIN, stage=stages, splits=BY_COST)
    if workload.dense_layers and stage_blocks_of(workload, by_cost) != even:
        yield BY_COST
    longer = even.count(even[0])
    if longer == stages:
        return
    yield even[::-1]
    if not like.execution.shared_ends:
        before = (stages - longer) // 2
        yield (*even[longer:][:before], *even[:longer], *even[longer:][before:])
