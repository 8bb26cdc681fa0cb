"""Compile a pipeline of 34.6B parameters for 64 absent devices.

    python -m recipes.bench.large_pipeline --target gpu:h100:8x8 tpu:v5p:4x4x4

prints the temporary memory per device, and how long tracing and compiling took, for
each number of microbatches: of the whole step, with clipping and AdamW, its state
donated; with `--program gradients` of loss and gradients alone, which are what that
returns and no temporary memory. Hidden 8192, 32 blocks, 64 heads, MLP
32768, vocabulary 32768, sequences of 2048, one a data rank and microbatch,
`data=4,stage=4,tensor=4` with sequence parallelism and full remat. The extra `aot` is
needed, an accelerator is not.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import shlex
import sys
import time

import jax
import optax
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.models.presets import build

SIZES = dict(
    gated=True,
    layers=32,
    hidden=8192,
    heads=64,
    kv_heads=64,
    ffn=32768,
    vocab=32768,
    tied=True,
)
LINE = "data=4,stage=4,tensor=4,sequence_parallel=true,remat={remat},precision=bf16"
SEQ = 2048


def main(argv: list[str] | None = None) -> int:
    """Compiles and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.large_pipeline")
    parser.add_argument(
        "--target", nargs="+", default=["gpu:h100:8x8", "tpu:v5p:4x4x4"]
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--gradients", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--schedule", nargs="+", default=["1f1b"])
    parser.add_argument("--remat", default="full")
    parser.add_argument("--program", choices=("step", "gradients"), default="step")
    args = parser.parse_args(argv)
    model = build(**SIZES)
    print(
        f"{model.num_parameters / 1e9:.1f}B parameters, {LINE.format(remat=args.remat)}"
        f"; {os.cpu_count()} cores, Python {platform.python_version()}, jax "
        f"{jax.__version__}; {datetime.date.today()}"
    )
    print(shlex.join(["python", "-m", "recipes.bench.large_pipeline", *sys.argv[1:]]))
    sizes = ("temp", "new results", "peak", "s")
    columns = ("target", "gradients", "schedule", "M", *sizes)
    print("GB per device, seconds to trace and compile")
    table = Table(*columns, box=None, pad_edge=False)
    cases = itertools.product(
        args.target, args.gradients, args.schedule, args.microbatches
    )
    for case in cases:
        row = compiled(model, *case, args.remat, args.program)
        print(*row, flush=True)
        table.add_row(*row)
    Console().print(table)
    return 0


def compiled(
    model: meshpar.Model,
    target: str,
    dtype: str,
    schedule: str,
    microbatches: int,
    remat: str,
    program: str,
) -> tuple[str, ...]:
    """A row of the table."""
    start = time.perf_counter()
    line = LINE.format(remat=remat)
    layout = meshpar.Layout.parse(
        f"{line},param_dtype=bf16,microbatches={microbatches},schedule={schedule}"
    )
    step = meshpar.make_train_step(
        model,
        optax.adamw(1e-3),
        layout,
        mesh=meshpar.absent_mesh(layout),
        max_grad_norm=1.0,
        gradient_dtype=dtype,
    )
    batch = meshpar.batch_shapes(layout.data * microbatches, SEQ)
    audited = step if program == "step" else step.gradient_program
    memory = meshpar.audit(
        audited, batch, target=target, timeout_s=3600
    ).compiled_memory
    not_donated = memory.output_bytes - memory.alias_bytes
    return (
        target,
        dtype,
        schedule,
        str(microbatches),
        f"{memory.temp_bytes / 1e9:.2f}",
        f"{not_donated / 1e9:.2f}",
        f"{memory.peak_bytes / 1e9:.2f}",
        f"{time.perf_counter() - start:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
