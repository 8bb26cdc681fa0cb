"""Compare step and compile time of meshpar with a hand-written JAX step.

    python -m recipes.bench.step_time
    python -m recipes.bench.step_time --layout fsdp=4,tensor=2 --runs 50

Eight emulated CPU devices. Both programs start from the same values and must agree in
loss and gradient norm; then their steps run alternately, so that whatever else the
machine does meets both. Ratios are meshpar / hand-written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions, parsed, turn_ynn_off
from meshpar.recipes.bench.hand_written import hand_written
from meshpar.recipes.bench.traffic import KINDS, collective_traffic

LAYOUTS = ("fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2")
NAMES = ("meshpar", "hand-written")
_MAX_GRAD_NORM = 1.0
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One program: `run(state, batch)` -> state and metrics, the state donated."""

    state: Any
    run: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    compile: Callable[[], jax.stages.Compiled]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of every round, and the last compiled program, of one contestant."""

    step_s: list[float]
    compile_s: list[float]
    program: jax.stages.Compiled


def main() -> None:
    """Measures every layout and prints one table."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(8)
    console = Console(width=None if sys.stdout.isatty() else 180)
    results = {}
    for text in args.layout or LAYOUTS:
        layout = meshpar.Layout.parse(text).resolve(8)
        batch = _batch(args)
        contestants = _contestants(args, layout, batch)
        states, difference = _agree([c.state for c in contestants], contestants, batch)
        console.print(f"{layout}: loss and gradient norm differ by {difference:.1e}")
        results[str(layout)] = _measure(args, contestants, states, batch)
    console.print(_conditions(args), soft_wrap=True)
    console.print(_table(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", nargs="+", action="extend", metavar="L")
    sizes = dict(layers=4, embed=256, heads=8, kv_heads=4, ffn=768, vocab=256)
    runs = dict(batch=16, seq=128, runs=30, warmup=5, compiles=3)
    return parsed(parser, sizes, runs)


def _batch(args: argparse.Namespace) -> dict[str, np.ndarray]:
    text = np.random.default_rng(0).integers(0, args.vocab, (args.batch, args.seq + 1))
    return {
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
        "weights": np.ones((args.batch, args.seq), np.float32),
    }


def _contestants(
    args: argparse.Namespace, layout: meshpar.Layout, batch: dict[str, np.ndarray]
) -> tuple[Contestant, Contestant]:
    step = meshpar.make_train_step(
        build(gated=True, **args.model),
        optax.adamw(1e-3),
        layout,
        max_grad_norm=_MAX_GRAD_NORM,
    )
    state = jax.block_until_ready(step.init(seed=0))
    library = Contestant(state=state, run=step, compile=lambda: step.compile(batch))
    # A copy: the first step donates the buffers that `device_get` may only look into.
    params = jax.tree.map(np.array, jax.device_get(state.params))
    return library, _by_hand(layout, params, batch)


def _by_hand(
    layout: meshpar.Layout, params: Any, batch: dict[str, np.ndarray]
) -> Contestant:
    by_hand = hand_written(
        optax.adamw(1e-3),
        params,
        (layout.data, layout.fsdp, layout.tensor),
        jax.devices(),
        max_grad_norm=_MAX_GRAD_NORM,
    )
    place = jax.jit(
        lambda params: (params, by_hand.optimizer.init(params)),
        out_shardings=(by_hand.params, by_hand.opt_state),
    )

    def run(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        *state, metrics = by_hand.step(*state, jax.device_put(batch, by_hand.batch))
        return state, metrics

    shapes = jax.eval_shape(lambda: (*place(params), batch))
    return Contestant(
        state=jax.block_until_ready(place(params)),
        run=run,
        compile=lambda: by_hand.step.lower(*shapes).compile(),
    )


def _agree(
    states: list[Any], contestants: tuple[Contestant, ...], batch: dict[str, np.ndarray]
) -> tuple[list[Any], float]:
    """The states after three steps, and the largest relative difference between them.

    Raises:
        SystemExit: The two programs do not compute the same.
    """
    worst = 0.0
    for _ in range(3):
        metrics = []
        for at, contestant in enumerate(contestants):
            states[at], seen = jax.block_until_ready(contestant.run(states[at], batch))
            metrics.append(np.array([seen["loss"], seen["grad_norm"]], np.float64))
        worst = np.max([worst, *np.abs(metrics[0] / metrics[1] - 1)])
    if not worst <= _TOLERANCE:  # NaN included
        sys.exit(f"loss or gradient norm differ by {worst:.1e}, more than {_TOLERANCE}")
    return states, float(worst)


def _measure(
    args: argparse.Namespace,
    contestants: tuple[Contestant, ...],
    states: list[Any],
    batch: dict[str, np.ndarray],
) -> list[Measured]:
    step_s: list[list[float]] = [[] for _ in contestants]
    for _ in range(args.warmup + args.runs):
        for at, contestant in enumerate(contestants):
            start = time.perf_counter()
            states[at], _ = jax.block_until_ready(contestant.run(states[at], batch))
            step_s[at].append(time.perf_counter() - start)
    compile_s: list[list[float]] = [[] for _ in contestants]
    for _ in range(args.compiles):
        programs = []
        for at, contestant in enumerate(contestants):
            jax.clear_caches()
            start = time.perf_counter()
            programs.append(contestant.compile())
            compile_s[at].append(time.perf_counter() - start)
    return [
        Measured(step_s=steps[args.warmup :], compile_s=compiles, program=program)
        for steps, compiles, program in zip(step_s, compile_s, programs, strict=True)
    ]


def _conditions(args: argparse.Namespace) -> str:
    sizes = {**args.model, "batch": args.batch, "seq": args.seq}
    runs = f"{args.runs} rounds after {args.warmup}, {args.compiles} compiles"
    return conditions("recipes.bench.step_time", 8, sizes, runs)


def _table(results: dict[str, list[Measured]]) -> Table:
    table = Table(
        title="Training step, meshpar against hand-written",
        caption="temp and collectives per device; count (MB) in one step",
    )
    for header in ("layout", "program"):
        table.add_column(header, no_wrap=True)
    headers = ("step s", "ratio", "pairwise", "compile s", "ratio", "temp MB", *KINDS)
    for header in headers:
        table.add_column(header.replace("-", "-\n"), justify="right", no_wrap=True)
    for layout, both in results.items():
        pairs = zip(*(measured.step_s for measured in both), strict=True)
        pairwise = statistics.median(a / b for a, b in pairs)
        ratios = (_ratio(both, "step_s"), f"{pairwise:.3f}", _ratio(both, "compile_s"))
        table.add_row(*_row(layout, NAMES[0], both[0], ratios))
        table.add_row(*_row("", NAMES[1], both[1], ("", "", "")), end_section=True)
    return table


def _row(
    layout: str, name: str, measured: Measured, ratios: tuple[str, str, str]
) -> tuple[str, ...]:
    step, pairwise, compiling = ratios
    runs, moved = collective_traffic(measured.program.as_text())
    return (
        layout,
        name,
        f"{statistics.median(measured.step_s):.3f}",
        step,
        pairwise,
        f"{statistics.median(measured.compile_s):.2f}",
        compiling,
        f"{measured.program.memory_analysis().temp_size_in_bytes / 1e6:.1f}",
        *(f"{runs[kind]} ({moved[kind] / 1e6:.1f})" for kind in KINDS),
    )


def _ratio(both: list[Measured], quantity: str) -> str:
    ours, theirs = (statistics.median(getattr(one, quantity)) for one in both)
    return f"{ours / theirs:.3f}"


if __name__ == "__main__":
    main()
