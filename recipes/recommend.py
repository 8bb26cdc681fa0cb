"""Train a DLRM on clicks, with tables over devices and a model in pipeline stages.

    python -m recipes.recommend
    python -m recipes.recommend --layout data=4,tensor=2 --placement column_wise
    python -m recipes.recommend --data movielens
    python -m recipes.recommend --out runs/clicks --steps 300
    python -m recipes.recommend --out runs/clicks --resume --layout data=2,fsdp=2

It uses 8 virtual CPU devices. Users, items and genres are drawn with a known truth, or
read from MovieLens-100k (`pip install recbole --no-deps`), where the last tenth of each
user's ratings is held out. Tables are split by rows, because `--placement auto` would
replicate such small ones. It prints every table's placement, each device's load, as
planned and as counted in a batch, and the loss. At the end it prints the AUC of the
held-out examples: of the model, of the items' popularity, of popularity plus the user's
own share of clicks, and of the truth, if known, which no model can exceed. `--out`
keeps checkpoints, which any layout and placement can resume.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshpar import (
    InputError,
    Layout,
    TrainState,
    embedding_tables,
    emulate,
    make_train_step,
)
from meshpar.errors import print_end
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
from meshpar.recipes.printed_rows import Row, printed, write_rows
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shared_options import RecipeParser, metrics_file
from meshpar.tables.placement import AUTO
from meshpar.tables.table import KINDS, ROW_WISE
from meshpar.train.folder_in_use import folder_in_use

if TYPE_CHECKING:
    from meshpar.tables import TableStep
    from meshpar.train.checkpoint import Checkpoints

LOGGER = logging.getLogger("meshpar.recipes.recommend")

DATA = {"drawn": drawn, "movielens": movielens}
TABLE_RATES = {"drawn": 0.05, "movielens": 0.02}
FIRST_VALUES = {"drawn": 0.05, "movielens": 0.01}
"""Rates and first values by data. MovieLens' were chosen by runs on its training
ratings, the last tenth of each user's held out, where 0.05 and 0.05 were past their
best after 250 steps."""

DIM = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; 0 done, 2 on bad input."""
    args = _parser().parse_options(argv)
    try:
        layout = Layout.parse(args.layout)
        layout.check_sizes()
        emulate(layout.num_devices)
        with on_console():
            rows = printed(train(args, layout, *split(DATA[args.data]())), in_words)
    except Exception as error:
        return print_end("recommend", error)
    write_rows(rows, metrics_file(args))
    return 0


def _parser() -> RecipeParser:
    shared = dict(layout="data=4,stage=2,microbatches=2", steps=600, global_batch=1024)
    files = dict(out=None, save_every=200, log_json=None)
    parser = RecipeParser("recommend", __doc__, {**shared, **files})
    add = parser.add_argument
    add("--data", choices=DATA, default="drawn", help="clicks to learn")
    add(
        "--placement",
        choices=(AUTO, *KINDS),
        default=ROW_WISE,
        help="placement of all tables",
    )
    add("--resume", action="store_true", help="resume from the checkpoint in --out")
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
            "examples to train on; give a smaller one",
            key="batch.more_than_examples",
        )
    LOGGER.info(step.placements)
    with _checkpoints(args, step) as checkpoints:
        state = _first_state(args, step, checkpoints)
        state = yield from _steps(args, step, state, train_set, checkpoints)
    yield {
        "auc": auc(_scores(step, state, test, args.global_batch), test.clicks),
        "popularity_auc": auc(popularity(train_set, test), test.clicks),
        "popularity_and_user_auc": auc(
            popularity_and_user(train_set, test), test.clicks
        ),
        "truth_auc": None if test.truth is None else auc(test.truth, test.clicks),
    }


def _steps(
    args: argparse.Namespace,
    step: TableStep,
    state: TrainState,
    clicks: Clicks,
    checkpoints: Checkpoints | None,
) -> Generator[Row, None, TrainState]:
    """Takes the steps that are left, tells of them, and returns the last state."""
    began, first = time.perf_counter(), int(state.step)
    for number in range(first, args.steps):
        # Of the step's number alone: a resumed run has the batches of one in one go.
        rng = np.random.default_rng((1, number))
        batch = clicks.batch(rng.choice(len(clicks), args.global_batch, replace=False))
        if number == first:
            looked_up = step.rows_looked_up(batch).round(1).tolist()
            yield {"rows_looked_up": looked_up}
        state, metrics = step(state, batch)
        done = number + 1
        is_last = done == args.steps
        if checkpoints is not None and (is_last or done % args.save_every == 0):
            checkpoints.save(step.portable(state), _description(args))
        if number % 100 == 0 or is_last:
            row = {"step": number, "loss": float(metrics["loss"])}
            yield row | {"seconds": time.perf_counter() - began}
    return state


@contextlib.contextmanager
def _checkpoints(
    args: argparse.Namespace, step: TableStep
) -> Iterator[Checkpoints | None]:
    """Return the run's checkpoints, or None without `--out`."""
    if args.out is None:
        if args.resume:
            raise InputError(
                "--resume goes on from a folder; name it by --out",
                key="run.resume_without_folder",
            )
        yield None
        return
    with (
        folder_in_use(args.out) as folder,
        step.checkpoints(args.out) as checkpoints,
    ):
        there = checkpoints.latest_step
        if there is not None and not args.resume:
            raise InputError(
                f"--out {args.out} has a checkpoint of step {there}; add --resume to "
                "go on from it, or name another folder",
                key="run.folder_is_taken",
            )
        yield checkpoints
        folder.refuse_deleted()


def _first_state(
    args: argparse.Namespace, step: TableStep, checkpoints: Checkpoints | None
) -> TrainState:
    """The checkpoint's, where the run goes on from one."""
    if checkpoints is None or not args.resume:
        return step.init(0)
    before, now = checkpoints.run_of_latest(), _description(args)
    for name, value in now.items():
        if before.get(name, value) != value:
            raise InputError(
                f"the checkpoint in {args.out} was made with {name}={before[name]}, "
                f"not {value}; give the same, or start a run in another --out",
                key="run.changed_option",
            )
    state = step.restored(checkpoints)
    if int(state.step) >= args.steps:
        raise InputError(
            f"the checkpoint in {args.out} has {int(state.step)} steps, and --steps is "
            f"{args.steps}; give more",
            key="run.too_few_steps",
        )
    return state


def _description(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a resumed run must keep."""
    return {"data": args.data, "global_batch": args.global_batch}


def _step(args: argparse.Namespace, layout: Layout, clicks: Clicks) -> TableStep:
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
            scale=FIRST_VALUES[args.data],
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
