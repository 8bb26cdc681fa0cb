"""Measure every split of the blocks over ranks of two speeds, and the planner's.

    python -m recipes.bench.mixed

Emulated ranks cannot be of two kinds of devices, so each sleeps, for every block and
microbatch, in proportion to what the planner says that its kind computes. Every split
of the blocks over the stages is compiled, and they run in turn. The losses must agree,
and the planner's split is to take at most 1.05 of the time of the best.
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
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import workload_of
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off
from meshpar.recipes.bench.sleeping import seconds, sleeping_step

_WITHIN = 1.05
_TOLERANCE = 1e-5
_AGAIN, _MORE_ROUNDS = 4, 4
"""The fastest splits that are measured again with the planner's, in more rounds."""
_Steps = dict[tuple[int, ...], Callable[[], Any]]
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
    return parsed(parser, {}, dict(layers=7, stages=4, microbatches=8, rounds=2))


def _planned(args: argparse.Namespace, hardware: str) -> Run:
    """The run with the planner's split."""
    plan = estimate(
        workload_of(f"layers={args.layers},{_MODEL}"),
        cluster_of(hardware),
        f"stage={args.stages},microbatches={args.microbatches},precision=bf16",
        global_batch=args.microbatches,
        seq=_SEQ,
    )
    return by_speed(plan.run)


def _print_splits(args: argparse.Namespace, hardware: str) -> float:
    """The planner's measured step over the best one's."""
    run = _planned(args, hardware)
    rank_s = _rank_seconds(run, args.block_ms / 1e3)
    print(
        f"\n{hardware}: a block's forward and backward, ms, by rank: "
        + ", ".join(f"{1e3 * f:.1f} + {1e3 * (i + w):.1f}" for f, i, w in rank_s)
    )
    steps = {
        blocks: sleeping_step(
            np.repeat(rank_s, blocks, axis=0),
            stages=args.stages,
            microbatches=args.microbatches,
            splits=blocks,
        )
        for blocks in _every_split(args.layers, args.stages)
    }
    losses = [float(step()[0]) for step in steps.values()]
    assert max(losses) - min(losses) <= _TOLERANCE * max(losses), losses
    measured = _least_seconds(steps, args.rounds)
    fastest = sorted(steps, key=measured.__getitem__)[:_AGAIN]
    chosen = {blocks: steps[blocks] for blocks in {*fastest, run.stage_blocks}}
    again = _least_seconds(chosen, _MORE_ROUNDS * args.rounds)
    measured |= {blocks: min(s, measured[blocks]) for blocks, s in again.items()}
    best = min(measured, key=measured.__getitem__)
    even = tuple(len(part) for part in np.array_split(range(args.layers), args.stages))
    print("\n| split | measured s | of the best |\n|---|---|---|")
    for name, blocks in (
        ("best of all", best),
        ("planner's", run.stage_blocks),
        ("even", even),
    ):
        shown = "/".join(map(str, blocks))
        ratio = measured[blocks] / measured[best]
        print(f"| {name}, {shown} | {measured[blocks]:.2f} | {ratio:.3f} |")
    print(
        f"{len(measured)} splits, the slowest {max(measured.values()):.2f} s",
        flush=True,
    )
    return measured[run.stage_blocks] / measured[best]


def _least_seconds(steps: _Steps, rounds: int) -> dict[tuple[int, ...], float]:
    """The least of some rounds: what else a machine does only adds to a sleep."""
    every = [
        {blocks: seconds(step) for blocks, step in steps.items()} for _ in range(rounds)
    ]
    return {blocks: min(one[blocks] for one in every) for blocks in steps}


def _rank_seconds(run: Run, fastest_s: float) -> np.ndarray:
    """(ranks, 3): seconds of F, I and W of a block; the shortest F is `fastest_s`."""
    rank_s = np.zeros((run.layout.stage, 3))
    for part in run_parts(run):
        blocks = stage_times(part.run, blocks_only=True)
        forward_s = sum(stage.forward.total_s for stage in blocks)
        backward_s = sum(stage.backward.total_s for stage in blocks)
        rank_s[list(part.ranks)] = forward_s, backward_s / 2, backward_s / 2
    return rank_s * fastest_s / rank_s[:, 0].min()


def _every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(stop - start for start, stop in itertools.pairwise(ends))


if __name__ == "__main__":
    main()
