"""Published runs of other programs: nanotron, and two forks of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.machine.execution import MEGATRON_2023, MEGATRON_2024, NANOTRON
from meshpar.planner.published.measured import (
    GIB,
    Measured,
    estimate_published,
    published,
)
from meshpar.planner.published.megatron import (
    korthikanti_layers,
    korthikanti_memory,
    korthikanti_steps,
    megatron_sc21,
)
from meshpar.planner.published.megatron_core import megatron_core
from meshpar.planner.published.zero3 import deepspeed_zero3, maxtext
from meshpar.planner.workload.workload import Workload

CALIBRATES_HOST = (16, "1.34B")
"""The row of the nanotron grid that fixes its `host_s`: a third of so short a step,
where the two others that calibrate have a hundredth (nodes, model)."""

CALIBRATES_RESERVE = ("1F1B", "14.6B")
"""The row of Qi et al. 2024 that fixes what Megatron-LM's allocator holds besides."""

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
        yield Measured(
            source="Tazi et al. 2025",
            name=name,
            quantity="step",
            unit="s",
            measured=found.step_s / at_mfu,
            predicted=found.step_s,
            calibrates=(row["nodes"], row["model"]) in _CALIBRATES,
        )
        yield Measured(
            source="Tazi et al. 2025",
            name=name,
            quantity="memory",
            unit="GB",
            measured=row["mem_gb"] * GIB / 1e9,
            predicted=rank_memories(found.run)[0].total_bytes / 1e9,
        )


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
                    **_interleaved(chunks),
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
                yield Measured(
                    source="Qi et al. 2024",
                    name=f"{size} {layout}",
                    quantity="step",
                    unit="s",
                    measured=batch / (rate * model["p"]),
                    predicted=found.step_s,
                )
                if index == 0:
                    yield Measured(
                        source="Qi et al. 2024",
                        name=f"{size} {layout}",
                        quantity="memory",
                        unit="GB",
                        measured=data["memory_gb"][schedule][column] * GIB / 1e9,
                        predicted=found.memory.total_bytes / 1e9,
                        calibrates=(schedule, size) == CALIBRATES_RESERVE,
                    )


def _interleaved(chunks: int) -> dict[str, Any]:
    return {"schedule": "interleaved_1f1b", "chunks": chunks} if chunks > 1 else {}


def _one_less_at_ends(model: dict[str, Any], stages: int) -> tuple[int, ...]:
    each = (model["layers"] + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def _gpt(name: str, model: dict[str, Any], *, vocab: int, seq: int) -> Workload:
    sizes = {key: model[key] for key in ("layers", "hidden", "heads")}
    return Workload(
        name=name,
        vocab=vocab,
        seq=seq,
        tied=True,
        learned_positions=True,
        layer_norm=True,
        biases=True,
        **sizes,
    )


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
            yield Measured(
                source="Yeung et al. 2024",
                name=name,
                quantity="step",
                unit="s",
                measured=found.step_s * found.mfu / (row["mfu_pct"][column] / 100),
                predicted=found.step_s,
            )
            yield Measured(
                source="Yeung et al. 2024",
                name=name,
                quantity="memory",
                unit="GB",
                measured=row["peak_gb"][column] * GIB / 1e9,
                predicted=found.memory.total_bytes / 1e9,
            )


SOURCES: tuple[Callable[[], Iterator[Measured]], ...] = (
    korthikanti_layers,
    megatron_sc21,
    korthikanti_steps,
    nanotron,
    megatron_core,
    deepspeed_zero3,
    maxtext,
    zero_bubble,
    vocab_parallel,
    korthikanti_memory,
)
"""Where the rows come from, in the order of the table."""
