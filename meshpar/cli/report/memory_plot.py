"""What fills the memory of a device, by kind, for each rank of `stage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.cli.report.bars import Part, stacked_bars
from meshpar.planner.cost.estimate import gigabytes
from meshpar.planner.cost.memory import Memory

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from meshpar.cli.report.laid_out import LaidOut


def memory_plot(found: LaidOut) -> Figure:
    """A bar a rank, and a line at what a device holds."""
    capacity = found.run.cluster.device.memory_bytes
    return stacked_bars(
        [
            Part(row, kind, size, f"{kind}: {gigabytes(size)}")
            for row, memory in ranks(found).items()
            for kind, size in memory_parts(memory).items()
        ],
        title="memory of a device",
        limit=(capacity, "capacity"),
    )


def memory_parts(memory: Memory) -> dict[str, float]:
    """What is there at once when most is, by kind; the sum is `total_bytes`.

    Example:
        >>> names = "parameter gradient optimizer fetched activation boundary logit"
        >>> names += " late gathered idle workspace ends"
        >>> sizes = {f"{name}_bytes": 1.0 for name in names.split()}
        >>> memory = Memory(**sizes, stage=0, in_flight=1)
        >>> [*memory_parts(memory)][:2]
        ['parameters', 'optimizer']
        >>> sum(memory_parts(memory).values()) == memory.total_bytes
        True
    """
    kept = {
        "parameters": memory.parameter_bytes,
        "optimizer": memory.optimizer_bytes,
        "gradients": memory.gradient_bytes,
    }
    if max(memory.ends_bytes, memory.fetched_bytes) == (
        memory.temporary_bytes - memory.gradient_bytes
    ):
        later = {
            "whole gradients": memory.ends_bytes,
            "fetched state": memory.fetched_bytes,
        }
        last = max(later, key=lambda name: later[name])
        parts = {**kept, last: later[last]}
    else:
        gathered = min(memory.gathered_bytes, memory.other_bytes)
        at_loss = memory.logit_bytes - memory.late_bytes
        in_block = memory.workspace_bytes - memory.idle_bytes
        last = "logits" if at_loss > in_block else "workspace"
        parts = {
            **kept,
            "activations": memory.activation_bytes,
            "gathered": gathered,
            last: memory.other_bytes - gathered,
        }
    return {name: size for name, size in parts.items() if size > 0}


def ranks(found: LaidOut) -> dict[str, Memory]:
    """What a row is called -> the memory of its devices."""
    if len(found.memories) == 1:
        return {"every device": found.memories[0]}
    return {f"rank {memory.stage}": memory for memory in found.memories}
