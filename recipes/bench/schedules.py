"""Measure steps of every schedule, in lock step and with ranks that diverge.

    python -m recipes.bench.schedules
    python -m recipes.bench.schedules --part sleeps --unit-ms 100 100 100

*Steps.* One Llama-shaped model on eight emulated CPU devices, under every schedule and
execution: losses must agree, then the steps run in turn. Spans are those of the
simulator, in times of a rank's forward of one microbatch: of ranks that run freely, and
of the ticks that the step runs. Virtual devices share the cores, so that an idle rank
costs nothing: times say how much work a schedule does and what its ticks cost, not how
long ranks would wait for each other.

*Sleeps.* To see them wait, the forward, the input gradient and the weight gradient of
every rank sleep, each for its own time a microbatch, instead of computing. Sleeping
devices share no core, so the measured step is to be the simulated one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import meshpar
from meshpar.layout import FIXED_EXECUTIONS
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off
from meshpar.recipes.bench.sleeping import seconds, sleeping_step
from meshpar.schedules import (
    SCHEDULES,
    Schedule,
    StageTimes,
    make_schedule,
    simulate,
)
from meshpar.schedules.ticks import ticks_timeline

NUM_DEVICES = 8
_TOLERANCE = 1e-5
_WITHIN = 0.05


class Case(NamedTuple):
    """A schedule and its execution."""

    name: str
    chunks: int
    execution: str

    def schedule(self, stages: int, microbatches: int) -> Schedule:
        """The schedule of those sizes."""
        return make_schedule(self.name, stages, microbatches, self.chunks)


def main() -> None:
    """Prints a table for each part, and the conditions."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(NUM_DEVICES)
    sizes = {**args.model, "microbatch": args.microbatch, "seq": args.seq}
    sizes |= {"stages": args.stages, "microbatches": args.microbatches}
    rounds = f"{args.rounds} rounds after 1"
    print(conditions("recipes.bench.schedules", NUM_DEVICES, sizes, rounds), flush=True)
    if args.part in ("steps", "both"):
        _print_steps(args)
    if args.part in ("sleeps", "both"):
        _print_sleeps(args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("steps", "sleeps", "both"), default="both")
    parser.add_argument("--schedules", nargs="+", metavar="NAME", default=[*SCHEDULES])
    parser.add_argument(
        "--unit-ms", type=float, nargs=3, default=(200, 200, 200), metavar="MS",
        help="sleeps of a rank's F, I and W of a microbatch (200 200 200)",
    )  # fmt: skip
    parser.add_argument("--sleeping-stages", type=int, default=4, help="(4)")
    parser.add_argument("--sleeping-microbatches", type=int, default=8, help="(8)")
    sizes = dict(layers=16, embed=128, heads=4, kv_heads=4, ffn=384, vocab=256)
    runs = dict(stages=8, microbatches=16, microbatch=2, seq=64, rounds=5)
    return parsed(parser, sizes, runs)


def _cases(names: list[str], *, synchronous: bool = False) -> Iterator[Case]:
    """Schedules of one gradient a batch only, if `synchronous`."""
    for name in names:
        method = SCHEDULES[name]
        chunks = method.num_chunks or 2
        for execution in FIXED_EXECUTIONS:
            stashes = method.updates_each_microbatch
            if not stashes or (execution == "divergent" and not synchronous):
                yield Case(name, chunks, execution)


# Steps.


class Contestant:
    """A compiled step, its state, and the seconds of every round."""

    def __init__(self, args: argparse.Namespace, case: Case, batch: Any) -> None:
        layout = (
            f"stage={args.stages},microbatches={args.microbatches},"
            f"schedule={case.name},chunks={case.chunks},execution={case.execution}"
        )
        model = build(gated=True, tied=False, **args.model)
        step = meshpar.make_train_step(model, optax.sgd(1e-2), layout)
        begun = time.perf_counter()
        self._program = step.compile(batch)
        self.compile_s = time.perf_counter() - begun
        self._state, self._batch = step.init(seed=0), step.place(batch)
        self.first_loss = self.run()
        self.step_s: list[float] = []

    def run(self) -> float:
        """Runs a step; its loss."""
        self._state, metrics = self._program(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])

    def run_timed(self) -> None:
        """Runs a step and notes its time."""
        begun = time.perf_counter()
        self.run()
        self.step_s.append(time.perf_counter() - begun)

    @property
    def temp_bytes(self) -> int:
        """Temporary memory of one device."""
        return self._program.memory_analysis().temp_size_in_bytes


