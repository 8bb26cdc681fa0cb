"""Measure what Muon sends and computes in compiled steps, by owners and by optax.

    python -m recipes.bench.muon
    python -m recipes.bench.muon --layout fsdp=64

compiles each step for H100s that need not be there (the extra `aot` is needed), once
with AdamW, once with `meshpar.optimizers.muon` and once with `optax.contrib.muon`, and
prints what the optimizer alone sends, computes and needs room for. A compilation takes
half a minute to two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib
from rich.console import Console
from rich.table import Table

from meshpar import Layout, Model, absent_mesh, audit, batch_shapes, make_train_step
from meshpar.audit.report import AuditReport
from meshpar.collectives import ASKED_PREFIX
from meshpar.models.presets import build
from meshpar.optimizers import muon
from meshpar.optimizers.muon import NewtonSchulz
from meshpar.recipes.optimizers import muon_dims
from meshpar.rules.sharding import path_name

SEQ = 4096


class Case(NamedTuple):
    """A model, a layout and hardware for it; each device has two sequences."""

    preset: str
    layout: str
    target: str


CASES = (
    Case("llama3-8b", "fsdp=64", "gpu:h100:8x8"),
    Case("llama3-8b", "fsdp=8,tensor=8,sequence_parallel=true", "gpu:h100:8x8"),
    Case("llama3-8b", "stage=4,fsdp=16,microbatches=8", "gpu:h100:8x8"),
    Case("mixtral-8x7b", "expert=8", "gpu:h100:1x8"),
)


def main(argv: list[str] | None = None) -> int:
    """Compiles every case and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.muon")
    parser.add_argument("--layout", default="", help="layouts with this text only")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "layout", "optimizer"):
        table.add_column(heading)
    for heading in ("sent / bytes", "FLOPs / ideal", "surprises", "temporaries"):
        table.add_column(heading, justify="right")
    for case in CASES:
        if args.layout in case.layout:
            for row in rows(case):
                table.add_row(*row)
    versions = f"jax {jax.__version__}, optax {optax.__version__}"
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}")
    Console(width=150).print(table)
    return 0


def rows(case: Case) -> list[tuple[str, ...]]:
    """A row for Muon by owners, and one for optax's.

    Bytes are those of all devices over the bytes of all matrices in fp32; FLOPs those
    of the device with the most, beyond AdamW's step, over an equal share of all.
    """
    model, layout = build(case.preset), Layout.parse(case.layout)
    num_bytes, flops = matrix_bytes_and_flops(model)
    base = compiled(case, model, optax.adamw(1e-3))
    found = []
    for name, make in (("by owners", muon), ("optax's", contrib.muon)):
        report = compiled(case, model, muon_for(model, make))
        sent = layout.num_devices * sum(
            row.collective.wire_bytes * row.collective.executions
            for row in report.rows
            if f"{ASKED_PREFIX}optimizer" in row.collective.op_path
        )
        more = (report.flops - base.flops) * layout.num_devices
        temporaries = report.memory.temp_bytes / 2**30 if report.memory else math.nan
        found.append(
            (
                *(case.preset, case.layout, name),
                f"{sent / num_bytes:.2f}",
                f"{more / flops:.2f}",
                str(len(report.surprises)),
                f"{temporaries:.1f} GiB",
            )
        )
    return found


def compiled(case: Case, model: Model, optimizer: Any) -> AuditReport:
    """The audit of a step with two sequences for each device and microbatch."""
    layout = Layout.parse(f"{case.layout},precision=bf16,remat=full")
    step = make_train_step(
        model, optimizer, layout, mesh=absent_mesh(layout), max_grad_norm=1.0
    )
    examples = 2 * layout.batch_shards * layout.microbatches
    batch = batch_shapes(model, examples, seq=SEQ)
    return audit(step, batch, target=case.target, timeout_s=1800, memory_bytes=24 << 30)


def muon_for(model: Model, make: Callable[..., Any]) -> Any:
    """Muon of the matrices of a model's blocks."""
    dims = muon_dims(model)

    def chosen(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: dims.get(path_name(path)), params)

    return make(1e-2, muon_weight_dimension_numbers=chosen)


def matrix_bytes_and_flops(model: Model) -> tuple[int, int]:
    """Bytes of all matrices in fp32, and FLOPs to orthogonalize each once."""
    num_bytes, flops = 0, 0
    newton_schulz = NewtonSchulz(steps=5, preconditioning="frobenius")
    for path, dims in muon_dims(model).items():
        parameter = model.flat_parameters()[path]
        shape, layers = parameter.shape, parameter.num_layers or 1
        operation = newton_schulz.on_array(shape, dims)
        num_bytes += 4 * layers * math.prod(shape)
        each = math.prod(shape[dim] for dim in operation.batch_dims)
        flops += layers * each * operation.flops
    return num_bytes, flops


if __name__ == "__main__":
    raise SystemExit(main())
