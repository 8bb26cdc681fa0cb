"""Published runs beside Megatron-LM's own, and the list of all sources.

Forks of Megatron-LM (zero bubble, vocabulary parallel), DeepSpeed ZeRO-3, MaxText and
nanotron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.layout.layout import ATTENTION_MIXED, BLOCK_INPUT
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import (
    DEEPSPEED_ZERO3,
    MAXTEXT,
    MEGATRON_2023,
    MEGATRON_2024,
    NANOTRON,
)
from meshpar.planner.published.megatron import (
    Measured,
    estimate_published,
    interleaved,
    korthikanti_layers,
    korthikanti_memory,
    korthikanti_steps,
    megatron_bridge,
    megatron_core,
    megatron_sc21,
    megatron_sc21_flops,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.workload.config_json import GPT2_FIELDS
from meshpar.planner.workload.shapes import SHAPES
from meshpar.planner.workload.workload import Workload

_QI = "Qi et al. 2024"
_YEUNG = "Yeung et al. 2024"

_QI_VOCAB = 32_000
"""Vocabulary of Qi et al. 2024, which the paper does not state.

Its models have the parameters that name them (14.6B, 28.3B) with 32,000 tied
embeddings and not with the 51,200 of Megatron-LM's GPT (14.7B, 28.4B), and the
authors' script (`pretrain_zero_bubble.sh`) trains on a SentencePiece tokenizer.
"""

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
            workload=_gpt(size, model, vocab=_QI_VOCAB, seq=data["seq"]),
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
    """Step times and memory of Qi et al. 2024, of the schedules that exist here.

    ZB-1p is searched for the profiled times in the memory of 1F1B; in all of their
    cells its bubble is that of ZB-H1, which stands for it. ZB-2p, with twice the
    memory, has half of ZB-H2's bubble or less, and is not compared.

    Embedding and head count as a layer each, so that the first and the last stage (or
    chunk) have one layer less than the others. Memory is in units of 2^30 bytes:
    Megatron-LM's `report_memory`, which the authors' fork has, divides by 1024 * 1024.
    """
    data = published()["zero_bubble_2401_10241"]
    for column, (size, model) in enumerate(data["models"].items()):
        workload = _gpt(size, model, vocab=_QI_VOCAB, seq=data["seq"])
        for schedule in ("1F1B", "1F1B-I", "ZB-1p"):
            most_chunks = (model["layers"] + 2) // model["p"]
            chunks = most_chunks if schedule == "1F1B-I" else 1
            keys = interleaved(chunks)
            if schedule == "ZB-1p":
                keys = {"schedule": "zero_bubble_h1"}
            rates = data["samples_per_gpu_s"][schedule][size]
            for index, (count, rate) in enumerate(zip(model["m"], rates, strict=True)):
                layout = Layout(
                    stage=model["p"],
                    microbatches=count,
                    precision="bf16",
                    **keys,
                )
                batch = count * model["mbs"]
                planned = estimate_published(
                    workload,
                    layout,
                    batch,
                    data["seq"],
                    MEGATRON_2023,
                    stage_blocks=_one_less_at_ends(model, model["p"] * chunks),
                )
                name = f"{size} {layout}"
                yield step_row(_QI, name, batch / (rate * model["p"]), planned)
                if index == 0:
                    yield memory_row(
                        _QI,
                        name,
                        data["memory_gb"][schedule][column],
                        planned.memory.total_bytes,
                        calibrates=(schedule, size) == CALIBRATES_RESERVE,
                    )


def _one_less_at_ends(model: dict[str, Any], stages: int) -> tuple[int, ...]:
    each = (model["layers"] + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def _gpt(name: str, model: dict[str, Any], *, vocab: int, seq: int) -> Workload:
    sizes = {key: model[key] for key in ("layers", "hidden", "heads")}
    return Workload(name=name, vocab=vocab, seq=seq, **GPT2_FIELDS, **sizes)


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
            planned = estimate_published(
                workload, layout, batch, row["seq"], MEGATRON_2024
            )
            name = f"vocab {words}, {row['seq']} tokens, {layout}"
            measured_s = planned.step_s * planned.mfu / (row["mfu_pct"][column] / 100)
            yield step_row(_YEUNG, name, measured_s, planned)
            peak_gib = row["peak_gb"][column]
            yield memory_row(_YEUNG, name, peak_gib, planned.memory.total_bytes)


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
        large = row["params_b"] == 174.6  # GPT-3; the others are of their table 1
        workload = SHAPES["gpt3-175b" if large else f"megatron-{row['params_b']}b"]
        planned = estimate_published(
            workload, layout, row["gbs"], 2048, DEEPSPEED_ZERO3
        )
        sizes = {"hidden": workload.hidden, "layers": workload.layers}
        flops = megatron_sc21_flops({**row, **sizes}, 2048, workload.vocab)
        yield step_row(
            "Narayanan et al. 2021, ZeRO-3",
            f"{row['params_b']}B {layout}",
            flops / (row["gpus"] * row["tflops_gpu"] * 1e12),
            planned,
            calibrates=row["gpus"] == CALIBRATES_RAILS,
        )


_MAXTEXT_SIZES = ("layers", "hidden", "heads", "ffn", "head_dim")


def maxtext() -> Iterator[Measured]:
    """Step times of MaxText's published TPU configurations, from model FLOP/s."""
    for row in published()["maxtext_tpu"]["rows"]:
        layout = Layout.parse(f"{row['layout']},precision=bf16,remat={row['remat']}")
        sizes = {key: row[key] for key in _MAXTEXT_SIZES}
        planned = estimate_published(
            Workload(name=row["name"], vocab=32_000, seq=2048, gated=True, **sizes),
            layout,
            row["batch_per_chip"] * row["chips"],
            2048,
            MAXTEXT,
            f"tpu-{row['chip']}:{row['topology']}",
        )
        rate = row["chips"] * row["tflops_chip"] * 1e12
        name = f"{row['name']} on {row['chip']} {row['topology']}, {layout}"
        yield step_row("MaxText README", name, planned.model_flops / rate, planned)


