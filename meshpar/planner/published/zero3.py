"""Published runs that split all parameters: DeepSpeed ZeRO-3, and MaxText on TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.machine.execution import DEEPSPEED_ZERO3, MAXTEXT
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    published,
    step_row,
)
from meshpar.planner.published.megatron import megatron_sc21_flops
from meshpar.planner.workload.shapes import SHAPES
from meshpar.planner.workload.workload import Workload

CALIBRATES_RAILS = 768
"""GPUs of the row that fixes how many network ports ZeRO-3's collectives use."""


def deepspeed_zero3() -> Iterator[Measured]:
    """Step times of Narayanan et al. 2021, table 2, from FLOP/s with recomputation."""
    for row in published()["megatron_sc21_table2"]["rows"]:
        layout = Layout(
            fsdp=row["gpus"],
            microbatches=row["gbs"] // row["gpus"] // row["mbs"],
            remat="full",
            precision="bf16",
        )
        workload = _gpt(row["params_b"])
        found = estimate_published(workload, layout, row["gbs"], 2048, DEEPSPEED_ZERO3)
        sizes = {"hidden": workload.hidden, "layers": workload.layers}
        flops = megatron_sc21_flops({**row, **sizes}, 2048, workload.vocab)
        yield step_row(
            "Narayanan et al. 2021, ZeRO-3",
            f"{row['params_b']}B {layout}",
            flops / (row["gpus"] * row["tflops_gpu"] * 1e12),
            found,
            calibrates=row["gpus"] == CALIBRATES_RAILS,
        )


def _gpt(params_b: float) -> Workload:
    """The shape of that table's model: GPT-3's, or one of their table 1."""
    name = "gpt3-175b" if params_b == 174.6 else f"megatron-{params_b}b"
    return SHAPES[name]


def maxtext() -> Iterator[Measured]:
    """Step times of MaxText's published TPU configurations, from model FLOP/s."""
    for row in published()["maxtext_tpu"]["rows"]:
        layout = Layout.parse(f"{row['layout']},precision=bf16,remat={row['remat']}")
        found = estimate_published(
            _maxtext_workload(row),
            layout,
            row["batch_per_chip"] * row["chips"],
            2048,
            MAXTEXT,
            f"tpu-{row['chip']}:{row['topology']}",
        )
        rate = row["chips"] * row["tflops_chip"] * 1e12
        name = f"{row['name']} on {row['chip']} {row['topology']}, {layout}"
        yield step_row("MaxText README", name, found.model_flops / rate, found)


def _maxtext_workload(row: dict[str, Any]) -> Workload:
    sizes = {key: row[key] for key in ("layers", "hidden", "heads", "ffn", "head_dim")}
    return Workload(name=row["name"], vocab=32_000, seq=2048, gated=True, **sizes)
