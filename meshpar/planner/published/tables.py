"""Rows of public performance tables, each of which says its whole run.

A row of `published.json`, `public_tables`, has the words that `meshpar estimate` takes:
hardware, model, layout, execution, and `program` where its recipe changes that. One
source of rows is one family. LLM Foundry's
tables have a form of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.machine.execution import EXECUTIONS, LLM_FOUNDRY
from meshpar.planner.published.megatron import (
    Measured,
    estimate_published,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.workload.config_json import GPT2_FIELDS
from meshpar.planner.workload.shapes import workload_of
from meshpar.planner.workload.workload import Workload


def family_rows(family: str) -> Iterator[Measured]:
    """Yield step times, and memory where it was printed, of one family's rows."""
    for row in _table():
        if row["family"] != family:
            continue
        layout = Layout.parse(row["layout"])
        planned = estimate_published(
            workload_of(row["model"], words=row.get("sizes")),
            layout,
            row["global_batch"],
            row["seq"],
            replace(EXECUTIONS[row["execution"]], **row.get("program", {})),
            row["hardware"],
            _stage_blocks(row),
            hosts=row.get("hosts"),
        )
        calibrates = row.get("calibrates", False)
        measured_s = _step_s(row, layout)
        yield step_row(family, row["name"], measured_s, planned, calibrates=calibrates)
        if "memory_gib" in row:
            used = planned.memory.total_bytes
            yield memory_row(family, row["name"], row["memory_gib"], used)


def _stage_blocks(row: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the blocks of every stage, where the row says `stage_blocks`.

    Stages separated by commas: `1,62*2,1` are 64 stages, all but the ends of 2 blocks;
    some of Megatron's have none, which `splits` cannot say.
    """
    if "stage_blocks" not in row:
        return None
    blocks: list[int] = []
    for part in row["stage_blocks"].split(","):
        *times, each = map(int, part.split("*"))
        blocks += [each] * (times[0] if times else 1)
    return tuple(blocks)


def _step_s(row: dict[str, Any], layout: Layout) -> float:
    """Return the measured seconds of a step."""
    if row["unit"] == "step_s":
        return row["measured"]
    tokens = row["global_batch"] * row["seq"]
    return tokens / (row["measured"] * layout.num_devices)


def _table() -> list[dict[str, Any]]:
    return published()["public_tables"]["rows"]


CALIBRATES_FLASH_ATTENTION = (("1b", 32_768), ("1b", 65_536))
"""Model and tokens of the rows on an A100 that fix what the first FlashAttention
achieves, forward and backward: one runs it once, one makes it again."""


def llm_foundry(device: str, precision: str) -> Iterator[Measured]:
    """Yield the step times of MPT models on one kind of device, of 40 or 80 GB."""
    family = f"LLM Foundry {device}" + (" fp8" if precision == "fp8" else "")
    data = published()["llm_foundry"]
    for values in data["rows"]:
        row = dict(zip(data["columns"], values, strict=True))
        on_device = row["hardware"].startswith(device.lower())
        if not on_device or row["precision"] != precision:
            continue
        sequences = row["microbatch"] * row["microbatches"]
        layout = Layout(
            fsdp=row["gpus"],
            microbatches=row["microbatches"],
            remat="full" if row["checkpointed"] else "none",
            precision=precision,
        )
        planned = estimate_published(
            _mpt(row["model"], row["seq"]),
            layout,
            row["gpus"] * sequences,
            row["seq"],
            LLM_FOUNDRY,
            row["hardware"],
        )
        calibrates = (row["model"], row["seq"]) in CALIBRATES_FLASH_ATTENTION
        yield step_row(
            family,
            f"mpt-{row['model']}, {row['seq']} x {sequences}, {row['hardware']}, "
            f"{layout}",
            sequences * row["seq"] / row["tok_s_gpu"],
            planned,
            calibrates=calibrates and row["hardware"] == "a100",
        )


def _mpt(name: str, seq: int) -> Workload:
    sizes = published()["llm_foundry"]["sizes"][name]
    return Workload(
        name=f"mpt-{name}", vocab=_MPT_VOCAB, seq=seq, **GPT2_FIELDS, **sizes
    )


_MPT_VOCAB = 50_368

FAMILIES = tuple(dict.fromkeys(row["family"] for row in _table()))
"""Names of the families, in the order of the table."""

SOURCES: tuple[Callable[[], Iterator[Measured]], ...] = (
    *(partial(family_rows, family) for family in FAMILIES),
    partial(llm_foundry, "A100", "bf16"),
    partial(llm_foundry, "H100", "bf16"),
    partial(llm_foundry, "H100", "fp8"),
)
"""Where the rows come from, one source a family."""
