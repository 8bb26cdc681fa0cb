"""Compare predicted and measured step times of twelve layouts of a small model.

    python -m recipes.bench.planner
    python -m recipes.bench.planner --rounds 9 --hardware measured.toml

Eight emulated CPU devices. The machine is calibrated (`meshpar calibrate`), the planner
predicts every layout from that alone, and then all steps run in turn, round by round,
so that whatever else the machine does meets all of them. Prints predicted and measured
seconds, and Spearman's rank correlation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

import meshpar
from meshpar.calibration.measure import calibrate
from meshpar.hardware.device import Device
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import device_of
from meshpar.planner.machine.execution import MESHPAR_CPU
from meshpar.planner.workload.shapes import workload_of
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off

LAYOUTS = (
    "data=8",
    "fsdp=8",
    "fsdp=8,remat=full",
    "data=8,microbatches=2",
    "fsdp=8,microbatches=2,fsdp_gather=microbatch",
    "data=4,tensor=2",
    "tensor=8",
    "tensor=8,sequence_parallel=true,remat=full",
    "data=2,stage=4,microbatches=4",
    "stage=4,tensor=2,microbatches=8,remat=full",
    "stage=8,microbatches=8",
    "data=2,stage=4,microbatches=4,schedule=interleaved_1f1b,chunks=2",
)
NUM_DEVICES = 8


def main() -> None:
    """Calibrates, predicts, measures, and prints one table."""
    args = _arguments()
    turn_ynn_off()
    devices = meshpar.emulate(NUM_DEVICES)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if args.hardware is None:
        device = calibrate(devices, name="measured").device
    else:
        device = device_of(args.hardware)
    predicted = [_predicted(args, device, line) for line in LAYOUTS]
    measured_s = _measured([_step(args, line) for line in LAYOUTS], args.rounds)
    sizes = {**args.model, "batch": args.batch, "seq": args.seq}
    rounds = f"{args.rounds} rounds after 1"
    console.print(
        conditions("recipes.bench.planner", NUM_DEVICES, sizes, rounds), soft_wrap=True
    )
    console.print(_constants(device), soft_wrap=True, highlight=False)
    console.print(_table(predicted, measured_s))
    predicted_s = [one.step_s for one in predicted]
    correlation = spearmanr(predicted_s, measured_s).statistic
    console.print(f"Spearman's rank correlation {correlation:.3f}", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hardware", metavar="FILE.toml", help="hardware file, instead of calibrating"
    )
    sizes = dict(layers=8, hidden=128, heads=8, kv_heads=8, ffn=384, vocab=512)
    runs = dict(batch=16, seq=64, rounds=7)
    return parsed(parser, sizes, runs)


def _predicted(args: argparse.Namespace, device: Device, line: str) -> Estimate:
    words = ",".join(f"{name}={size}" for name, size in args.model.items())
    return estimate(
        workload_of(f"{words},gated=true"),
        Cluster(device=device, devices_per_host=NUM_DEVICES),
        line,
        global_batch=args.batch,
        seq=args.seq,
        execution=MESHPAR_CPU,
    )


def _step(args: argparse.Namespace, line: str) -> Callable[[], object]:
    """A compiled step that keeps its own state."""
    step = meshpar.make_train_step(
        build(**args.model, gated=True), optax.adam(1e-3), line
    )
    text = np.random.default_rng(0).integers(0, args.vocab, (args.batch, args.seq + 1))
    batch = {
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
        "weights": np.ones((args.batch, args.seq), np.float32),
    }
    state = step.init(seed=0)

    def run() -> object:
        nonlocal state
        state, metrics = step(state, batch)
        return jax.block_until_ready(metrics)

    return run


def _measured(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each; the first round compiles and does not count."""
    for run in steps:
        run()
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for run, times in zip(steps, taken, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def _constants(device: Device) -> str:
    achieved = device.efficiency
    return (
        f"each device: {device.peak_flops['fp32'] / 1e9:.3g} GFLOP/s fp32, memory "
        f"{device.memory_bytes_per_s / 1e9:.3g} GB/s, link "
        f"{device.link_bytes_per_s / 1e9:.3g} GB/s and {achieved.hop_s * 1e6:.3g} us a "
        f"step, {achieved.launch_s * 1e6:.3g} us a kernel"
    )


def _table(predicted: list[Estimate], measured_s: list[float]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("layout", "computing", "bubble", "exposed"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for heading in ("predicted ms", "measured ms", "predicted / measured"):
        table.add_column(heading, justify="right")
    for found, seconds in zip(predicted, measured_s, strict=True):
        parts = found.time
        table.add_row(
            str(found.run.layout),
            f"{parts.compute_s * 1e3:.0f}",
            f"{parts.bubble_s * 1e3:.0f}",
            f"{sum(parts.exposed_s.values()) * 1e3:.0f}",
            f"{found.step_s * 1e3:.0f}",
            f"{seconds * 1e3:.0f}",
            f"{found.step_s / seconds:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
