"""Compare meshpar's pipeline with a differentiated scan over ticks.

    python -m recipes.bench.pipeline
    python -m recipes.bench.pipeline --microbatches 8 32 --rounds 11

One Llama-shaped model on four stages, emulated CPU devices, with and without
rematerialisation. Step time, compile time and temp memory per device, for ever more
microbatches of one size. All programs start from the same values and must agree in
loss and every gradient; then their steps run in turn, so that whatever else the machine
does meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off
from meshpar.recipes.bench.scan_pipeline import scan_pipeline

NUM_STAGES = 4
MICROBATCHES = (4, 8, 16, 32, 64, 128)
REMATS = {"none": "everything", "full": "inputs only"}
_TOLERANCE = 1e-5


@dataclass(kw_only=True)
class Contestant:
    """One compiled step, its state, and the seconds of every round.

    Args:
        program: (*state, batch) -> (*state, metrics), the state donated.
        state: What the next step takes.
        batch: Placed as the program wants it.
        compile_s: Lowering and compiling.
        step_s: Of every round.
    """

    program: jax.stages.Compiled
    state: tuple[Any, ...]
    batch: Any
    compile_s: float
    step_s: list[float] = field(default_factory=list)

    def run(self) -> dict[str, jax.Array]:
        """One step; its metrics."""
        start = time.perf_counter()
        *state, metrics = jax.block_until_ready(self.program(*self.state, self.batch))
        self.step_s.append(time.perf_counter() - start)
        self.state = tuple(state)
        return metrics

    @property
    def temp_bytes(self) -> int:
        """Temporary memory of one device."""
        return self.program.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Measures every number of microbatches and prints one table."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(NUM_STAGES)
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = _empty_table()
    for num_microbatches in args.microbatches:
        for remat in REMATS:
            ours, theirs = contestants = _contestants(args, num_microbatches, remat)
            worst = _disagreement(ours, theirs)
            _measure(contestants, args.rounds)
            row = _row(num_microbatches, remat, ours, theirs)
            table.add_row(*row)
            console.print(
                f"loss and gradients differ by {worst:.1e}: {' | '.join(row)}",
                highlight=False,
            )
    sizes = {**args.model, "microbatch": args.microbatch, "seq": args.seq}
    rounds = f"{args.rounds} rounds after 1"
    console.print(
        conditions("recipes.bench.pipeline", NUM_STAGES, sizes, rounds), soft_wrap=True
    )
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--microbatches", type=int, nargs="+", default=MICROBATCHES, metavar="M"
    )
    sizes = dict(layers=8, embed=128, heads=4, kv_heads=4, ffn=384, vocab=256)
    runs = dict(microbatch=2, seq=64, rounds=5)
    return parsed(parser, sizes, runs)


def _contestants(
    args: argparse.Namespace, num_microbatches: int, remat: str
) -> tuple[Contestant, Contestant]:
    rows = num_microbatches * args.microbatch
    text = np.random.default_rng(0).integers(0, args.vocab, (rows, args.seq + 1))
    batch = {
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
        "weights": np.ones((rows, args.seq), np.float32),
    }
    # With momentum, so that the state after the first step holds the gradients.
    optimizer = optax.sgd(1e-2, momentum=0.9)
    layout = f"stage={NUM_STAGES},microbatches={num_microbatches},remat={remat}"
    step = meshpar.make_train_step(build(gated=True, **args.model), optimizer, layout)
    state = step.init(seed=0)
    params = jax.tree.map(np.array, jax.device_get(state.params))
    start = time.perf_counter()
    program = step.compile(batch)
    ours = Contestant(
        program=program,
        state=(state,),
        batch=step.place(batch),
        compile_s=time.perf_counter() - start,
    )
    return ours, _scan(optimizer, params, batch, num_microbatches, remat)


def _scan(
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: dict[str, np.ndarray],
    num_microbatches: int,
    remat: str,
) -> Contestant:
    scan = scan_pipeline(
        optimizer,
        params,
        jax.devices(),
        num_microbatches=num_microbatches,
        checkpoint=remat == "full",
    )
    arguments = (
        jax.device_put(params, scan.params),
        jax.device_put(optimizer.init(params), scan.opt_state),
        jax.device_put(batch, scan.batch),
    )
    start = time.perf_counter()
    program = scan.step.lower(*arguments).compile()
    return Contestant(
        program=program,
        state=arguments[:2],
        batch=arguments[2],
        compile_s=time.perf_counter() - start,
    )


def _disagreement(ours: Contestant, theirs: Contestant) -> float:
    """The largest relative difference of losses and gradients, after one step.

    Raises:
        SystemExit: The two programs do not compute the same.
    """
    losses = [float(one.run()["loss"]) for one in (ours, theirs)]
    worst = abs(losses[0] / losses[1] - 1)
    gradients = (ours.state[0].opt_state[0].trace, theirs.state[1][0].trace)
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        difference = np.linalg.norm(one - other) / np.linalg.norm(other)
        worst = np.max([worst, difference])
    if not worst <= _TOLERANCE:  # NaN included
        sys.exit(f"loss or gradients differ by {worst:.1e}, more than {_TOLERANCE}")
    return float(worst)


def _measure(contestants: tuple[Contestant, ...], rounds: int) -> None:
    for contestant in contestants:
        contestant.step_s.clear()
    for _ in range(rounds):
        for contestant in contestants:
            contestant.run()


def _empty_table() -> Table:
    table = Table(
        title=f"Pipeline of {NUM_STAGES} stages, meshpar (1F1B) against a "
        "differentiated scan",
        caption="temp memory per device; ratio of steps: the median of each round's",
    )
    headers = ("M", "kept", "step s", "scan", "ratio", "temp MB", "scan", "less by")
    for header in (*headers, "compile s", "scan"):
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _row(
    num_microbatches: int, remat: str, ours: Contestant, theirs: Contestant
) -> tuple[str, ...]:
    rounds = zip(ours.step_s, theirs.step_s, strict=True)
    return (
        str(num_microbatches),
        REMATS[remat],
        f"{statistics.median(ours.step_s):.3f}",
        f"{statistics.median(theirs.step_s):.3f}",
        f"{statistics.median(one / other for one, other in rounds):.3f}",
        f"{ours.temp_bytes / 1e6:.2f}",
        f"{theirs.temp_bytes / 1e6:.2f}",
        f"{theirs.temp_bytes / ours.temp_bytes:.2f}x",
        f"{ours.compile_s:.1f}",
        f"{theirs.compile_s:.1f}",
    )


if __name__ == "__main__":
    main()
