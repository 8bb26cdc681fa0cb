"""Measure how long a checkpoint blocks the training loop.

    python -m recipes.bench.save

Saves a state again and again, in turn until it is written and beside the run, and
prints medians for states of several sizes. What a save beside the run costs is by how
much later the next program ends that takes the state's memory: the call alone may
leave it to that program to copy or to wait.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
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
    """Prints the times and the share for each size."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.save")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--model", nargs="+", default=_MODELS, help="sizes to change")
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
    whole_s, call_s, later_s, beside_s = measured(step.layer_orders, state, args.rounds)
    print(
        f"{model}, {state_bytes / 1e6:.0f} MB: until it is written {whole_s:.3f} s; "
        f"the loop goes on {later_s:.3f} s later ({later_s / whole_s:.1%}; the call "
        f"{call_s:.3f} s), and {beside_s:.3f} s are beside the run after that"
    )


def measured(
    layer_orders: TrainState, state: TrainState, rounds: int
) -> tuple[float, float, float, float]:
    """Median seconds of saves in turn, the first ones left out.

    Returns:
        Of a save until it is written; of a call that does not wait; by how much later
        the program after that has ended; of what is left to write then.
    """
    times: list[tuple[float, float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), layer_orders=layer_orders) as checkpoints,
    ):
        for _ in range(rounds + 1):
            state, program_s = _after(state)
            start = time.perf_counter()
            checkpoints.save(state, {})
            whole_s = time.perf_counter() - start
            state, _ = _after(state)
            start = time.perf_counter()
            checkpoints.save(state, {}, wait=False)
            call_s = time.perf_counter() - start
            state, with_save_s = _after(state)
            later_s = call_s + with_save_s - program_s
            start = time.perf_counter()
            checkpoints.finish()
            times.append((whole_s, call_s, later_s, time.perf_counter() - start))
    return tuple(map(statistics.median, zip(*times[1:], strict=True)))


def _after(state: TrainState) -> tuple[TrainState, float]:
    """The state of the next step, in its memory, and the seconds until it is there."""
    start = time.perf_counter()
    state = jax.block_until_ready(_stepped(state))
    return state, time.perf_counter() - start


@functools.partial(jax.jit, donate_argnums=0)
def _stepped(state: TrainState) -> TrainState:
    return jax.tree.map(lambda array: array + 1, state)


if __name__ == "__main__":
    sys.exit(main())
