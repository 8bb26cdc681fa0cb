"""Trains a DLRM on clicks, its tables spread over devices, beside pipeline stages.

    python -m recipes.recommend
    python -m recipes.recommend --layout data=4,tensor=2 --placement column_wise
    python -m recipes.recommend --data movielens

On 8 virtual CPU devices. Users, items and genres are drawn with a known truth, or read
from MovieLens-100k (`pip install recbole --no-deps`), where the last tenth of each
user's ratings is held out. Tables are split by rows; they are so small that
`--placement auto` would give every device all of them. It prints where every table lies
and each device's load, as planned and as counted in a batch, then the loss, and at the
end the AUC of the held out examples: of the model, of the items' popularity, of that
and the user's own share of clicks added, and of the truth, where that is known, which
no model can pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import InputError, Layout, embedding_tables, emulate, make_train_step
from meshpar.cli.parsing import positive
from meshpar.cli.report.destination import output_file
from meshpar.recipes.clicks import (
    NUMBERS,
    Clicks,
    auc,
    drawn,
    movielens,
    popularity,
    popularity_and_user,
    split,
)
from meshpar.tables.placement import AUTO
from meshpar.tables.table import KINDS, ROW_WISE

DATA = {"drawn": drawn, "movielens": movielens}
TABLE_RATES = {"drawn": 0.05, "movielens": 0.02}
"""Of each data; MovieLens' is of runs on its training ratings, their last tenth held
out, where 0.05 was past its best after 250 steps."""

DIM = 16
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; 0 done, 2 on bad input."""
    args = _parser().parse_args(argv)
    try:
        layout = Layout.parse(args.layout)
        layout.check_sizes()
        emulate(layout.num_devices)
        rows = []
        for row in train(args, layout, *split(DATA[args.data]())):
            rows.append(row)
            print(in_words(row), flush=True)
    except InputError as error:
        print(f"recommend: {error}", file=sys.stderr)
        return 2
    if args.log_json is not None:
        Path(args.log_json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.recommend")
    add = parser.add_argument
    add("--data", choices=DATA, default="drawn")
    add("--layout", default="data=4,stage=2,microbatches=2", metavar="LINE")
    add("--placement", choices=(AUTO, *KINDS), default=ROW_WISE, help="of all tables")
    add("--steps", type=positive, default=600, metavar="N")
    add("--global-batch", type=positive, default=1024, help="examples a step")
    add("--log-json", type=output_file, metavar="FILE", help="what is printed")
    return parser


def train(
    args: argparse.Namespace, layout: Layout, train_set: Clicks, test: Clicks
) -> Iterator[Row]:
    """Trains, and says how good the model is; one row for each line.

    Raises:
        InputError: The layout or the placement does not suit model or tables.
    """
    step = _step(args, layout, train_set)
    step.dense.check_batch(args.global_batch)
    if args.global_batch > len(train_set):
        raise InputError(
            f"--global-batch {args.global_batch} is more than the {len(train_set)} "
            "examples to train on; give a smaller one"
        )
    print(step.placements)
    rng, state, began = np.random.default_rng(1), step.init(0), time.perf_counter()
    for number in range(args.steps):
        at = rng.choice(len(train_set), args.global_batch, replace=False)
        batch = train_set.batch(at)
        if number == 0:
            yield {"rows_looked_up": step.rows_looked_up(batch).round(1).tolist()}
        state, metrics = step(state, batch)
        if number % 100 == 0 or number == args.steps - 1:
            yield {
                "step": number,
                "loss": float(metrics["loss"]),
                "seconds": time.perf_counter() - began,
            }
    yield {
        "auc": auc(_scores(step, state, test, args.global_batch), test.clicks),
        "popularity_auc": auc(popularity(train_set, test), test.clicks),
        "popularity_and_user_auc": auc(
            popularity_and_user(train_set, test), test.clicks
        ),
        "truth_auc": None if test.truth is None else auc(test.truth, test.clicks),
    }


def _step(args: argparse.Namespace, layout: Layout, clicks: Clicks) -> Any:
    """The training step of a DLRM with a table a feature."""
    import optax

    from meshpar.models.presets import build
    from meshpar.tables import RowwiseAdagrad, Table, with_tables

    tables = [
        Table(
            name=name,
            rows=rows,
            dim=DIM,
            bag=clicks.ids[name].shape[1],
            pooling="mean",
            scale=0.01,
        )
        for name, rows in clicks.rows.items()
    ]
    model = build("tiny-dlrm", numbers=NUMBERS, features=len(tables), dim=DIM)
    dense = make_train_step(model, optax.adam(2e-3), layout)
    optimizer = RowwiseAdagrad(TABLE_RATES[args.data])
    made = embedding_tables(tables, optimizer, placement=args.placement)
    return with_tables(dense, made)


def _scores(step: Any, state: Any, clicks: Clicks, size: int) -> np.ndarray:
    """The model's logit of every example, batch by batch, the last one filled up."""
    found = []
    for first in range(0, len(clicks), size):
        at = np.arange(first, first + size) % len(clicks)
        found.append(np.asarray(step.logits(state, clicks.batch(at))))
    return np.concatenate(found)[: len(clicks)]


def in_words(row: Row) -> str:
    """A row in one line."""
    if "rows_looked_up" in row:
        rows = row["rows_looked_up"]
        uneven = max(rows) / (sum(rows) / len(rows))
        return f"rows looked up a step by each device: {rows}, {uneven:.2f} of the mean"
    if "step" in row:
        return "step {step:4d}  loss {loss:.4f}  {seconds:.0f} s".format(**row)
    truth = row["truth_auc"]
    beside = "" if truth is None else f", the truth {truth:.4f}"
    return (
        f"AUC {row['auc']:.4f} on held out examples; popularity "
        f"{row['popularity_auc']:.4f}, with the user's own share "
        f"{row['popularity_and_user_auc']:.4f}{beside}"
    )


if __name__ == "__main__":
    sys.exit(main())
