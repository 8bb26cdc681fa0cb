"""Published runs as runs of the planner, each with what was measured.

Every number stands in `published.json`, with its source. Layouts that the papers state
in words are written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.block_time import block_time
from meshpar.planner.clusters import cluster_of
from meshpar.planner.estimate import Estimate, estimate
from meshpar.planner.execution import (
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2023,
    MEGATRON_2024,
    NANOTRON,
    Execution,
)
from meshpar.planner.run import Run
from meshpar.planner.shapes import SHAPES
from meshpar.planner.workload import Workload

GIB = 2**30
_BF16 = "precision=bf16"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published number and what the planner says.

    Args:
        source: Which publication.
        name: Which run.
        quantity: `step`, `memory`, or `layer` (one block's forward or backward).
        unit: `s`, `ms` or `GB`.
        measured: As published, or what follows from the published rate.
        predicted: The planner's.
        calibrates: Whether an efficiency constant was got from it.
        apart: Why it is shown, but not counted; empty if it is counted.
    """

    source: str
    name: str
    quantity: str
    unit: str
    measured: float
    predicted: float
    calibrates: bool = False
    apart: str = ""

    @property
    def error(self) -> float:
        """Relative: above 0 if the planner says more."""
        return self.predicted / self.measured - 1


@cache
def published() -> dict[str, Any]:
    """The published numbers."""
    return json.loads(files("meshpar.planner").joinpath("published.json").read_text())


def megatron_sc21() -> Iterator[Measured]:
    """Step times of Narayanan et al. 2021, table 1, from FLOP/s with recomputation."""
    data = published()["megatron_sc21_table1"]
    for row in data["rows"]:
        layout = Layout(
            data=row["d"],
            stage=row["p"],
            tensor=row["t"],
            microbatches=row["gbs"] // row["d"] // row["mbs"],
            remat="full",
            precision="bf16",
            **_chunks(row["layers"], row["p"], row["layers_per_vstage"]),
        )
        workload = SHAPES[f"megatron-{row['params_b']}b"]
        found = _estimate(workload, layout, row["gbs"], data["seq"], MEGATRON_2021)
        flops = megatron_sc21_flops(row, data["seq"], data["vocab"])
        yield Measured(
            source="Narayanan et al. 2021",
            name=f"{row['params_b']}B {layout}",
            quantity="step",
            unit="s",
            measured=flops / (row["gpus"] * row["tflops_gpu"] * 1e12),
            predicted=found.step_s,
        )


