"""Measure tokens/s, MFU and memory on one GPU, for meshpar, plain JAX and PyTorch.

    python -m recipes.bench.gpu
    python -m recipes.bench.gpu --shape gpt2 --batch 32 --steps 50

Trains GPT-2 124M and a Llama of 1.2B parameters in bf16 with cuDNN attention: meshpar's
step, a JAX step written by hand (`plain_step.py`) and, where torch is installed, a
`torch.compile` step of the same model. Each runs in a process of its own, which has the
GPU's memory to itself; the first losses of all must agree. Ends with status 2 where
there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from meshpar.hardware.devices import device_from_kind
from meshpar.models.presets import PRESETS
from meshpar.recipes.bench.gpu_contestants import MEASURES, Measured, Shape, bf16_agrees

SHAPES = {
    "gpt2": Shape(config=PRESETS["gpt2"], batch=16, seq=1024),
    "llama-1.2b": Shape(config=PRESETS["llama3.2-1b"], batch=4, seq=2048),
}


def main(argv: list[str] | None = None) -> None:
    """Measure every shape and program, and print one table."""
    args = _arguments(argv)
    if args.contestant:
        shape = _shape(args, args.shape[0])
        measured = MEASURES[args.contestant](shape, steps=args.steps)
        print(json.dumps(dataclasses.asdict(measured)))
        return
    kind = gpu_kind()
    if kind is None:
        sys.exit(_no_gpu())
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(conditions(kind, args.steps), soft_wrap=True, highlight=False)
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak_flops(kind)
    results = {
        name: {one: _in_a_process(args, name, one) for one in _contestants()}
        for name in args.shape
    }
    shapes = {name: _shape(args, name) for name in args.shape}
    console.print(table(shapes, results, peak))
    disagreements = disagreeing(results)
    for line in disagreements:
        console.print(line, highlight=False)
    sys.exit(1 if disagreements else 0)


def gpu_kind() -> str | None:
    """Name of the first GPU that JAX sees; None if there is none.

    Asked in a process of its own, so that this one holds no memory there.
    """
    code = "import jax; print(jax.devices('gpu')[0].device_kind)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found.stdout.strip().splitlines()[-1] if found.returncode == 0 else None


def peak_flops(kind: str) -> float | None:
    """Dense bf16 FLOPs a second of a GPU; None if the planner does not know it."""
    device = device_from_kind(kind)
    return device and device.peak_flops["bf16"]


def disagreeing(results: dict[str, dict[str, Measured]]) -> list[str]:
    """A line for each program whose first losses are not meshpar's."""
    return [
        f"{name}: {other} has losses {measured.losses}, meshpar "
        f"{of_shape['meshpar'].losses}"
        for name, of_shape in results.items()
        for other, measured in of_shape.items()
        if not bf16_agrees(measured.losses, of_shape["meshpar"].losses)
    ]


def table(
    shapes: dict[str, Shape],
    results: dict[str, dict[str, Measured]],
    peak: float | None,
) -> Table:
    """Speed and memory of every program.

    A ratio above 1 says that meshpar is faster. `compiled GB` is the peak that the
    compiler counted before the run (`meshpar.memory_report`).
    """
    built = Table(title="Training step on one GPU, bf16")
    for header in ("shape", "program", "batch x seq"):
        built.add_column(header, no_wrap=True)
    numbers = ("step ms", "tokens/s", "MFU", "meshpar / it", "first loss")
    for header in (*numbers, "peak GB", "compiled GB"):
        built.add_column(header, justify="right", no_wrap=True)
    for name, of_shape in results.items():
        shape, ours = shapes[name], of_shape["meshpar"].step_s
        for program, measured in of_shape.items():
            mfu = shape.step_flops / measured.step_s / peak if peak else None
            built.add_row(
                name,
                program,
                f"{shape.batch} x {shape.seq}",
                f"{measured.step_s * 1e3:.2f}",
                f"{shape.tokens / measured.step_s:,.0f}",
                "?" if mfu is None else f"{mfu:.1%}",
                f"{measured.step_s / ours:.3f}",
                f"{measured.losses[0]:.4f}",
                _gigabytes(measured.peak_bytes),
                _gigabytes(measured.compiled_bytes),
            )
    return built


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.3f}"


def conditions(kind: str, steps: int) -> str:
    """Hardware, versions, date and command."""
    names = ("jax", "jaxlib", "flax", "torch")
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in names
        if importlib.util.find_spec(name)
    ]
    command = shlex.join(["python", "-m", "recipes.bench.gpu", *sys.argv[1:]])
    return (
        f"{kind}; Python {platform.python_version()}, {', '.join(versions)}; "
        f"{datetime.date.today()}; {steps} steps after 3\n{command}"
    )


def _no_gpu() -> int:
    print(
        "recipes.bench.gpu: JAX sees no GPU here; run it where there is one, with "
        "jax[cuda13] installed",
        file=sys.stderr,
    )
    return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--batch", type=int, help="sequences per step (the shape's)")
    add("--seq", type=int, help="tokens per sequence (the shape's)")
    add("--remat", help="recomputation of meshpar's step (none)")
    add("--steps", type=int, default=20, help="timed steps (20)")
    add("--peak-tflops", type=float, help="peak of a GPU that is not in the table")
    add("--contestant", choices=MEASURES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _shape(args: argparse.Namespace, name: str) -> Shape:
    given = {key: getattr(args, key) for key in ("batch", "seq", "remat")}
    chosen = {key: value for key, value in given.items() if value is not None}
    return dataclasses.replace(SHAPES[name], **chosen)


def _contestants() -> list[str]:
    with_torch = importlib.util.find_spec("torch") is not None
    return [name for name in MEASURES if name != "torch.compile" or with_torch]


def _in_a_process(args: argparse.Namespace, shape: str, contestant: str) -> Measured:
    words = ["--shape", shape, "--steps", str(args.steps), "--contestant", contestant]
    for key in ("batch", "seq", "remat"):
        value = getattr(args, key)
        words += [] if value is None else [f"--{key}", str(value)]
    environment = dict(os.environ)
    if contestant == "torch.compile":
        environment["JAX_PLATFORMS"] = "cpu"  # JAX would take most of the GPU's memory
    found = subprocess.run(
        [sys.executable, "-m", "recipes.bench.gpu", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if found.returncode:
        sys.exit(f"{contestant} on {shape} ended with status {found.returncode}")
    return Measured(**json.loads(found.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
