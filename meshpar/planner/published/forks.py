"""Published runs of two forks of Megatron-LM, both about pipelines on A100s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2023, MEGATRON_2024
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    interleaved,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.workload.hf_workload import GPT2
from meshpar.planner.workload.workload import Workload

_QI = "Qi et al. 2024"
_YEUNG = "Yeung et al. 2024"

CALIBRATES_RESERVE = ("1F1B", "14.6B")
"""The row of Qi et al. 2024 that fixes what Megatron-LM's allocator holds besides."""


def zero_bubble_passes() -> Iterator[Measured]:
    """One stage's forward and backward, profiled by Qi et al. 2024, of three layers.

    They calibrate no efficiency. What Megatron-LM waits for a hop (`hop_wait_s` of its
    executions) is calibrated, on the column of communication beside them, which is
    therefore no row here.
    """
    data = published()["zero_bubble_2401_10241"]
    for row in data["profile_and_bubble"]:
        size, count = row["model"], row["m"]
        model = data["models"][size]
        run = Run(
            workload=_gpt(size, model, vocab=51_200, seq=data["seq"]),
            cluster=cluster_of("a100-80gb", devices=model["p"]),
            layout=Layout(stage=model["p"], microbatches=count, precision="bf16"),
            execution=MEGATRON_2023,
            global_batch=count * model["mbs"],
            seq=data["seq"],
            stage_blocks=_one_less_at_ends(model, model["p"]),
        )
        time = block_time(run, moe=False)
        for name, cost, measured_ms in (
            ("forward", time.forward, row["TF"]),
            ("backward for inputs", time.input_grad, row["TB"]),
            ("backward for weights", time.weight_grad, row["TW"]),
        ):
            yield Measured(
                source=_QI,
                name=f"{size} stage, m={count}, {name}",
                quantity="layer",
                unit="ms",
                measured=measured_ms,
                predicted=cost.total_s * run.stage_blocks[1] * 1e3,
            )


def zero_bubble() -> Iterator[Measured]:
    """Step times and memory of Qi et al. 2024, of the two schedules that exist here.

    Embedding and head count as a layer each, so that the first and the last stage (or
    chunk) have one layer less than the others. Memory is in units of 2^30 bytes:
    Megatron-LM's `report_memory`, which the authors' fork has, divides by 1024 * 1024.
    """
    data = published()["zero_bubble_2401_10241"]
    for column, (size, model) in enumerate(data["models"].items()):
        workload = _gpt(size, model, vocab=51_200, seq=data["seq"])
        for schedule in ("1F1B", "1F1B-I"):
            chunks = (model["layers"] + 2) // model["p"] if schedule != "1F1B" else 1
            rates = data["samples_per_gpu_s"][schedule][size]
            for index, (count, rate) in enumerate(zip(model["m"], rates, strict=True)):
                layout = Layout(
                    stage=model["p"],
                    microbatches=count,
                    precision="bf16",
                    **interleaved(chunks),
                )
                batch = count * model["mbs"]
                found = estimate_published(
                    workload,
                    layout,
                    batch,
                    data["seq"],
                    MEGATRON_2023,
                    stage_blocks=_one_less_at_ends(model, model["p"] * chunks),
                )
                name = f"{size} {layout}"
                yield step_row(_QI, name, batch / (rate * model["p"]), found)
                if index == 0:
                    yield memory_row(
                        _QI,
                        name,
                        data["memory_gb"][schedule][column],
                        found.memory.total_bytes,
                        calibrates=(schedule, size) == CALIBRATES_RESERVE,
                    )


def _one_less_at_ends(model: dict[str, Any], stages: int) -> tuple[int, ...]:
    each = (model["layers"] + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def _gpt(name: str, model: dict[str, Any], *, vocab: int, seq: int) -> Workload:
    sizes = {key: model[key] for key in ("layers", "hidden", "heads")}
    return Workload(name=name, vocab=vocab, seq=seq, **GPT2, **sizes)


def vocab_parallel() -> Iterator[Measured]:
    """Step times (from MFU) and memory of the baseline of Yeung et al. 2024.

    Memory is in units of 2^30 bytes, as in `zero_bubble`, whose authors' code it runs.
    """
    data = published()["vocab_parallel_2411_05288_table5_1f1b"]
    for row in data["rows"]:
        if row["method"] != "baseline":
            continue
        model = data["models"][str(row["gpus"])]
        for column, words in enumerate(data["vocabs"]):
            vocab = int(words.rstrip("k")) * 1024
            workload = _gpt(f"vocab {words}", model, vocab=vocab, seq=row["seq"])
            layout = Layout(stage=row["gpus"], microbatches=data["m"], precision="bf16")
            batch = data["m"] * data["mbs"]
            found = estimate_published(
                workload, layout, batch, row["seq"], MEGATRON_2024
            )
            name = f"vocab {words}, {row['seq']} tokens, {layout}"
            measured_s = found.step_s * found.mfu / (row["mfu_pct"][column] / 100)
            yield step_row(_YEUNG, name, measured_s, found)
            peak_gib = row["peak_gb"][column]
            yield memory_row(_YEUNG, name, peak_gib, found.memory.total_bytes)
