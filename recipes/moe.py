"""Train a model with experts on Shakespeare's plays and print the experts' load.

    python -m recipes.moe --layout data=2,expert=4 --preset tiny-moe --steps 150
    python -m recipes.moe --preset tiny-moe-capacity --log-json load.jsonl \\
        --png load.png

It uses 8 virtual CPU devices. Each row has the step's loss, the share of dropped
assignments, the further rounds of all layers and the share of assignments that went in
them, and for each layer the load of every expert over its equal share. The picture
(`pip install 'meshpar[plots]'`) shows each expert's load and the drop rate over time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from meshpar import InputError, Layout, emulate
from meshpar.cli.parsing import check_picture
from meshpar.errors import print_end
from meshpar.recipes.printed_rows import Row, printed, write_rows
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shared_options import RecipeParser, metrics_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; 0 done, 2 on bad input."""
    args = _parser().parse_options(argv)
    try:
        layout = Layout.parse(args.layout)
        layout.check_sizes()
        if args.png is not None:
            check_picture("--png", args.png, {".png": "matplotlib"})
        emulate(layout.num_devices)
        with on_console():
            rows = printed(
                train(args.preset, layout, args.steps, args.global_batch, args.seq),
                in_words,
            )
    except Exception as error:
        return print_end("moe", error)
    write_rows(rows, metrics_file(args))
    if args.png is not None:
        draw(rows, args.png)
    return 0


def _parser() -> RecipeParser:
    shared = dict(layout="data=2,expert=4", steps=150, global_batch=16, seq=128)
    files = dict(out=None, log_json=None, png=None)
    parser = RecipeParser("moe", __doc__, {**shared, **files})
    parser.add_argument("--preset", default="tiny-moe", metavar="NAME", help="model")
    return parser


def train(
    preset: str, layout: Layout, num_steps: int, global_batch: int, seq: int
) -> Iterator[Row]:
    """Trains a preset with experts, one row a step.

    Raises:
        InputError: The preset has no experts, or the layout does not suit it.
    """
    import jax
    import numpy as np
    import optax

    from meshpar import make_train_step
    from meshpar.models.presets import build
    from meshpar.recipes.texts import read_tokens

    model = build(preset)
    if "router" not in model.state.get("blocks", {}).get("mlp", {}):
        raise InputError(
            f"preset {preset!r} has no experts; choose tiny-moe", key="model.no_experts"
        )
    devices = jax.devices()[: layout.num_devices]
    warmup = min(20, num_steps - 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(num_steps, 2))
    optimizer = optax.adamw(rate)
    step = make_train_step(model, optimizer, layout, devices=devices, max_grad_norm=1.0)
    step.check_batch(global_batch)
    tokens = read_tokens((), seq).train
    rng, state = np.random.default_rng(0), step.init(0)
    for number in range(num_steps):
        starts = rng.integers(0, len(tokens) - seq - 1, global_batch)
        rows = tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
        weights = np.ones((global_batch, seq), np.float32)
        batch = dict(tokens=rows[:, :-1], targets=rows[:, 1:], weights=weights)
        state, metrics = step(state, batch)
        load = np.asarray(state.model_state["blocks"]["mlp"]["router"]["tokens"])
        dropped, further = (
            float(metrics[f"auxiliary.{name}"] * metrics["weight_sum"] / load.sum())
            for name in ("dropped", "further_rows")
        )
        yield {
            "step": number,
            "loss": float(metrics["loss"]),
            "dropped": dropped,
            "further": further,
            "rounds": float(metrics["auxiliary.further_rounds"]),
            "load": (load / load.mean(axis=1, keepdims=True)).round(4).tolist(),
        }


def in_words(row: Row) -> str:
    """A row in one line: its fullest and emptiest experts over their fair share."""
    loads = [load for layer in row["load"] for load in layer]
    return (
        f"step {row['step']:4d}  loss {row['loss']:.4f}  load {min(loads):.2f} to "
        f"{max(loads):.2f}  dropped {row['dropped']:.2%}  further rounds "
        f"{row['rounds']:.2f} with {row['further']:.2%}"
    )


def draw(rows: Sequence[Row], png: str) -> None:
    """Each expert's load over time, one panel a layer, and the drop rate below."""
    from matplotlib.figure import Figure

    num_layers = len(rows[0]["load"])
    figure = Figure(figsize=(7, 1.6 * (num_layers + 1)), layout="constrained")
    *panels, last = figure.subplots(num_layers + 1, sharex=True)
    steps = [row["step"] for row in rows]
    for layer, axes in enumerate(panels):
        axes.plot(steps, [row["load"][layer] for row in rows], linewidth=0.8)
        axes.axhline(1.0, color="black", linewidth=0.5)
        axes.set_ylabel(f"layer {layer}")
    panels[0].set_title("load of each expert over its fair share")
    last.plot(steps, [100 * row["dropped"] for row in rows], color="black")
    last.set_ylabel("dropped, %")
    last.set_xlabel("step")
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
