"""Published runs of Megatron-LM as runs of the planner, each with what was measured.

Every number stands in `published.json`, with its source. Layouts that the papers state
in words are written out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import (
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    Execution,
)
from meshpar.planner.workload.config_json import GPT2_FIELDS
from meshpar.planner.workload.shapes import SHAPES
from meshpar.planner.workload.workload import Workload

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published number and the planner's estimate of it.

    Args:
        source: Publication.
        name: Run.
        quantity: `step`, `memory`, or `layer` (one block's forward or backward).
        unit: `s`, `ms` or `GB`.
        measured: As published, or what follows from the published rate.
        predicted: Estimate of the planner.
        calibrates: True if an efficiency constant was fitted to it.
        apart: Reason why it is shown but not counted; empty if it is counted.
        regime: Device and kind of model of a step time (`Plan.regime`).
        fits: False if the planner says that the run, which ran, needs more memory.
    """

    source: str
    name: str
    quantity: str
    unit: str
    measured: float
    predicted: float
    calibrates: bool = False
    apart: str = ""
    regime: str = ""
    fits: bool = True

    @property
    def counts(self) -> bool:
        """True if it says how far the planner is off."""
        return not (self.calibrates or self.apart)

    @property
    def error(self) -> float:
        """Relative error, above 0 if the planner predicts more."""
        return self.predicted / self.measured - 1


def step_row(
    source: str,
    name: str,
    measured_s: float,
    planned: Estimate,
    *,
    calibrates: bool = False,
) -> Measured:
    """Return a row for the step time of a run."""
    return Measured(
        source=source,
        name=name,
        quantity="step",
        unit="s",
        measured=measured_s,
        predicted=planned.step_s,
        calibrates=calibrates,
        regime=planned.regime,
        fits=planned.fits,
    )


def memory_row(
    source: str,
    name: str,
    measured_gib: float,
    predicted_bytes: float,
    *,
    calibrates: bool = False,
    apart: str = "",
) -> Measured:
    """Return a row for memory of a device, published in units of 2^30 bytes."""
    return Measured(
        source=source,
        name=name,
        quantity="memory",
        unit="GB",
        measured=measured_gib * _GIB / 1e9,
        predicted=predicted_bytes / 1e9,
        calibrates=calibrates,
        apart=apart,
    )


def interleaved(chunks: int) -> dict[str, Any]:
    """Layout options of a pipeline with this many chunks on a rank."""
    return {"schedule": "interleaved_1f1b", "chunks": chunks} if chunks > 1 else {}


@cache
def published() -> dict[str, Any]:
    """Published numbers, from `published.json`."""
    return json.loads(Path(__file__).parents[1].joinpath("published.json").read_text())


def estimate_published(
    workload: Workload,
    layout: Layout,
    global_batch: int,
    seq: int,
    execution: Execution,
    hardware: str = "a100-80gb",
    stage_blocks: tuple[int, ...] | None = None,
    hosts: int | None = None,
) -> Estimate:
    """Estimate a published run, on as many devices as its layout needs."""
    return estimate(
        workload,
        cluster_of(hardware, devices=layout.num_devices, hosts=hosts),
        layout,
        global_batch=global_batch,
        seq=seq,
        execution=execution,
        stage_blocks=stage_blocks,
    )


_BF16 = "precision=bf16"
_FORMULA = "a formula, not measured"
_KORTHIKANTI = "Korthikanti et al. 2022"
_BRIDGE = "Megatron Bridge 25.11"
_SELECTIVE = "sequence_parallel=true,remat=selective"


def megatron_sc21() -> Iterator[Measured]:
    """Step times of Narayanan et al. 2021, table 1, from FLOP/s with recomputation."""
    data = published()["megatron_sc21_table1"]
    for row in data["rows"]:
        per_chunk = row["layers_per_vstage"]
        chunks = row["layers"] // row["p"] // per_chunk if per_chunk else 1
        layout = Layout(
            data=row["d"],
            stage=row["p"],
            tensor=row["t"],
            microbatches=row["gbs"] // row["d"] // row["mbs"],
            remat="full",
            precision="bf16",
            **interleaved(chunks),
        )
        workload = SHAPES[f"megatron-{row['params_b']}b"]
        planned = estimate_published(
            workload, layout, row["gbs"], data["seq"], MEGATRON_2021
        )
        flops = megatron_sc21_flops(row, data["seq"], data["vocab"])
        measured_s = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
        name = f"{row['params_b']}B {layout}"
        yield step_row("Narayanan et al. 2021", name, measured_s, planned)


