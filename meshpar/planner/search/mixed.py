"""Search on mixed hardware: bounds over all kinds of devices, stages by their speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import mul

import numpy as np

from meshpar.layout import Layout
from meshpar.planner.cost.by_speed import by_speed
from meshpar.planner.cost.parts import may_be_uneven, shards_may_be_uneven
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.mixed import matmul_flops
from meshpar.planner.search.bounds import Bound, BoundByRemat, Bounds
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.space import Variant


def run_bounds(run: Run, capacity_bytes: float = math.inf) -> Bounds | MixedBounds:
    """Return bounds of the layouts of a run's workload, cluster and batch."""
    kind = MixedBounds if run.cluster.parts else Bounds
    return kind(run, capacity_bytes)


class MixedBounds:
    """`Bounds` on several kinds of devices; stages of no given size go by speed.

    A step is no faster than on the slowest kind alone. Where slow devices may have
    shorter stages, one of the kinds has at least its share of the blocks by speed, so
    that a step is no faster than on the fastest kind with its share. The same holds of
    the microbatches of parts of `data`: a share above 1 scales the blocks, one below 1
    the whole step.

    Args:
        run: Any run, for its workload, cluster, execution and batch.
        capacity_bytes: Layouts that need more get 0 as the bound of their time.
    """

    def __init__(self, run: Run, capacity_bytes: float = math.inf) -> None:
        self._like, self._capacity_bytes = run, capacity_bytes
        whole = run.cluster
        self._even = [
            Bounds(replace(run, cluster=part, whole=whole), capacity_bytes)
            for part in whole.parts
        ]
        speeds = [matmul_flops(part.device) for part in whole.parts]
        counts = [part.num_devices / whole.num_devices for part in whole.parts]
        mean = sum(map(mul, speeds, counts))
        shares = [speed / mean for speed in speeds]
        self._by_speed = [
            bounds.with_share(share)
            for bounds, share in zip(self._even, shares, strict=True)
        ]
        self._shards = [
            bounds.with_share(max(share, 1.0), in_blocks=False)
            for bounds, share in zip(self._even, shares, strict=True)
        ]
        self._scales = [min(share, 1.0) for share in shares]

    def without_capacity(self) -> MixedBounds:
        """Return bounds of the same layouts that have the time of all of them."""
        return MixedBounds(self._like)

    def least_s(self, mesh: Layout, choices: MeshChoices) -> float:
        """Return a bound of the time of all these variants, from their blocks alone."""
        kinds, scales, least = self._kinds(_with_choices(mesh, choices))
        seconds = (
            scale * one.least_s(mesh, choices)
            for one, scale in zip(kinds, scales, strict=True)
        )
        return float(reduce(least, seconds))

    def in_memory(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound from their blocks and memory alone, for each remat policy."""
        layout = _with_choices(mesh, choices)
        return self._bound(layout, lambda bounds: bounds.in_memory(mesh, choices))

    def by_remat(self, mesh: Layout, choices: MeshChoices) -> BoundByRemat:
        """Return a bound of all these variants for each of their remat policies."""
        return self._bound(
            _with_choices(mesh, choices), lambda bounds: bounds.by_remat(mesh, choices)
        )

    def bound(self, mesh: Layout, variant: Variant) -> Bound:
        """Return the bound of one layout."""
        own = replace(mesh, microbatches=variant.microbatches, zero=variant.zero)
        return self._bound(
            own, lambda bounds: bounds.bound_by_remat(mesh, variant)
        ).least

    def _bound(
        self, layout: Layout, of_kind: Callable[[Bounds], BoundByRemat]
    ) -> BoundByRemat:
        kinds, scales, least = self._kinds(layout)
        steps_s, memories = zip(*map(of_kind, kinds), strict=True)
        scaled_s = (scale * s for scale, s in zip(scales, steps_s, strict=True))
        return BoundByRemat(reduce(least, scaled_s), np.min(memories, axis=0))

    def _kinds(self, layout: Layout) -> tuple[list[Bounds], list[float], Callable]:
        """Return the bounds of each kind, what scales their time, and how it is one."""
        run = replace(self._like, layout=layout)
        if shards_may_be_uneven(run):
            return self._shards, self._scales, np.minimum
        is_uneven = may_be_uneven(run)
        kinds = self._by_speed if is_uneven else self._even
        return kinds, [1.0] * len(kinds), np.minimum if is_uneven else np.maximum

    def memory_bytes(self, run: Run) -> float:
        """Return a closer bound of a run's memory."""
        return min(one.memory_bytes(run) for one in self._even)

    def run(self, mesh: Layout, variant: Variant) -> Run:
        """Return the run of a mesh shape and a variant, its stages by speed."""
        run = self._even[0].run(mesh, variant)
        run = replace(run, cluster=self._like.cluster, whole=None)
        return run if variant.splits else by_speed(run, self._capacity_bytes)


def _with_choices(mesh: Layout, choices: MeshChoices) -> Layout:
    """Return the layout among the choices that has uneven shares if any of them has."""
    zero = min(state.zero for state in choices.states)
    return replace(mesh, microbatches=max(choices.microbatches), zero=zero)
