"""Facts of one layout of one model on one machine, for `meshpar show`."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshpar.layout import MESH_AXES
from meshpar.lint.findings import Shards, parameter_shards
from meshpar.model.contract import Model
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.cost.memory import Memory, rank_memories
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import busiest_part, stage_times
from meshpar.planner.cost.step_traffic import Sent
from meshpar.planner.machine.cluster import Link
from meshpar.schedules import StageTimes, Timeline, make_schedule, simulate
from meshpar.schedules.simulate import spans
from meshpar.schedules.ticks import ticks_timeline

_MOST_ACTIONS = 4000
"""Most actions of a timeline that a page can draw."""


class AxisTraffic(NamedTuple):
    """Traffic over one mesh axis, or over several together.

    Args:
        mesh_axes: The mesh axes.
        members: Devices of one group.
        link: Link between them.
        sent: Bytes that one device sends in a step, by kind and purpose.
        exposed_s: Time of a step that waits for it; None if counted with another axis.
    """

    mesh_axes: tuple[str, ...]
    members: int
    link: Link
    sent: tuple[Sent, ...]
    exposed_s: float | None

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(one.wire_bytes for one in self.sent)


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Facts of one layout.

    Args:
        estimate: Estimate of memory, time and collectives.
        shards: Shards of every parameter.
        traffic: Traffic of each mesh axis larger than 1, outermost first; then of those
            that collectives take together.
        memories: Memory of a device of each rank of `stage`.
        timeline: A step's forwards and backwards.
    """

    estimate: Estimate
    shards: tuple[Shards, ...]
    traffic: tuple[AxisTraffic, ...]
    memories: tuple[Memory, ...]
    timeline: Timeline

    @property
    def run(self) -> Run:
        """Run of the estimate."""
        return self.estimate.run

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON, with the keys of `meshpar estimate --json`."""
        return {
            **self.estimate.as_json(),
            "model": self.run.workload.name,
            "machine": _machine(self.run),
            "mesh": self.run.layout.mesh_shape,
            "mesh_axes": [_axis(one) for one in self.traffic],
            "parameters": [_parameter(one) for one in self.shards],
            "ranks": [memory.as_json() for memory in self.memories],
            "timeline": _timeline(self.timeline),
        }


def laid_out(model: Model, estimate: Estimate) -> LaidOut:
    """Return the facts of the estimate's layout of the model.

    Raises:
        InputError: The model cannot be laid out so.
    """
    run = estimate.run
    return LaidOut(
        estimate=estimate,
        shards=parameter_shards(model, run.layout),
        traffic=_traffic(estimate),
        memories=tuple(rank_memories(run)),
        timeline=_run_timeline(run),
    )


def _traffic(estimate: Estimate) -> tuple[AxisTraffic, ...]:
    run, sizes = estimate.run, estimate.run.layout.mesh_shape
    sent: dict[tuple[str, ...], list[Sent]] = defaultdict(list)
    for axis in MESH_AXES:
        if sizes[axis] > 1:
            sent[axis,] = []
    for one in estimate.collectives or ():
        split = tuple(axis for axis in one.mesh_axes if sizes[axis] > 1)
        sent[split].append(one)
    return tuple(
        AxisTraffic(
            mesh_axes=axes,
            members=math.prod(sizes[axis] for axis in axes),
            link=run.link(*axes),
            sent=tuple(collectives),
            exposed_s=estimate.time.exposed_s.get(axes[0], 0.0)
            if len(axes) == 1
            else None,
        )
        for axes, collectives in sent.items()
    )


def _run_timeline(run: Run) -> Timeline:
    """Return the timeline, in lock step if the program is; of many microbatches some.

    Some are whole groups of as many as there are stages, two at least. Of parts of
    `data` with different numbers it is that of the one that takes longest.
    """
    layout, stages, count = run.layout, stage_times(run), run.layout.microbatches
    if layout.data_splits:
        busiest = busiest_part(run)
        stages, count = stage_times(busiest.run), busiest.microbatches
    groups = max(2, _MOST_ACTIONS // (2 * layout.stage * run.num_stages))
    sizes = layout.stage, min(count, layout.stage * groups)
    limit = layout.max_pending_w
    schedule = make_schedule(
        layout.schedule, *sizes, layout.chunks, max_pending_w=limit
    )
    times = StageTimes(
        forward_s=tuple(stage.forward.total_s for stage in stages),
        input_grad_s=tuple(stage.input_grad.total_s for stage in stages),
        weight_grad_s=tuple(stage.weight_grad.total_s for stage in stages),
    )
    if run.execution.lock_step:
        return ticks_timeline(schedule, times, divergent=layout.divergent)
    return simulate(schedule, times)


def _machine(run: Run) -> dict[str, Any]:
    cluster = run.cluster
    device = cluster.device
    return {
        "device": device.name,
        "num_devices": cluster.num_devices,
        "hosts": cluster.hosts,
        "devices_per_host": cluster.devices_per_host,
        "torus": list(cluster.torus),
        "memory_bytes": device.memory_bytes,
        "link_bytes_per_s": device.link_bytes_per_s,
        "network_bytes_per_s": device.network_bytes_per_s,
    }


def _axis(one: AxisTraffic) -> dict[str, Any]:
    return {
        "mesh_axes": list(one.mesh_axes),
        "members": one.members,
        "link": one.link.name,
        "bytes_per_s": one.link.bytes_per_s,
        "wire_bytes": round(one.wire_bytes),
        "exposed_s": one.exposed_s,
    }


def _parameter(shards: Shards) -> dict[str, Any]:
    row = shards.row
    return {
        "path": row.path,
        "shape": row.shape,
        "logical_axes": row.logical_axes,
        "mesh_axes": row.mesh_axes,
        "state_mesh_axes": shards.state_mesh_axes,
        "local_shape": row.local_shape,
        "bytes": row.bytes,
        "shards": shards.number,
        "copies": shards.copies,
        "shard_of_device": shards.of_device,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.num_microbatches,
        "span_s": timeline.span_s,
        "bubble_fraction": timeline.bubble_fraction,
        "phases": [span._asdict() for span in spans(timeline)],
        "events": [
            [[str(action), start_s, end_s] for action, start_s, end_s in events]
            for events in timeline.events
        ],
    }