def megatron_sc21_flops(row: dict[str, Any], seq: int, vocab: int) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): their equation 3, recomputation included."""
    hidden, layers = row["hidden"], row["layers"]
    each = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * row["gbs"] * seq * layers * hidden**2 * each


def korthikanti_steps() -> Iterator[Measured]:
    """Iteration times of Korthikanti et al. 2022, table 5."""
    for row in published()["korthikanti_2022"]["rows"]:
        for key, remat in (
            ("iter_s_full", "remat=full"),
            ("iter_s_sp_selective", _SELECTIVE),
        ):
            planned = _korthikanti(row, remat)
            name = f"{row['name']} {planned.run.layout}"
            yield step_row(_KORTHIKANTI, name, row[key], planned)


def korthikanti_memory() -> Iterator[Measured]:
    """Bytes of their figure 1: activations, and what parameters and Adam take.

    The paper got them from formulas (its section 4 and 18 bytes a parameter), so that
    they show the counts to be equal, and are no measurements.
    """
    for row in published()["korthikanti_2022"]["rows"]:
        for key, remat in (
            ("act_gib_none", "remat=none"),
            ("act_gib_sp_sel", _SELECTIVE),
        ):
            planned = _korthikanti(row, remat)
            kept = planned.memory.activation_bytes - planned.memory.boundary_bytes
            name = f"{row['name']} activations, {remat}"
            yield memory_row(_KORTHIKANTI, name, row[key], kept, apart=_FORMULA)
        name = f"{row['name']} parameters and optimizer"
        state = _korthikanti(row, _SELECTIVE).memory.state_bytes  # under any remat
        yield memory_row(_KORTHIKANTI, name, row["paramopt_gib"], state, apart=_FORMULA)


def _korthikanti(row: dict[str, Any], remat: str) -> Estimate:
    text = (
        f"stage={row['p']},tensor={row['t']},"
        f"microbatches={row['gbs'] // row['mbs']},{remat},{_BF16}"
    )
    if row["interleave"] > 1:
        text += f",schedule=interleaved_1f1b,chunks={row['interleave']}"
    workload = SHAPES[row["name"].lower()]
    layout = Layout.parse(text)
    return estimate_published(workload, layout, row["gbs"], 2048, MEGATRON_2022)


def korthikanti_layers() -> Iterator[Measured]:
    """Their table 4: one layer of the 22B model, which calibrates the A100."""
    texts = {
        "none": "remat=none",
        "sp": "sequence_parallel=true",
        "full": "remat=full",
        "selective": "remat=selective",
        "selective_sp": _SELECTIVE,
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
                source=_KORTHIKANTI,
                name=f"22B layer, {name}, {texts[key]}",
                quantity="layer",
                unit="ms",
                measured=measured,
                predicted=cost.total_s * 1e3,
                calibrates=True,
            )


CALIBRATES_HOST = "1.7B"
"""The row that fixes its `host_s`: a sixth of so short a step."""

_SEQ, _VOCAB = 4096, 131_072
_REMATS = ("none", "selective", "full")


def megatron_core() -> Iterator[Measured]:
    """Step times of Megatron-LM's table of weak scaling, from FLOP/s of the model."""
    for row in published()["megatron_core_h100"]["rows"]:
        planned = _fastest(row)
        rate = row["gpus"] * row["tflops_gpu"] * 1e12
        yield step_row(
            "Megatron-LM README",
            f"{row['name']} {planned.run.layout}",
            planned.model_flops / rate,
            planned,
            calibrates=row["name"] == CALIBRATES_HOST,
        )


def _fastest(row: dict[str, Any]) -> Estimate:
    sizes = {key: row[key] for key in ("layers", "hidden", "heads")}
    untied = {**GPT2_FIELDS, "tied": False}
    workload = Workload(name=row["name"], vocab=_VOCAB, seq=_SEQ, **untied, **sizes)
    planned = [
        estimate_published(
            workload, layout, row["gbs"], _SEQ, MEGATRON_CORE, "h100-80gb"
        )
        for layout in _layouts(row)
    ]
    fitting = [one for one in planned if one.fits]
    return min(fitting, key=lambda one: one.step_s)


def _layouts(row: dict[str, Any]) -> Iterator[Layout]:
    """Every power of two as a microbatch's size, every number of whole chunks."""
    each, stages = row["gbs"] // row["d"], row["p"]
    blocks = row["layers"] // stages
    chunks = [n for n in range(1, blocks + 1) if blocks % n == 0 and stages > 1]
    for size in (1, 2, 4, 8):
        if each % size:
            continue
        for count in chunks or [1]:
            if count > 1 and each // size % stages:
                continue
            for remat in _REMATS:
                yield Layout(
                    fsdp=row["d"],
                    stage=stages,
                    tensor=row["t"],
                    microbatches=each // size,
                    zero=1,
                    sequence_parallel=row["t"] > 1,
                    remat=remat,
                    precision="bf16",
                    **interleaved(count),
                )


def megatron_bridge() -> Iterator[Measured]:
    """Step times from tokens a second of a GPU."""
    data = published()["megatron_bridge_25_11"]
    for row in data["rows"]:
        layout, chunks = _layout(row), row["pp"] * row["vp"]
        first, last = row["first_layers"], row["last_layers"]
        left = SHAPES[row["model"]].layers - first - last
        modules, graphs = row["recomputed"], row["graphs"]
        program = replace(MEGATRON_BRIDGE, recomputes=modules, graphs=graphs)
        planned = estimate_published(
            SHAPES[row["model"]],
            layout,
            row["gbs"],
            data["seq"],
            program,
            row["hardware"],
            # Layers of each chunk: the first's, as many on all others but the last.
            stage_blocks=(first, *[left // (chunks - 2)] * (chunks - 2), last),
        )
        measured_s = row["gbs"] * data["seq"] / (row["tokens_s_gpu"] * row["gpus"])
        name = f"{row['model']} on {row['gpus']} {row['hardware']}, {layout}"
        calibrates = row.get("calibrates", False)
        yield step_row(_BRIDGE, name, measured_s, planned, calibrates=calibrates)


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
