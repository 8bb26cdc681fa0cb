"""Published runs of Megatron-LM as runs of the planner, each with what was measured.

Every number stands in `published.json`, with its source. Layouts that the papers state
in words are written out here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2021, MEGATRON_2022
from meshpar.planner.published.measured import (
    Measured,
    estimate_published,
    interleaved,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.workload.shapes import SHAPES

_BF16 = "precision=bf16"
_FORMULA = "a formula, not measured"
_KORTHIKANTI = "Korthikanti et al. 2022"
_SELECTIVE = "sequence_parallel=true,remat=selective"


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
            **interleaved(_chunks(row["layers"], row["p"], row["layers_per_vstage"])),
        )
        workload = SHAPES[f"megatron-{row['params_b']}b"]
        found = estimate_published(
            workload, layout, row["gbs"], data["seq"], MEGATRON_2021
        )
        flops = megatron_sc21_flops(row, data["seq"], data["vocab"])
        measured_s = flops / (row["gpus"] * row["tflops_gpu"] * 1e12)
        name = f"{row['params_b']}B {layout}"
        yield step_row("Narayanan et al. 2021", name, measured_s, found)


def megatron_sc21_flops(row: dict[str, Any], seq: int, vocab: int) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): their equation 3, recomputation included."""
    hidden, layers = row["hidden"], row["layers"]
    each = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * row["gbs"] * seq * layers * hidden**2 * each


def _chunks(layers: int, stages: int, per_chunk: int | None) -> int:
    return 1 if per_chunk is None else layers // stages // per_chunk


def korthikanti_steps() -> Iterator[Measured]:
    """Iteration times of Korthikanti et al. 2022, table 5."""
    for row in published()["korthikanti_2022"]["rows"]:
        for key, remat in (
            ("iter_s_full", "remat=full"),
            ("iter_s_sp_selective", _SELECTIVE),
        ):
            found = _korthikanti(row, remat)
            name = f"{row['name']} {found.run.layout}"
            yield step_row(_KORTHIKANTI, name, row[key], found)


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
            found = _korthikanti(row, remat)
            kept = found.memory.activation_bytes - found.memory.boundary_bytes
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
