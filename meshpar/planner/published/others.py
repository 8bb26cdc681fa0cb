"""Published runs of nanotron, and where all rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshpar.layout import Layout
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.machine.execution import NANOTRON
from meshpar.planner.published.forks import (
    vocab_parallel,
    zero_bubble,
    zero_bubble_passes,
)
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.published.megatron import (
    korthikanti_layers,
    korthikanti_memory,
    korthikanti_steps,
    megatron_sc21,
)
from meshpar.planner.published.megatron_bridge import megatron_bridge
from meshpar.planner.published.megatron_core import megatron_core
from meshpar.planner.published.zero3 import deepspeed_zero3, maxtext
from meshpar.planner.workload.workload import Workload

_TAZI = "Tazi et al. 2025"

CALIBRATES_HOST = (16, "1.34B")
"""The row of the nanotron grid that fixes its `host_s`: a third of so short a step,
where the two others that calibrate have a hundredth (nodes, model)."""

# With these, the rows that fix what matmuls achieve on the H100.
_CALIBRATES = {(1, "1.34B"), (1, "8.86B"), CALIBRATES_HOST}


def nanotron() -> Iterator[Measured]:
    """Step times (from MFU) and memory of the Ultra-Scale Playbook's best runs.

    Memory is what nanotron logs as "Mem Alloc (GB)": `max_memory_allocated() / 1024**3`
    of the world's first process, which has the first stage (`create_table_log`).
    """
    data = published()["nanotron_best_configs"]
    for row in data["rows"]:
        workload = Workload(
            name=row["model"],
            gated=True,
            vocab=data["vocab"],
            seq=data["seq"],
            **data["models"][row["model"]],
        )
        layout = Layout(
            **{"fsdp" if row["zero"] else "data": row["dp"]},
            stage=row["pp"],
            tensor=row["tp"],
            microbatches=row["gas"],
            splits=nanotron_splits(workload, row["pp"]) if row["pp"] > 1 else (),
            zero=row["zero"] or 3,
            sequence_parallel=row["tp"] > 1,
            precision="bf16",
        )
        found = estimate_published(
            workload, layout, data["gbs_seqs"], data["seq"], NANOTRON, "h100-80gb"
        )
        name = f"{row['model']} on {row['nodes']} nodes, {layout}"
        at_mfu = row["mfu_pct"] / 100 / found.mfu
        calibrates = (row["nodes"], row["model"]) in _CALIBRATES
        measured_s = found.step_s / at_mfu
        yield step_row(_TAZI, name, measured_s, found, calibrates=calibrates)
        of_first = rank_memories(found.run)[0]
        yield memory_row(_TAZI, name, row["mem_gb"], of_first.total_bytes)


def nanotron_splits(workload: Workload, stages: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron's `build_model` gives them.

    By matmul parameters, the head's included: a stage takes layers until its share of
    the sum is exceeded, so that early stages have more.
    """
    block = workload.block_matrix_parameters(moe=False)
    total = workload.layers * block + workload.vocab * workload.hidden
    splits, done, stage = [0] * stages, 0, 0
    for _ in range(workload.layers):
        splits[stage] += 1
        done += block
        if done > total * (stage + 1) / stages:
            stage += 1
    return tuple(splits)


SOURCES: tuple[Callable[[], Iterator[Measured]], ...] = (
    korthikanti_layers,
    megatron_sc21,
    korthikanti_steps,
    nanotron,
    megatron_core,
    megatron_bridge,
    deepspeed_zero3,
    maxtext,
    zero_bubble_passes,
    zero_bubble,
    vocab_parallel,
    korthikanti_memory,
)
"""Where the rows come from, in the order of the table."""