def _print_steps(args: argparse.Namespace) -> None:
    rows = args.microbatches * args.microbatch
    text = np.random.default_rng(0).integers(0, args.vocab, (rows, args.seq + 1))
    batch = {
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
        "weights": np.ones((rows, args.seq), np.float32),
    }
    contestants = {}
    for case in _cases(args.schedules):
        one = contestants[case] = Contestant(args, case, batch)
        seconds = f"{one.compile_s:.0f} s"
        print(f"compiled {case.name}, {case.execution}, in {seconds}", flush=True)
    losses = [
        one.first_loss
        for case, one in contestants.items()
        if not SCHEDULES[case.name].updates_each_microbatch
    ]
    assert max(losses) - min(losses) <= _TOLERANCE * max(losses), losses
    for _ in range(args.rounds):
        for one in contestants.values():
            one.run_timed()
    print(
        "\n| schedule | execution | span, free | span, ticks | step s | temp MB "
        "| compile s |\n|---|---|---|---|---|---|---|"
    )
    for case, one in contestants.items():
        chunk_s = 1 / case.chunks
        unit = dict(forward_s=chunk_s, input_grad_s=chunk_s, weight_grad_s=chunk_s)
        free_s, ticks_s = _spans(case, args.stages, args.microbatches, unit)
        print(
            f"| `{case.name}` | {case.execution} | {free_s:g} | {ticks_s:g} "
            f"| {statistics.median(one.step_s):.3f} | {one.temp_bytes / 1e6:.1f} "
            f"| {one.compile_s:.0f} |"
        )


def _spans(
    case: Case, stages: int, microbatches: int, times: dict[str, float]
) -> tuple[float, float]:
    """Simulated spans of ranks that run freely, and of the ticks of a step."""
    schedule = case.schedule(stages, microbatches)
    of_stages = StageTimes.uniform(stages * case.chunks, **times)
    ticks = ticks_timeline(schedule, of_stages, divergent=case.execution == "divergent")
    return simulate(schedule, of_stages).span_s, ticks.end_s


# Sleeps.


def _print_sleeps(args: argparse.Namespace) -> None:
    stages, microbatches = args.sleeping_stages, args.sleeping_microbatches
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    of_rank = {name: ms / 1e3 for name, ms in zip(names, args.unit_ms, strict=True)}
    print(
        f"\n{stages} ranks, {microbatches} microbatches; sleeps of a rank: {of_rank}\n"
        "\n| schedule | execution | free s | ticks s | measured s | measured / ticks |"
        "\n|---|---|---|---|---|---|"
    )
    ratios = []
    for case in _cases(args.schedules, synchronous=True):
        times = {name: rank_s / case.chunks for name, rank_s in of_rank.items()}
        layer_s = np.tile([*times.values()], (stages * case.chunks, 1))
        run = sleeping_step(
            layer_s,
            stages=stages,
            microbatches=microbatches,
            schedule=case.name,
            chunks=case.chunks,
            execution=case.execution,
        )
        measured_s = statistics.median(seconds(run) for _ in range(args.rounds))
        free_s, ticks_s = _spans(case, stages, microbatches, times)
        ratios.append(measured_s / ticks_s)
        print(
            f"| `{case.name}` | {case.execution} | {free_s:.2f} | {ticks_s:.2f} "
            f"| {measured_s:.2f} | {ratios[-1]:.3f} |",
            flush=True,
        )
    within = sum(abs(ratio - 1) <= _WITHIN for ratio in ratios)
    print(
        f"\n{within} of {len(ratios)} within {_WITHIN:.0%} of the simulated ticks; "
        f"furthest {max(ratios, key=lambda ratio: abs(ratio - 1)):.3f}"
    )


if __name__ == "__main__":
    main()
