"""Parts of a run on mixed hardware: each kind of device, and the stages it is given.

One XLA program has equal shapes on all devices: each has as many examples, each rank
as many places for blocks as the longest stage has blocks. A rank may leave places empty
where no collective stands in a block, so that a slow device gets a shorter stage;
elsewhere it computes them too, on zeros. A part of `data` may run fewer microbatches
than others, where nothing crosses `data` in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshpar.layout import Layout
from meshpar.layout.requirements import (
    UNEVEN_SHARDS,
    Facts,
    Problem,
    own_collective,
    problems,
)
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import Execution
from meshpar.planner.machine.mixed import (
    CROSSING_AXES,
    check_one_kind,
    crossing_axis,
    crossing_shares,
)


class Part(NamedTuple):
    """The devices of one kind in a run.

    Args:
        run: The run, with times and links of these devices.
        ranks: Ranks of `stage` that they have.
        microbatches: Microbatches that each of them runs, at most.
    """

    run: Run
    ranks: range
    microbatches: int

    @property
    def stages(self) -> frozenset[int]:
        """Stages of its ranks."""
        ranks = map(self.run.rank_stages, self.ranks)
        return frozenset(stage for stages in ranks for stage in stages)


def run_parts(run: Run) -> tuple[Part, ...]:
    """Return the parts of a run; one with all ranks if its devices are of one kind.

    Every part has all ranks where another axis than `stage` crosses the kinds.
    """
    cluster, layout = run.cluster, run.layout
    ranks, most = range(layout.stage), max((layout.microbatches, *layout.data_splits))
    if not cluster.parts:
        return (Part(run, ranks, most),)
    shares: Sequence[range] = [ranks] * len(cluster.parts)
    counts = [most] * len(cluster.parts)
    if crosses_stages(run):
        shares = crossing_shares(cluster, layout.stage)
    elif layout.data_splits and crosses_data(run):
        counts = [
            max(layout.data_counts[place] for place in places)
            for places in crossing_shares(cluster, layout.data)
        ]
    return tuple(
        Part(replace(run, cluster=part, whole=cluster), share, count)
        for part, share, count in zip(cluster.parts, shares, counts, strict=True)
    )


def crosses_stages(run: Run) -> bool:
    """Return True if some stages are on one kind of device, and some on another."""
    return _crosses(run, "stage")


def crosses_data(run: Run) -> bool:
    """Return True if parts of `data` are on different kinds of devices."""
    return _crosses(run, "data")


def _crosses(run: Run, axis: str) -> bool:
    cluster = run.whole or run.cluster
    return bool(cluster.parts) and (
        crossing_axis(cluster, run.layout.mesh_shape) == axis
    )


def may_be_uneven(run: Run) -> bool:
    """Return True if a stage on slow devices may take less time for fewer blocks."""
    return crosses_stages(run) and own_collective(run.layout) is None


def why_even_shards(layout: Layout) -> str:
    """Return the option for which parts of `data` run as many microbatches as others.

    Empty if they may run different numbers.
    """
    if layout.microbatches == 1:
        return "microbatches=1"
    uneven = replace(layout, data_splits=(layout.microbatches,))
    broken = next(problems(Facts(layout=uneven), UNEVEN_SHARDS), None)
    option = "tensor" if broken is None and layout.tensor > 1 else ""
    option = option or (broken.option if broken is not None else "")
    return f"{option}={getattr(layout, option)}" if option else ""


def shards_may_be_uneven(run: Run) -> bool:
    """Return True if parts of `data` on slow devices may run fewer microbatches."""
    return crosses_data(run) and not why_even_shards(run.layout)


def check_execution(cluster: Cluster, execution: Execution) -> None:
    """Refuse mixed hardware for programs of others, which are priced on one kind."""
    if not execution.uneven_shares:
        check_one_kind(cluster, f"--execution {execution.name} is priced on")


def crossing_problems(cluster: Cluster, layout: Layout) -> tuple[Problem, ...]:
    """Return why a mesh does not lie over the kinds of devices; () if it does."""
    sizes = layout.mesh_shape
    if not cluster.parts or crossing_axis(cluster, sizes) is not None:
        return ()
    shape = ", ".join(f"{axis}={sizes[axis]}" for axis in CROSSING_AXES)
    counts = " and ".join(str(part.num_devices) for part in cluster.parts)
    message = (
        f"{shape}: none of them lies in whole shares over {counts} of "
        f"{cluster.num_devices} devices; take a stage, data or fsdp that does"
    )
    return (Problem("stage", message, "hardware.no_crossing_axis"),)


def computed_blocks(run: Run) -> tuple[int, ...]:
    """Return the blocks that a rank computes of every stage, those on zeros included.

    Of devices of one kind the longest stage's rank is the slowest either way.
    """
    if run.whole is None or own_collective(run.layout) is None:
        return run.stage_blocks
    return (max(run.stage_blocks),) * run.num_stages


def with_places(run: Run) -> Run:
    """Return the run with as many blocks on every rank as one has places for.

    On mixed hardware, where the longest stage may be on any rank.
    """
    if not (run.cluster.parts and crosses_stages(run)):
        return run
    return replace(run, stage_blocks=(max(run.stage_blocks),) * run.num_stages)
