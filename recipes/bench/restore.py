"""Measure the bytes that a host reads of a checkpoint, and the memory it takes.

    python -m recipes.bench.restore

A state is saved under one layout and read under others, by one process and by two, each
a new one with its part of 8 devices. For each process it prints its share of the state,
the bytes that it read (`rchar` of /proc/self/io) to check the files and to restore, and
how far its resident memory rose while it restored (VmHWM, which is Linux's). On virtual
devices the share itself lies in the host's memory, so that 1.00 is the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import optax

from meshpar import Layout, TrainState, TrainStep, emulate, make_train_step
from meshpar.cli.parsing import parse_sizes
from meshpar.distributed import Processes, start
from meshpar.distributed.roll_call import free_port
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.heap import give_back

SAVED = "data=2,stage=2,tensor=2,microbatches=2"
LAYOUTS = (
    "stage=2,fsdp=2,tensor=2,microbatches=2",
    "fsdp=8",
    "stage=3,fsdp=2,microbatches=4",
)
NUM_DEVICES = 8


def main(argv: list[str] | None = None) -> int:
    """Prints a line for every process of every layout."""
    args = _parser().parse_args(argv)
    if args.folder is not None:
        print(json.dumps(_save(args) if args.layout is None else _restore(args)))
        return 0
    environment = dict(os.environ)  # Which the processes start from, too.
    emulate(NUM_DEVICES)
    sizes = {"devices": NUM_DEVICES}
    print(conditions("recipes.bench.restore", NUM_DEVICES, sizes, "each once"))
    with tempfile.TemporaryDirectory() as folder:
        ((state_mb,),) = _children(args, folder, None, 1, environment)
        print(
            f"{state_mb:,.0f} MB saved under {SAVED}; MB of each process:", flush=True
        )
        print("processes, layout: share, read to check, read to restore, memory")
        for number in args.processes:
            for layout in args.layouts:
                if Layout.parse(layout).num_devices == NUM_DEVICES or number == 1:
                    for share, checked, read, rose in _children(
                        args, folder, layout, number, environment
                    ):
                        print(
                            f"{number}, {layout}: {share:,.0f}, {checked:,.0f}, "
                            f"{read:,.0f} ({read / share:.2f}), "
                            f"{rose:,.0f} ({rose / share:.2f})",
                            flush=True,
                        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.restore")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument(
        "--model",
        default="layers=8,hidden=768,heads=12,kv_heads=12,ffn=2048",
        help="sizes to change",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    for name in ("--folder", "--layout"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--process", "--number", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    return parser


def _children(
    args: argparse.Namespace,
    folder: str,
    layout: str | None,
    number: int,
    environment: Mapping[str, str],
) -> list[list[float]]:
    """Run new processes and return what each prints."""
    command = [sys.executable, "-m", "recipes.bench.restore", "--folder", folder]
    command += ["--preset", args.preset, "--model", args.model]
    command += [] if layout is None else ["--layout", layout]
    command += ["--number", str(number), "--port", str(free_port())]
    children = [
        subprocess.Popen(
            [*command, "--process", str(process)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(number)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("a process has failed; what it wrote stands above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _save(args: argparse.Namespace) -> list[float]:
    """MB of the state that is saved, whose values do not compress."""
    emulate(NUM_DEVICES)
    step = _step(args, SAVED)
    state, random = step.init(seed=0), np.random.default_rng(0)

    def filled(array: jax.Array) -> jax.Array:
        if array.ndim == 0:
            return array
        values = random.standard_normal(array.shape, np.float32)
        return jax.device_put(values, array.sharding)

    state = dataclasses.replace(state, opt_state=jax.tree.map(filled, state.opt_state))
    with Checkpoints(args.folder, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {"layout": SAVED})
    return [sum(array.nbytes for array in jax.tree.leaves(state)) / 1e6]


def _restore(args: argparse.Namespace) -> list[float]:
    """MB of this process: its share, read to check, read to restore, and memory."""
    processes = _joined(args)
    step = _step(args, args.layout)
    with Checkpoints(
        args.folder, layer_orders=step.layer_orders, processes=processes
    ) as checkpoints:
        reads = [_bytes_read()]
        checkpoints.newest_good()
        reads.append(_bytes_read())
        give_back()  # Else what others have freed would be taken for less.
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at VmRSS again.
        before = _status_bytes("VmRSS")
        state = checkpoints.restore(step.state_shapes, step.shardings)
        rose = _status_bytes("VmHWM") - before
        reads.append(_bytes_read())
    share = sum(_bytes_held(state))
    processes.close()
    numbers = share, reads[1] - reads[0], reads[2] - reads[1], rose
    return [number / 1e6 for number in numbers]


def _joined(args: argparse.Namespace) -> Processes:
    devices = NUM_DEVICES // args.number
    if args.number == 1:
        emulate(devices)
        return Processes()
    return start(
        coordinator=f"localhost:{args.port}",
        num_processes=args.number,
        process_id=args.process,
        emulate=devices,
        timeout_s=200,
    )


def _step(args: argparse.Namespace, line: str) -> TrainStep:
    layout = Layout.parse(line)
    return make_train_step(
        build(args.preset, **parse_sizes(args.model)),
        optax.adamw(1e-3),
        layout,
        devices=jax.devices()[: layout.num_devices],
    )


def _bytes_held(state: TrainState) -> Iterator[int]:
    """Return the bytes of each array's shards on this process's devices."""
    for array in jax.tree.leaves(state):
        yield from (shard.data.nbytes for shard in array.addressable_shards)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


if __name__ == "__main__":
    sys.exit(main())
