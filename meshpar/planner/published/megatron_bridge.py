"""Published runs with experts: Megatron Bridge's table of its 25.11 container, BF16.

What the table leaves open is as its recipes have it: DeepSeek-V3's 61 layers on 16
chunks are 4 on each and 1 on the last; Qwen3's 94 on 24 chunks are 4 on each but 3
where embedding and head are. DeepSeek-V3 is counted without its layer of multi-token
prediction: the table's own 782 TFLOP/s are 249 GFLOPs a token, those of 61 layers.

No number here was fitted: `MEGATRON_BRIDGE` is `MEGATRON_CORE` with the precision of
sums that the recipes have, and GB200 takes the H100's achieved fractions. What is known
to be left out: what the recipes recompute (`recomputed` of each row; about 2 % of a
step of DeepSeek-V3), and that every second layer of GPT-OSS sees 128 tokens alone
(counted whole: about 6 % of its step too much). GPT-OSS is predicted with the
microbatch of 4 sequences that the table prints; its printed number of accumulations,
2, does not agree with that on 4 stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.machine.execution import MEGATRON_BRIDGE
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    interleaved,
    published,
    step_row,
)
from meshpar.planner.workload.shapes import SHAPES


def megatron_bridge() -> Iterator[Measured]:
    """Step times from tokens a second of a GPU."""
    data = published()["megatron_bridge_25_11"]
    for row in data["rows"]:
        layout = _layout(row)
        found = estimate_published(
            SHAPES[row["model"]],
            layout,
            row["gbs"],
            data["seq"],
            MEGATRON_BRIDGE,
            row["hardware"],
            stage_blocks=_blocks(row),
        )
        measured_s = row["gbs"] * data["seq"] / (row["tokens_s_gpu"] * row["gpus"])
        name = f"{row['model']} on {row['gpus']} {row['hardware']}, {layout}"
        yield step_row("Megatron Bridge 25.11", name, measured_s, found)


def _layout(row: dict[str, Any]) -> Layout:
    replicas = row["gpus"] // row["tp"] // row["pp"]
    return Layout(
        data=replicas // row["ep"],
        stage=row["pp"],
        expert=row["ep"],
        tensor=row["tp"],
        microbatches=row["gbs"] // replicas // row["mbs"],
        zero=1,
        precision="bf16",
        **interleaved(row["vp"]),
    )


def _blocks(row: dict[str, Any]) -> tuple[int, ...]:
    """Layers of each chunk: the first's, as many on all others but the last."""
    chunks = row["pp"] * row["vp"]
    first, last = row["first_layers"], row["last_layers"]
    left = SHAPES[row["model"]].layers - first - last
    return (first, *[left // (chunks - 2)] * (chunks - 2), last)
