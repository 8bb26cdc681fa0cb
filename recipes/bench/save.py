"""For how long a checkpoint keeps the training loop waiting.

    python -m recipes.bench.save

Saves a state again and again, in turn until it is written and only until it is copied,
and prints the median time of both calls and of what the second writes meanwhile, for
states of several sizes: what blocks is about the same for all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import optax

from meshpar import TrainState, emulate, make_train_step
from meshpar.cli.parsing import parse_sizes
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions
from meshpar.train.checkpoint import Checkpoints

_MODELS = ["layers=8,hidden=512", "layers=8,hidden=1024", "layers=16,hidden=1024"]


def main(argv: list[str] | None = None) -> int:
    """Prints the three times and the share for each size."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.save")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--model", nargs="+", default=_MODELS, help="what differs")
    parser.add_argument("--layout", default="fsdp=8")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    emulate(8)
    sizes, runs = {"rounds": args.rounds}, "medians, after one of each"
    print(conditions("recipes.bench.save", jax.device_count(), sizes, runs))
    for model in args.model:
        _print_measured(args, model)
    return 0


def _print_measured(args: argparse.Namespace, model: str) -> None:
    step = make_train_step(
        build(args.preset, **parse_sizes(model)), optax.adamw(1e-3), args.layout
    )
    state = step.init(seed=0)
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(state))
    whole_s, copied_s, after_s = measured(step.layer_orders, state, args.rounds)
    print(
        f"{model}, {state_bytes / 1e6:.0f} MB: until it is written {whole_s:.3f} s; "
        f"until it is copied {copied_s:.3f} s ({copied_s / whole_s:.1%}), "
        f"and {after_s:.3f} s beside the run after that"
    )


def measured(
    layer_orders: TrainState, state: TrainState, rounds: int
) -> tuple[float, float, float]:
    """Median seconds of a save, of one that only copies, and of what that leaves."""
    times: list[tuple[float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), layer_orders=layer_orders) as checkpoints,
    ):
        for number in range(1, 2 * rounds + 2, 2):
            start = time.perf_counter()
            checkpoints.save(_after(state, number), {})
            whole = time.perf_counter()
            checkpoints.save(_after(state, number + 1), {}, wait=False)
            copied = time.perf_counter()
            checkpoints.finish()
            times.append((whole - start, copied - whole, time.perf_counter() - copied))
    whole_s, copied_s, after_s = zip(*times[1:], strict=True)
    return tuple(map(statistics.median, (whole_s, copied_s, after_s)))


def _after(state: TrainState, steps: int) -> TrainState:
    """The state as if it were of another step."""
    step = jax.device_put(jax.numpy.int32(steps), state.step.sharding)
    return replace(state, step=step)


if __name__ == "__main__":
    sys.exit(main())
