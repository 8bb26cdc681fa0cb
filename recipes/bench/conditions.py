"""Conditions of a benchmark: hardware, versions and command."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

# XLA:CPU may start independent collectives in another order on each device. Without
# this flag the hand-written step deadlocked in 2 of 3 runs, with it in none of 3
# (jaxlib 0.10.2 and 0.12.0, 2 cores, 2026-11-21). It holds for every program.
_NO_YNN = "--xla_cpu_experimental_ynn_fusion_type="


def turn_ynn_off() -> None:
    """Turns XLA:CPU's YNN fusions off; call it before the first JAX operation."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "ynn_fusion_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_NO_YNN}".strip()


def conditions(
    module: str, num_devices: int, sizes: Mapping[str, int], runs: str
) -> str:
    """Hardware, versions, date, command, flags and sizes, a line each."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [
        line.partition(": ")[2] for line in lines if line.startswith("model name")
    ]
    cpu = models[0] if models else platform.processor()
    return "\n".join(
        (
            f"{cpu} x {os.cpu_count()}, {num_devices} emulated devices; Python "
            f"{platform.python_version()}, jax {jax.__version__}; "
            f"{datetime.date.today()}",
            shlex.join(["python", "-m", module, *sys.argv[1:]]),
            f"XLA_FLAGS={os.environ['XLA_FLAGS']!r}",
            " ".join(f"{name}={size}" for name, size in sizes.items()) + f"; {runs}",
        )
    )


def parsed(
    parser: argparse.ArgumentParser, sizes: Mapping[str, int], runs: Mapping[str, int]
) -> argparse.Namespace:
    """The command's arguments, and those that are the model's sizes as `model`.

    Args:
        parser: With the benchmark's own options.
        sizes: Of the model, with what they are by default; each becomes an option.
        runs: Other numbers, alike.
    """
    for name, default in {**sizes, **runs}.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    args.model = {name: getattr(args, name) for name in sizes}
    return args
