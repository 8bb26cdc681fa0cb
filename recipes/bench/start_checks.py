"""Measure the seconds that the checks of a model take before it trains.

    python -m recipes.bench.start_checks
    python -m recipes.bench.start_checks --preset llama3-8b

Each step is made and lowered with `check=True` and with `check=False`, in turns,
with nothing cached. One model has a backward of its own, which only running it in
halves of a batch can judge (`meshpar.checks.halves`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator

import jax
import optax
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar import Model
from meshpar.checks import examples
from meshpar.models.presets import build
from meshpar.recipes.bench.conditions import conditions

_PRESETS = ("test", "tiny-gpt2", "tiny-moe", "gpt2")
_SEQ = 128


def main() -> None:
    """Prints a row for each model."""
    args = _arguments()
    os.environ.setdefault("XLA_FLAGS", "")
    meshpar.emulate(8)
    table = Table(title="Seconds until a step is lowered, median")
    for header in ("model", "layout", "checked", "unchecked", "difference"):
        table.add_column(header, justify="left" if header == "model" else "right")
    for name, model in _models(args.preset or _PRESETS):
        for line in args.layout:
            checked, unchecked = _seconds(model, line, args.runs)
            times = (checked, unchecked, checked - unchecked)
            table.add_row(name, line, *(f"{one:.2f}" for one in times))
    runs = f"{args.runs} runs of each"
    print(conditions("recipes.bench.start_checks", 8, {"seq": _SEQ}, runs))
    Console(width=100).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", metavar="NAME")
    parser.add_argument("--layout", nargs="+", metavar="L", default=["data=2"])
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def _models(presets: tuple[str, ...]) -> Iterator[tuple[str, Model]]:
    for preset in presets:
        model = build(preset)
        yield preset, model
    yield f"{presets[0]}, own backward", _with_own_backward(build(presets[0]))


def _with_own_backward(model: Model) -> Model:
    @jax.custom_vjp
    def twice(x: jax.Array) -> jax.Array:
        return x

    twice.defvjp(lambda x: (x, None), lambda _, dx: (2 * dx,))
    embed = model.embed
    return dataclasses.replace(
        model,
        embed=lambda params, batch, scope: twice(embed(params, batch, scope)),
    )


def _seconds(model: Model, line: str, runs: int) -> tuple[float, float]:
    """Median seconds with the checks and without."""
    found: dict[bool, list[float]] = {True: [], False: []}
    layout = meshpar.Layout.parse(line)
    for _ in range(runs):
        for check, seconds in found.items():
            jax.clear_caches()
            examples.clear_cache()
            start = time.perf_counter()
            step = meshpar.make_train_step(
                model,
                optax.adamw(1e-3),
                layout,
                devices=jax.devices()[: layout.num_devices],
                check=check,
            )
            step.lower(meshpar.batch_shapes(2 * layout.batch_shards, _SEQ))
            seconds.append(time.perf_counter() - start)
    return statistics.median(found[True]), statistics.median(found[False])


if __name__ == "__main__":
    main()
