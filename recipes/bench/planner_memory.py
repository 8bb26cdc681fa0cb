"""Compare the planner's bytes with the compiler's, for absent machines.

    python -m recipes.bench.planner_memory
    python -m recipes.bench.planner_memory --target tpu --preset llama3-8b

compiles each case for hardware that need not be there (the extra `aot` is needed) and
prints predicted and compiled bytes per device: memory, and what a device sends over
each mesh axis. What is compiled has XLA's attention, since no cuDNN can be traced
without a GPU; so has what is predicted. Half a minute a case on 2 cores.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import sys
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from meshpar.audit.target import Target
from meshpar.cli.confirm import Confirmed, cluster_target, compiled
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import workload_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine under a layout, in bf16.

    Args:
        preset: The model.
        hardware: As `--hardware` takes it.
        layout: Without its precision.
        batch: Sequences in a step.
        seq: Tokens of one.
    """

    preset: str
    hardware: str
    layout: str
    batch: int
    seq: int = 4096


def _cases(
    preset: str, hardware: str, batch: int, *layouts: str, seq: int = 4096
) -> list[Case]:
    return [
        Case(preset=preset, hardware=hardware, layout=layout, batch=batch, seq=seq)
        for layout in layouts
    ]


CASES = [
    *_cases(
        "llama3-8b",
        "h100-80gb",
        16,
        "fsdp=8,remat=full",
        "fsdp=8,remat=selective",
        "fsdp=4,tensor=2,sequence_parallel=true,remat=full",
        "data=2,fsdp=4,zero=1,remat=full",
        "fsdp=2,stage=4,microbatches=8,remat=full",
    ),
    *_cases(
        "llama3-70b",
        "h100-80gb",
        64,
        "fsdp=8,tensor=8,sequence_parallel=true,remat=full",
        "fsdp=2,stage=4,tensor=8,microbatches=8,remat=full",
    ),
    *_cases(
        "llama3-8b",
        "tpu-v5p:2x2x2",
        16,
        "fsdp=8,remat=full",
        "fsdp=8,remat=dots",
        "data=2,fsdp=4,remat=full",
        "fsdp=4,tensor=2,sequence_parallel=true,remat=full",
        "fsdp=2,stage=4,microbatches=8,remat=full",
    ),
    *_cases(
        "llama3-70b",
        "tpu-v5p:4x4x4",
        64,
        "fsdp=16,tensor=4,sequence_parallel=true,remat=full",
    ),
    *_cases("llama3-8b", "tpu-v6e:4x4", 32, "fsdp=16,remat=full"),
    *_cases("llama3-8b", "tpu-v5e:4x8", 32, "fsdp=32,remat=full"),
    *_cases(
        "dit-12b",
        "h100-80gb",
        8,
        "fsdp=8,remat=full",
        "fsdp=4,tensor=2,sequence_parallel=true,remat=full",
        seq=16_384,
    ),
    *_cases("dit-12b", "tpu-v5p:2x2x2", 8, "fsdp=8,remat=full", seq=16_384),
]


def main(argv: list[str] | None = None) -> int:
    """Compiles every case, one after another, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.planner_memory")
    parser.add_argument("--preset", default="", help="cases of this model only")
    parser.add_argument(
        "--target", default="", help="cases of this hardware: tpu, h100"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # this process only traces
    cases = [
        case
        for case in CASES
        if args.preset in case.preset and args.target in case.hardware
    ]
    found = []
    for case in cases:
        one = confirmed(case)
        found.append((case, one))
        print(*one.lines(), sep="\n", flush=True)
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}; "
        f"{datetime.date.today()}"
    )
    print(shlex.join(["python", "-m", "recipes.bench.planner_memory", *sys.argv[1:]]))
    Console(width=150).print(memory_table(found))
    return 0


def confirmed(case: Case) -> Confirmed:
    """One case, predicted and compiled."""
    layout = f"{case.layout},precision=bf16"
    devices = None
    if ":" not in case.hardware:
        devices = 8 if "tensor=8" not in case.layout else 64
    plan = estimate(
        workload_of(case.preset),
        cluster_of(case.hardware, devices=devices),
        layout,
        global_batch=case.batch,
        seq=case.seq,
    )
    target: Target = cluster_target(plan.run.cluster)
    return compiled(build(case.preset), target, plan)


def memory_table(found: list[tuple[Case, Confirmed]]) -> Table:
    """A row for each case, bytes in GB of one device."""
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "machine", "layout"):
        table.add_column(heading, overflow="fold", max_width=48)
    for heading in ("predicted", "compiled", "apart", "sent over: apart"):
        table.add_column(heading, justify="right", overflow="fold")
    for case, one in found:
        row = (case.preset, one.target, case.layout)
        if one.problem:
            table.add_row(*row, one.problem)
            continue
        table.add_row(
            *row,
            f"{one.predicted_bytes / 1e9:.2f}",
            f"{one.compiled_bytes / 1e9:.2f}",
            f"{one.predicted_bytes / one.compiled_bytes - 1:+.1%}",
            ", ".join(
                f"{'+'.join(axes)} {ours / theirs - 1:+.1%}"
                for axes, (ours, theirs) in one.collectives.items()
                if max(ours, theirs) > 1e6 and theirs
            ),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
