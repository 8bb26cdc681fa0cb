"""Choose how the ranks of a pipeline run, where the layout leaves it open.

Whole backwards run in lock step. Stages that update their weights by themselves always
diverge. Split backwards run in the execution whose ticks take less time.
In lock step a tick takes an F, an I and a W on every rank, if any rank does one. Where
ranks diverge it takes the longest of their actions; there are about three times as many
ticks, and most have the embedding and head that the ranks share. F, I, W and head are
FLOPs of traced matmuls, so every process chooses alike. Virtual devices share cores,
and their idle ranks skip layers: lock step wastes nothing there, and has fewer heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.hardware.platforms import platform_named
from meshpar.layout import Layout
from meshpar.layout.requirements import own_collective
from meshpar.model.contract import Model
from meshpar.model.tracing import (
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing,
    tracing_scope,
)
from meshpar.parallel.pipeline.stages import pipeline_for
from meshpar.parallel.pipeline.traced_layer import in_dtype, mean_layer
from meshpar.parallel.sizes import COST_TOKENS
from meshpar.schedules import (
    SCHEDULES,
    OwnSchedule,
    Schedule,
    StageTimes,
    lock_step_span_s,
    tick_table,
)
from meshpar.schedules.ticks import ticks_timeline
from meshpar.trace.costs import Operand, matmul_flops


def chosen_execution(
    model: Model,
    layout: Layout,
    schedule: OwnSchedule | None = None,
    *,
    platform: str,
) -> tuple[str, str]:
    """Return a value of `Layout.execution`, and the reason in a line, if it was open.

    Args:
        model: The model.
        layout: Its layout.
        schedule: Instead of the one that the layout names.
        platform: Kind of its devices.

    Raises:
        InputError: The model cannot be traced, or does not suit the layout.
    """
    if layout.execution == "auto" and layout.updates_each_microbatch:
        return "divergent", (
            f"execution=divergent: under schedule={layout.schedule} a stage does one "
            "forward or one backward at a time"
        )
    own = schedule is not None
    splits = own or SCHEDULES[layout.schedule].splits_backward
    if layout.execution != "auto" or layout.stage == 1 or not splits:
        return layout.execution, ""
    pipeline = pipeline_for(model, layout, schedule)
    if not pipeline.schedule.splits_backward:
        return layout.execution, ""
    axis = own_collective(layout)
    if axis is not None:
        return "uniform", (
            f"execution=uniform: ranks that do work of their own would wait for the "
            f"collectives of blocks over {axis!r}"
        )
    if platform_named(platform).is_host:
        return "uniform", (
            "execution=uniform: virtual devices share cores, and idle ranks skip their "
            "layers"
        )
    with tracing("no execution can be chosen", "set execution=uniform or divergent"):
        layer = mean_layer(
            model, seq=COST_TOKENS, dtype=jnp.float32, remat=layout.remat
        )
        head_flops = _head_flops(model)
    sizes = pipeline.stage_layers
    times = StageTimes(
        forward_s=tuple(size * layer.forward_flops for size in sizes),
        input_grad_s=tuple(size * layer.input_grad_flops for size in sizes),
        weight_grad_s=tuple(size * layer.weight_grad_flops for size in sizes),
    )
    # Forward and backward, shared out over the ranks.
    head_s = 3 * head_flops / layout.stage
    seconds = execution_seconds(pipeline.schedule, times, head_s)
    return reasoned(seconds, unit_s=max(times.forward_s))


def execution_seconds(
    schedule: Schedule, times: StageTimes, head_s: float
) -> dict[str, float]:
    """Return the time of a step in each execution.

    Args:
        schedule: The order of the work.
        times: Times of the stages.
        head_s: Time of the ends that all ranks run in a tick with a forward.
    """
    together, apart = (tick_table(schedule, divergent=d) for d in (False, True))
    diverging_s = ticks_timeline(schedule, times, divergent=True).end_s
    return {
        "uniform": lock_step_span_s(schedule, together, times)
        + together.num_forward_ticks * head_s,
        "divergent": diverging_s + apart.num_forward_ticks * head_s,
    }


def reasoned(seconds: dict[str, float], *, unit_s: float) -> tuple[str, str]:
    """Return the faster execution, and a line that says so in times of a forward."""
    chosen = min(seconds, key=seconds.__getitem__)
    words = {"uniform": "in lock step", "divergent": "if ranks diverge"}
    counts = " and ".join(
        f"{value / unit_s:.1f} {words[name]}" for name, value in seconds.items()
    )
    return chosen, (
        f"execution={chosen}: the ticks of a step take as long as {counts}, in "
        "forwards of a stage"
    )


def _head_flops(model: Model) -> float:
    """Return the FLOPs of the head's matmuls on one example, forward."""

    def head(params: Any, x: Any, state: Any, batch: Any) -> Any:
        scope = tracing_scope(batch, state)
        return model.loss_sums(params, x, scope.batch, scope)

    dtype = jnp.float32
    program = jax.make_jaxpr(head)(
        in_dtype(model.split(model.parameters)[0], dtype),
        in_dtype(traced_streams(model, 1, COST_TOKENS)[-1], dtype),
        one_layer_state(model)[0],
        traced_batch(model, 1, COST_TOKENS),
    )
    unknown = [Operand()] * len(program.jaxpr.invars)
    return matmul_flops(program, unknown, while_length=1).total
