"""Estimate of one layout of a transformer: its plan, if the layout is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshpar.errors import renamed
from meshpar.layout import FIXED_EXECUTIONS, Layout
from meshpar.layout.mesh_order import full_order
from meshpar.layout.requirements import OPTIONS, Facts, own_collective, problems
from meshpar.planner.cost.memory import Memory, fullest_memory
from meshpar.planner.cost.mesh_order import mesh_orders
from meshpar.planner.cost.parts import check_execution, crossing_problems
from meshpar.planner.cost.placed import placement
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import step_time
from meshpar.planner.cost.step_traffic import sent_in_a_step
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR, Execution, execution_for
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.plan import Plan, milliseconds
from meshpar.planner.workload.problems import (
    check_precision_on,
    layout_problems,
    layout_stage_blocks,
    with_mtp,
)
from meshpar.planner.workload.workload import Workload

Estimate = Plan[Run, Memory]
"""Plan of a transformer."""


def estimate(
    workload: Workload,
    cluster: Cluster,
    layout: Layout | str,
    *,
    global_batch: int,
    seq: int | None = None,
    execution: Execution = MESHPAR,
    stage_blocks: tuple[int, ...] | None = None,
    order: Sequence[str] | str | None = None,
) -> Estimate:
    """Estimate memory, time and communication of one step.

    Args:
        workload: The model's shape.
        cluster: The devices.
        layout: The layout; a -1 absorbs the remaining devices.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence; the workload's own when absent.
        execution: The program that runs it.
        stage_blocks: Blocks of every stage, where the layout cannot express it (a
            published run with none on its first stage), without `mtp_layers`.
        order: Mesh axes, outermost first, along which devices are numbered
            (`make_mesh(order=)`); `MESH_AXES` when absent.

    Raises:
        InputError: The layout is impossible (`layout_problems` has all reasons), or an
            order is given for several kinds of devices.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=8),
        ...     "fsdp=8,remat=full,precision=bf16",
        ...     global_batch=16,
        ...     seq=8192,
        ... )
        >>> plan.fits, 0.3 < plan.mfu < 0.6
        (True, True)
    """
    layout = Layout.of(layout).resolve(cluster.num_devices)
    execution = execution_for(workload, execution)
    seq = seq or workload.seq
    # Programs of others may take options that mean nothing to ours.
    options = () if execution.eager else problems(Facts(layout=layout), OPTIONS)
    found = layout_problems(
        workload,
        layout,
        global_batch=global_batch,
        seq=seq,
        stage_blocks=stage_blocks,
        execution=execution,
    )
    check_execution(cluster, execution)
    if order is not None:
        # On several kinds the axis that crosses them lies outermost.
        check_one_kind(cluster, "--mesh-order is for")
    for problem in (*options, *found, *crossing_problems(cluster, layout)):
        raise problem.error(layout)
    check_precision_on(cluster.device, layout.precision)
    blocks = stage_blocks and with_mtp(workload, stage_blocks)
    run = Run(
        workload=workload,
        cluster=cluster,
        layout=layout,
        execution=execution,
        global_batch=global_batch,
        seq=seq,
        stage_blocks=blocks or layout_stage_blocks(workload, layout),
        order=full_order(order, layout.mesh_shape),
    )
    return estimate_run(with_execution(run))


def with_execution(run: Run) -> Run:
    """Return the run in the faster execution, if its layout leaves that open."""
    layout = run.layout
    is_open = layout.execution == "auto" and run.splits_backward
    if not is_open or not run.execution.lock_step:
        return run
    axis = own_collective(layout)
    runs = {
        name: replace(run, layout=replace(layout, execution=name))
        for name in FIXED_EXECUTIONS
    }
    if axis is not None:
        why = f"execution=uniform: blocks communicate over {axis!r}"
        return replace(runs["uniform"], why_execution=why)
    seconds = {name: step_time(one).step_s for name, one in runs.items()}
    chosen = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {milliseconds(s)}" for name, s in seconds.items())
    why = f"execution={chosen}: a step takes {times}"
    return replace(runs[chosen], why_execution=why)


def estimate_run(run: Run) -> Estimate:
    """Estimate a run whose layout is known to be possible."""
    return Plan(
        run=run,
        memory=fullest_memory(run),
        timer=step_time,
        collectives=sent_in_a_step(run),
        placer=placement,
        orderer=mesh_orders,
    )


estimate_in_words = renamed("estimate_in_words", Plan.lines.fget)  # type: ignore
