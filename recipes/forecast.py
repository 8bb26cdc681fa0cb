"""Forecast shallow water with an AFNO whose periodic grid is split over devices.

    pip install 'meshpar[plots]'
    python -m recipes.forecast --png forecast.png
    python -m recipes.forecast --layout data=8

The recipe first simulates the data (`recipes/shallow_water.py`): a jet and waves on a
band from 25 to 75 degrees north, 32 x 64 cells, with twelve members for training and
eight for the scores. The model (`meshpar.models.afno`) predicts the state half a day
later. By default eight virtual CPU devices split the batch in two, and four of them
split each example: its latitudes over `context`, its longitudes over `tensor`. The
recipe prints what the simulation conserves, the loss, and the error of forecasts up to
two days, next to that of persistence (no change).
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshpar import Layout, emulate
from meshpar.cli.parsing import check_picture, positive
from meshpar.errors import print_end
from meshpar.recipes.printed_rows import write_rows
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shallow_water import Band, State, balanced
from meshpar.recipes.shared_options import RecipeParser, metrics_file

LOGGER = logging.getLogger("meshpar.recipes.forecast")

BAND = Band(height=32, width=64)
MEMBERS, JUDGED = 20, 8
STEP_S, LEAD_STEPS, LEADS = 720.0, 60, 13
"""Seconds of a step, steps of half a day, and half days of a member."""

_RULES = {"height": "context", "width": "tensor", "mlp": None}
_GIVEN = {"height": None, "width": None}


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Simulated members, in fields of mean 0 and spread 1.

    Args:
        fields: (member, time, height, width, 3) of u, v and h, fp32.
        spread: Of each field, in its own unit: (3,).
        drift: Name of what is conserved -> its largest relative change.
    """

    fields: np.ndarray
    spread: np.ndarray
    drift: dict[str, float]

    @classmethod
    def simulated(cls, seed: int) -> Weather:
        """Members that differ in their jet and waves, after half a day of settling."""
        state = BAND.after(balanced(BAND, MEMBERS, seed), STEP_S, LEAD_STEPS)
        first, fields = state, [_fields(state)]
        for _ in range(LEADS - 1):
            state = BAND.after(state, STEP_S, LEAD_STEPS)
            fields.append(_fields(state))
        drift = {}
        for name in ("mass", "energy", "enstrophy"):
            of = getattr(BAND, name)
            drift[name] = float(np.max(np.abs(of(state) / of(first) - 1)))
        values = np.stack(fields, axis=1)
        mean = values.mean(axis=(0, 1, 2, 3))
        spread = values.std(axis=(0, 1, 2, 3))
        values = ((values - mean) / spread).astype(np.float32)
        return cls(fields=values, spread=spread, drift=drift)

    @property
    def judged(self) -> np.ndarray:
        """Members that nothing is learnt from."""
        return self.fields[-JUDGED:]

    def batch(self, rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
        """States and those half a day later, each turned by some longitudes."""
        members = rng.integers(0, MEMBERS - JUDGED, size)
        times = rng.integers(0, LEADS - 1, size)
        turns = rng.integers(0, BAND.width, size)
        pairs = [
            np.roll(self.fields[member, at : at + 2], turn, axis=2)
            for member, at, turn in zip(members, times, turns, strict=True)
        ]
        fields, targets = np.stack(pairs, axis=1)
        return {"fields": fields, "targets": targets}


def _fields(state: State) -> np.ndarray:
    """Winds in the middle of the cells, and heights: (member, height, width, 3)."""
    u, v, h = state
    faces = np.pad(v, [(0, 0), (1, 1), (0, 0)])
    middle = (faces[:, 1:] + faces[:, :-1]) / 2
    return np.stack([(u + np.roll(u, 1, axis=-1)) / 2, middle, h], axis=-1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe: 0 if forecasts beat persistence, 1 if not, 2 on bad input."""
    args = _parser().parse_options(argv)
    try:
        if args.png:
            check_picture("--png", args.png, {".png": "matplotlib"})
        layout = Layout.parse(args.layout)
        emulate(layout.num_devices)
        with on_console():
            return run(args, layout)
    except Exception as error:
        return print_end("forecast", error)


def run(args: argparse.Namespace, layout: Layout) -> int:
    """Simulates, trains, judges and draws."""
    began = time.perf_counter()
    weather = Weather.simulated(args.seed)
    LOGGER.info(
        f"{MEMBERS} members of {(LEADS - 1) / 2:.0f} days simulated in "
        f"{time.perf_counter() - began:.0f} s; relative drift: "
        + ", ".join(f"{name} {value:.1e}" for name, value in weather.drift.items())
    )
    rows, forecasts = [], weather.judged
    for row, found in train(weather, args, layout):
        rows.append(row)
        forecasts = found
        LOGGER.info(in_words(row))
    write_rows(rows, metrics_file(args))
    errors, unmoved = rows[-1]["error"], rows[-1]["persistence"]
    for at, (error, other) in enumerate(zip(errors, unmoved, strict=True), start=1):
        LOGGER.info(f"after {12 * at} h: error {error:.4f}, persistence {other:.4f}")
    if args.png:
        draw(weather, forecasts, args.png)
    return 0 if all(map(np.less, errors, unmoved)) else 1


def train(
    weather: Weather, args: argparse.Namespace, layout: Layout
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """A row and forecasts of four leads, after every so many steps and at the end."""
    import jax
    import optax

    from meshpar import default_rules, make_train_step
    from meshpar.models.afno import AFNOConfig, afno

    config = AFNOConfig(
        layers=args.layers,
        embed=args.embed,
        height=BAND.height,
        width=BAND.width,
        patch=4,
        modes=8,
        init_std=0.05,
    )
    rules = _GIVEN if layout.context == layout.tensor == 1 else _RULES
    peak, steps = args.learning_rate, max(args.steps, 21)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, 20, steps)
    step = make_train_step(
        afno(config),
        optax.adamw(rate),
        layout,
        rules=default_rules(layout).with_rules(**rules),
        devices=jax.devices()[: layout.num_devices],
        max_grad_norm=1.0,
    )
    step.check_batch(args.global_batch)
    step.check_batch(JUDGED)
    rng, state = np.random.default_rng(args.seed), step.init(args.seed)
    began = time.perf_counter()
    for number in range(1, args.steps + 1):
        state, metrics = step(state, weather.batch(rng, args.global_batch))
        loss = float(metrics["loss"])
        if number % args.validate_every and number != args.steps:
            continue
        forecasts = rolled_out(weather, functools.partial(step.logits, state))
        truth = weather.judged[:, 1 : 1 + forecasts.shape[1]]
        start = np.broadcast_to(weather.judged[:, :1], truth.shape)
        yield (
            {
                "step": number,
                "loss": loss,
                "train_s": time.perf_counter() - began,
                "error": _error(forecasts, truth),
                "persistence": _error(start, truth),
            },
            forecasts,
        )


def rolled_out(weather: Weather, change: Any, num_leads: int = 4) -> np.ndarray:
    """Forecasts of the judged members, each from the one before.

    Returns:
        (member, lead, height, width, 3).
    """
    fields, found = weather.judged[:, 0], []
    for _ in range(num_leads):
        fields = fields + np.asarray(change({"fields": fields}))
        found.append(fields)
    return np.stack(found, axis=1)


def _error(found: np.ndarray, truth: np.ndarray) -> list[float]:
    """Root mean square over members, places and fields, for each lead."""
    return np.sqrt(np.mean((found - truth) ** 2, axis=(0, 2, 3, 4))).tolist()


def in_words(row: dict[str, Any]) -> str:
    """A row in one line."""
    return (
        f"step {row['step']:4d}  loss {row['loss']:.5f}  error after 12 h "
        f"{row['error'][0]:.4f} (persistence {row['persistence'][0]:.4f})  after "
        f"{row['train_s']:.0f} s"
    )


def draw(weather: Weather, forecasts: np.ndarray, png: str) -> None:
    """Heights of a judged member: at the start, and forecast and true two days on."""
    from matplotlib.figure import Figure

    member, lead = 0, forecasts.shape[1]
    start, truth = weather.judged[member, [0, lead]][..., 2] * weather.spread[2]
    found = forecasts[member, -1, ..., 2] * weather.spread[2]
    panels = {
        "height at the start, m from the mean": start,
        f"true, {12 * lead} h later": truth,
        "forecast": found,
        "error of the forecast": found - truth,
        "error of persistence": start - truth,
    }
    figure = Figure(figsize=(7, 9), layout="constrained")
    limits = float(np.abs(truth).max()), float(np.abs(start - truth).max())
    for axes, (name, values) in zip(
        figure.subplots(len(panels), sharex=True), panels.items(), strict=True
    ):
        limit = limits["error" in name]
        shown = axes.imshow(
            values,
            origin="lower",
            extent=(0, 360, BAND.south_deg, BAND.north_deg),
            aspect="auto",
            cmap="RdBu_r",
            vmin=-limit,
            vmax=limit,
        )
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("latitude")
        figure.colorbar(shown, ax=axes)
    axes.set_xlabel("longitude")
    figure.savefig(png, dpi=80)


def _parser() -> RecipeParser:
    shared = dict(layout="data=2,context=2,tensor=2", steps=1500, global_batch=16)
    shared |= dict(learning_rate=3e-3, validate_every=300, seed=0)
    files = dict(out=None, log_json=None, png=None)
    renamed = {"--every": "--validate-every", "--rate": "--learning-rate"}
    parser = RecipeParser("forecast", __doc__, {**shared, **files}, renamed)
    parser.add_argument(
        "--layers", type=positive, default=2, help="layers of the model"
    )
    parser.add_argument("--embed", type=positive, default=32, help="width of the model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
