"""Placement of a plan on mixed hardware: the part of each kind of device, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshpar.layout.requirements import own_collective
from meshpar.planner.cost.by_speed import by_speed
from meshpar.planner.cost.parts import (
    may_be_uneven,
    run_parts,
    shards_may_be_uneven,
    why_even_shards,
)
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import stage_times, step_time
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import crossing_axis, crossing_shares
from meshpar.planner.plan import Placement, milliseconds

_LEAST_GAIN = 0.01
"""Least fraction of a step that other blocks must save to be named."""


class Placed(NamedTuple):
    """The part of a mesh, and the stages, that the devices of one kind have.

    Args:
        cluster: The devices.
        mesh_axis: Mesh axis that crosses from kind to kind.
        places: Their places along it.
        blocks: Blocks of each of their stages; () without a pipeline.
        tick_s: Longest forward and backward of a microbatch on them.
        microbatches: Microbatches that each of them runs, at most.
    """

    cluster: Cluster
    mesh_axis: str
    places: range
    blocks: tuple[int, ...]
    tick_s: float
    microbatches: int

    @property
    def text(self) -> str:
        """Line such as `stage 0 of 23 blocks on 32 x h100-80gb on 4 hosts`."""
        first, last = self.places[0], self.places[-1]
        places = str(first) if first == last else f"{first} to {last}"
        shown = f" of {'/'.join(map(str, self.blocks))} blocks" if self.blocks else ""
        return (
            f"{self.mesh_axis} {places}{shown} on {self.cluster.text}: a microbatch "
            f"takes {milliseconds(self.tick_s)}{self._number}"
        )

    @property
    def _number(self) -> str:
        if self.mesh_axis != "data" or self.microbatches == 1:
            return ""
        whole_s = milliseconds(self.tick_s * self.microbatches)
        return f", all {self.microbatches} of a part {whole_s}"

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `parts` of a plan's JSON."""
        return {
            "device": self.cluster.device.name,
            "devices": self.cluster.num_devices,
            "mesh_axis": self.mesh_axis,
            "places": [*self.places],
            "blocks": [*self.blocks],
            "tick_s": self.tick_s,
            "microbatches": self.microbatches,
        }


def placement(run: Run) -> Placement:
    """Return what each kind of device has, and why."""
    return Placement(placed(run), why_placed(run))


def placed(run: Run) -> tuple[Placed, ...]:
    """Return what each kind of device has; () if all are of one kind."""
    cluster, layout = run.cluster, run.layout
    axis = crossing_axis(cluster, layout.mesh_shape) if cluster.parts else None
    if axis is None:
        return ()
    shares = crossing_shares(cluster, layout.mesh_shape[axis])
    return tuple(
        Placed(
            cluster=part.run.cluster,
            mesh_axis=axis,
            places=share,
            blocks=tuple(
                run.stage_blocks[stage]
                for stage in sorted(part.stages)
                if layout.stage > 1
            ),
            tick_s=_tick_s(part.run, part.stages),
            microbatches=part.microbatches,
        )
        for part, share in zip(run_parts(run), shares, strict=True)
    )


def _tick_s(run: Run, stages: frozenset[int]) -> float:
    times = stage_times(run)
    return max(
        times[stage].forward.total_s + times[stage].backward.total_s for stage in stages
    )


def why_placed(run: Run) -> str:
    """Return why each kind of device has its share; empty for devices of one kind."""
    every = placed(run)
    if not every:
        return ""
    if may_be_uneven(run) or shards_may_be_uneven(run):
        return _why_shares(run)
    axis = every[0].mesh_axis
    slowest = max(every, key=lambda one: one.tick_s).cluster.device.name
    if axis == "stage":
        return (
            f"{own_collective(run.layout)!r} is in the blocks, so that every stage "
            f"computes as many as the longest, and waits for {slowest}"
        )
    saved = _saved_by_speed(every)
    if saved < _LEAST_GAIN:
        return f"equal shares of {axis}, as all devices are as fast"
    why = f"{axis} crosses the kinds, not 'data'"
    if axis == "data":
        why = f"{why_even_shards(run.layout)} keeps them even"
    return (
        f"equal shares of {axis} wait for {slowest}; data_splits, microbatches by the "
        f"speed of each part of 'data', would save {saved:.0%} of that time, but "
        f"{why}"
    )


def _why_shares(run: Run) -> str:
    """Return why shares are as they are, or which ones by speed would be faster."""
    even = replace(run, layout=replace(run.layout, splits=(), data_splits=()))
    best = by_speed(even, run.cluster.device.usable_bytes)
    own_s, best_s = (step_time(one).step_s for one in (run, best))
    by_data = run.layout.stage == 1
    if best_s > own_s * (1 - _LEAST_GAIN):
        whole = "parts of data have microbatches" if by_data else "stages have blocks"
        return f"{whole} by the speed of their devices"
    splits = best.layout.data_splits if by_data else best.stage_blocks
    name = "data_splits" if by_data else "splits"
    return (
        f"{name}={'/'.join(map(str, splits))}, by the speed of the devices, would take "
        f"{milliseconds(best_s)} instead of {milliseconds(own_s)}"
    )


def _saved_by_speed(every: Sequence[Placed]) -> float:
    """Return the part of a tick that shares by speed would save, if they existed."""
    total = sum(one.cluster.num_devices for one in every)
    rate = sum(one.cluster.num_devices / one.tick_s for one in every) / total
    return 1 - 1 / (rate * max(one.tick_s for one in every))