def megatron_sc21_flops(row: dict[str, Any], seq: int, vocab: int) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): their equation 3, recomputation included."""
    hidden, layers = row["hidden"], row["layers"]
    each = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * row["gbs"] * seq * layers * hidden**2 * each


def _chunks(layers: int, stages: int, per_chunk: int | None) -> dict[str, Any]:
    if per_chunk is None or layers // stages == per_chunk:
        return {}
    chunks = layers // stages // per_chunk
    return {"schedule": "interleaved_1f1b", "chunks": chunks}


def korthikanti_steps() -> Iterator[Measured]:
    """Iteration times of Korthikanti et al. 2022, table 5."""
    for row in published()["korthikanti_2022"]["rows"]:
        for key, remat in (
            ("iter_s_full", "remat=full"),
            ("iter_s_sp_selective", "sequence_parallel=true,remat=selective"),
        ):
            found = _korthikanti(row, remat)
            yield Measured(
                source="Korthikanti et al. 2022",
                name=f"{row['name']} {found.run.layout}",
                quantity="step",
                unit="s",
                measured=row[key],
                predicted=found.step_s,
            )


def korthikanti_memory() -> Iterator[Measured]:
    """Bytes of their figure 1: activations, and what parameters and Adam take."""
    for row in published()["korthikanti_2022"]["rows"]:
        for key, remat in (
            ("act_gib_none", "remat=none"),
            ("act_gib_sp_sel", "sequence_parallel=true,remat=selective"),
        ):
            found = _korthikanti(row, remat)
            boundary = found.memory.boundary_bytes
            yield Measured(
                source="Korthikanti et al. 2022",
                name=f"{row['name']} activations, {remat}",
                quantity="memory",
                unit="GB",
                measured=row[key] * GIB / 1e9,
                predicted=(found.memory.activation_bytes - boundary) / 1e9,
            )
        state = found.memory
        yield Measured(
            source="Korthikanti et al. 2022",
            name=f"{row['name']} parameters and optimizer",
            quantity="memory",
            unit="GB",
            measured=row["paramopt_gib"] * GIB / 1e9,
            predicted=(
                state.parameter_bytes + state.gradient_bytes + state.optimizer_bytes
            )
            / 1e9,
        )


def _korthikanti(row: dict[str, Any], remat: str) -> Estimate:
    text = (
        f"stage={row['p']},tensor={row['t']},"
        f"microbatches={row['gbs'] // row['mbs']},{remat},{_BF16}"
    )
    if row["interleave"] > 1:
        text += f",schedule=interleaved_1f1b,chunks={row['interleave']}"
    workload = SHAPES[row["name"].lower()]
    layout = Layout.parse(text)
    return _estimate(workload, layout, row["gbs"], 2048, MEGATRON_2022)


def korthikanti_layers() -> Iterator[Measured]:
    """Their table 4: one layer of the 22B model, which calibrates the A100."""
    texts = {
        "none": "remat=none",
        "sp": "sequence_parallel=true",
        "full": "remat=full",
        "selective": "remat=selective",
        "selective_sp": "sequence_parallel=true,remat=selective",
    }
    layer_ms = published()["korthikanti_2022"]["layer_ms_22b"]
    for key, (forward_ms, backward_ms, _) in layer_ms.items():
        layout = Layout.parse(f"tensor=8,{_BF16},{texts[key]}")
        run = Run(
            workload=SHAPES["22b"],
            cluster=cluster_of("a100-80gb", devices=8),
            layout=layout,
            execution=MEGATRON_2022,
            global_batch=4,
            seq=2048,
            stage_blocks=(48,),
        )
        time = block_time(run, moe=False)
        for name, measured, cost in (
            ("forward", forward_ms, time.forward),
            ("backward", backward_ms, time.backward),
        ):
            yield Measured(
                source="Korthikanti et al. 2022",
                name=f"22B layer, {name}, {texts[key]}",
                quantity="layer",
                unit="ms",
                measured=measured,
                predicted=cost.total_s * 1e3,
                calibrates=True,
            )


# The rows of the nanotron grid that calibrate the H100: (nodes, model).
_CALIBRATES = {(1, "1.34B"), (1, "8.86B"), (16, "1.34B")}
_LOW_MFU = 20.0


def nanotron() -> Iterator[Measured]:
    """Step times (from MFU) and memory of the Ultra-Scale Playbook's best runs."""
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
        found = _estimate(
            workload, layout, data["gbs_seqs"], data["seq"], NANOTRON, "h100-80gb"
        )
        name = f"{row['model']} on {row['nodes']} nodes, {layout}"
        at_mfu = row["mfu_pct"] / 100 / found.mfu
        low = row["mfu_pct"] < _LOW_MFU
        yield Measured(
            source="Tazi et al. 2025",
            name=name,
            quantity="step",
            unit="s",
            measured=found.step_s / at_mfu,
            predicted=found.step_s,
            calibrates=(row["nodes"], row["model"]) in _CALIBRATES,
            apart="below 20 % MFU" if low else "",
        )
        yield Measured(
            source="Tazi et al. 2025",
            name=name,
            quantity="memory",
            unit="GB",
            measured=row["mem_gb"],
            predicted=found.memory.total_bytes / 1e9,
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
    chunk) have one layer less than the others.
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
                found = _estimate(
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
                    apart="another stack: beyond the targets",
                )
                if index == 0:
                    yield Measured(
                        source="Qi et al. 2024",
                        name=f"{size} {layout}",
                        quantity="memory",
                        unit="GB",
                        measured=data["memory_gb"][schedule][column] * GIB / 1e9,
                        predicted=found.memory.total_bytes / 1e9,
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
    """Step times (from MFU) and memory of the baseline of Yeung et al. 2024."""
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
            found = _estimate(workload, layout, batch, row["seq"], MEGATRON_2024)
            name = f"vocab {words}, {row['seq']} tokens, {layout}"
            yield Measured(
                source="Yeung et al. 2024",
                name=name,
                quantity="step",
                unit="s",
                measured=found.step_s * found.mfu / (row["mfu_pct"][column] / 100),
                predicted=found.step_s,
                apart="another stack: beyond the targets",
            )
            yield Measured(
                source="Yeung et al. 2024",
                name=name,
                quantity="memory",
                unit="GB",
                measured=row["peak_gb"][column] * GIB / 1e9,
                predicted=found.memory.total_bytes / 1e9,
            )


def _estimate(
    workload: Workload,
    layout: Layout,
    global_batch: int,
    seq: int,
    execution: Execution,
    hardware: str = "a100-80gb",
    stage_blocks: tuple[int, ...] | None = None,
) -> Estimate:
    return estimate(
        workload,
        cluster_of(hardware, devices=layout.num_devices),
        layout,
        global_batch=global_batch,
        seq=seq,
        execution=execution,
        stage_blocks=stage_blocks,
    )


SOURCES: tuple[Callable[[], Iterator[Measured]], ...] = (
    korthikanti_layers,
    megatron_sc21,
    korthikanti_steps,
    nanotron,
    zero_bubble,
    vocab_parallel,
    korthikanti_memory,
)
"""Where the rows come from, in the order of the table."""
