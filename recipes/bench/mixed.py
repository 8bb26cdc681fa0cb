"""Measure every split of the work over ranks of two speeds, and the planner's.

    python -m recipes.bench.mixed
    python -m recipes.bench.mixed --axis data

Emulated ranks cannot be of two kinds of devices, so each sleeps, for every block and
microbatch, in proportion to what the planner says that its kind computes. Every split
of the blocks over stages, or of the microbatches over the kinds' parts of `data`, is
compiled, and they run in turn. The losses must agree, and the planner's split is to
take at most 1.05 of the time of the best.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import meshpar
from meshpar.planner.cost.by_speed import by_speed
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.parts import run_parts
from meshpar.planner.cost.placed import placed
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import workload_of
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off
from meshpar.recipes.bench.sleeping import (
    seconds,
    sleeping_data_step,
    sleeping_step,
)

_WITHIN = 1.05
_TOLERANCE = 1e-5
_AGAIN, _MORE_ROUNDS = 4, 4
"""The fastest splits that are measured again with the planner's, in more rounds."""
_Split = tuple[int, ...]
_Steps = dict[_Split, Callable[[], Any]]
_MODEL = "hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=1024,gated=true"
_SEQ = 4096


def main() -> None:
    """Prints a table for each machine, and the conditions."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(args.stages)
    sizes = {name: getattr(args, name) for name in ("layers", "stages", "microbatches")}
    rounds = f"{args.rounds} rounds after 2, then {_MORE_ROUNDS * args.rounds}"
    print(conditions("recipes.bench.mixed", args.stages, sizes, rounds), flush=True)
    worst = max(_print_splits(args, hardware) for hardware in args.hardware)
    print(f"\nthe planner's split takes at most {worst:.3f} of the best measured step")
    if worst > _WITHIN:
        raise SystemExit(f"more than {_WITHIN}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hardware", nargs="+", metavar="NAME:N+NAME:N",
        default=["h100:2+a100:2", "a100:3+h100:1"],
        help="machines of as many devices as stages (h100:2+a100:2 a100:3+h100:1)",
    )  # fmt: skip
    parser.add_argument(
        "--block-ms", type=float, default=20.0,
        help="sleep of a forward of the fastest kind (20)",
    )  # fmt: skip
    parser.add_argument(
        "--axis", choices=("stage", "data"), default="stage",
        help="what crosses the kinds: stages, or parts of the batch (stage)",
    )  # fmt: skip
    return parsed(parser, {}, dict(layers=7, stages=4, microbatches=8, rounds=2))


def _print_splits(args: argparse.Namespace, hardware: str) -> float:
    """The planner's measured step over the best one's."""
    made = _stage_steps if args.axis == "stage" else _data_steps
    steps, planned = made(args, hardware)
    losses = [float(step()[0]) for step in steps.values()]
    assert max(losses) - min(losses) <= _TOLERANCE * max(losses), losses
    measured = _least_seconds(steps, args.rounds)
    fastest = sorted(steps, key=measured.__getitem__)[:_AGAIN]
    chosen = {split: steps[split] for split in {*fastest, planned}}
    again = _least_seconds(chosen, _MORE_ROUNDS * args.rounds)
    measured |= {split: min(s, measured[split]) for split, s in again.items()}
    best = min(measured, key=measured.__getitem__)
    even = tuple(map(len, np.array_split(range(sum(best)), len(best))))
    print("\n| split | measured s | of the best |\n|---|---|---|")
    for name, split in (("best of all", best), ("planner's", planned), ("even", even)):
        shown = "/".join(map(str, split))
        ratio = measured[split] / measured[best]
        print(f"| {name}, {shown} | {measured[split]:.2f} | {ratio:.3f} |")
    print(
        f"{len(measured)} splits, the slowest {max(measured.values()):.2f} s",
        flush=True,
    )
    return measured[planned] / measured[best]


def _stage_steps(args: argparse.Namespace, hardware: str) -> tuple[_Steps, _Split]:
    """Steps of every split of the blocks over stages, and the planner's."""
    run = _planned(args, hardware, f"stage={args.stages}")
    rank_s = _place_seconds(args, hardware, run, "block", blocks_only=True)
    steps = {
        blocks: sleeping_step(
            np.repeat(rank_s, blocks, axis=0),
            stages=args.stages,
            microbatches=args.microbatches,
            splits=blocks,
        )
        for blocks in _every_split(args.layers, args.stages)
    }
    return steps, run.stage_blocks


def _data_steps(args: argparse.Namespace, hardware: str) -> tuple[_Steps, _Split]:
    """Steps of every split of the microbatches over the kinds, and the planner's."""
    run = _planned(args, hardware, f"data={args.stages}")
    part_s = _place_seconds(args, hardware, run, "microbatch", blocks_only=False)
    places = [len(part.places) for part in placed(run)]
    total = args.stages * args.microbatches
    steps = {}
    for of_kinds in itertools.product(range(1, total), repeat=len(places)):
        counts = tuple(np.repeat(of_kinds, places).tolist())
        if sum(counts) == total:
            steps[counts] = sleeping_data_step(
                part_s, microbatches=args.microbatches, data_splits=counts
            )
    return steps, run.layout.data_counts


def _planned(args: argparse.Namespace, hardware: str, axis: str) -> Run:
    """The run with the planner's split."""
    plan = estimate(
        workload_of(f"layers={args.layers},{_MODEL}"),
        cluster_of(hardware),
        f"{axis},microbatches={args.microbatches},precision=bf16",
        global_batch=args.microbatches * (args.stages if args.axis == "data" else 1),
        seq=_SEQ,
    )
    return by_speed(plan.run)


def _place_seconds(
    args: argparse.Namespace, hardware: str, run: Run, what: str, *, blocks_only: bool
) -> np.ndarray:
    """(places, 3): seconds of F, I and W on each place; the shortest F is given."""
    place_s = np.zeros((args.stages, 3))
    for part, own in zip(run_parts(run), placed(run), strict=True):
        times = stage_times(part.run, blocks_only=blocks_only)
        forward_s = sum(stage.forward.total_s for stage in times)
        backward_s = sum(stage.backward.total_s for stage in times)
        place_s[list(own.places)] = forward_s, backward_s / 2, backward_s / 2
    place_s *= args.block_ms / 1e3 / place_s[:, 0].min()
    print(
        f"\n{hardware}: a {what}'s forward and backward, ms, by rank: "
        + ", ".join(f"{1e3 * f:.1f} + {1e3 * (i + w):.1f}" for f, i, w in place_s)
    )
    return place_s


def _least_seconds(steps: _Steps, rounds: int) -> dict[_Split, float]:
    """The least of some rounds: what else a machine does only adds to a sleep."""
    every = [
        {blocks: seconds(step) for blocks, step in steps.items()} for _ in range(rounds)
    ]
    return {blocks: min(one[blocks] for one in every) for blocks in steps}


def _every_split(layers: int, stages: int) -> Iterator[_Split]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(stop - start for start, stop in itertools.pairwise(ends))


if __name__ == "__main__":
    main()