CALIBRATES_ATTENTION = 4 * 2**20
"""Tokens of the row that fixes what splash attention achieves."""


def maxtext_long_context() -> Iterator[Measured]:
    """Step times of MaxText around a ring on TPUs, of sequences up to 4M tokens.

    MaxText keeps the log-sum-exp of scores with attention's output, as our residual of
    that name does.
    """
    data = published()["maxtext_long_context"]
    for row in data["rows"]:
        split = ("fsdp", "context") if row["fsdp"] > 1 else ("context",)
        places = {ATTENTION_MIXED: row["attended"], BLOCK_INPUT: row["input"]}
        moved = [name for name, place in places.items() if place == "offload"]
        layout = Layout(
            fsdp=row["fsdp"],
            context=row["context"],
            zero_axes=split,
            remat=f"offload:{'/'.join(moved)}" if moved else f"save:{ATTENTION_MIXED}",
            precision="bf16",
        )
        workload = Workload(
            name="llama3.1-8b", seq=row["seq"], gated=True, **data["model"]
        )
        planned = estimate_published(
            workload, layout, row["gbs"], row["seq"], MAXTEXT, data["hardware"]
        )
        calibrates = row["seq"] == CALIBRATES_ATTENTION
        name = f"{row['seq'] // 1024}K tokens, {layout}"
        yield step_row(_LONG, name, row["step_s"], planned, calibrates=calibrates)


_LONG = "MaxText long context"

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
        planned = estimate_published(
            workload, layout, data["gbs_seqs"], data["seq"], NANOTRON, "h100-80gb"
        )
        name = f"{row['model']} on {row['nodes']} nodes, {layout}"
        at_mfu = row["mfu_pct"] / 100 / planned.mfu
        calibrates = (row["nodes"], row["model"]) in _CALIBRATES
        measured_s = planned.step_s / at_mfu
        yield step_row(_TAZI, name, measured_s, planned, calibrates=calibrates)
        first = rank_memories(planned.run)[0]
        yield memory_row(_TAZI, name, row["mem_gb"], first.total_bytes)


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
    maxtext_long_context,
    zero_bubble_passes,
    zero_bubble,
    vocab_parallel,
    korthikanti_memory,
)
"""Where the rows come from, in the order of the table."""
