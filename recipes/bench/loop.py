"""Measure the time of a run's loop, and of its steps alone.

    python -m recipes.bench.loop

The recipe's own loop trains on Shakespeare's plays: JSON lines of paragraphs, tokens of
a BPE that is trained first, packed; every step is logged, and a checkpoint is saved in
each round. In turn with it the same compiled step runs alone, on one batch that lies on
the devices, its metrics read after each step. A round of the loop has all that it does,
its start and the end of its checkpoint's writing too; beside it stands the median time
from one logged row to the next, in which those are not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshpar import TrainState, emulate
from meshpar.distributed import Processes
from meshpar.recipes.bench.conditions import conditions
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus import load_corpus
from meshpar.recipes.metrics import metrics_log
from meshpar.recipes.pretrain import make_batches, train
from meshpar.recipes.resume import Position
from meshpar.recipes.run import Run
from meshpar.recipes.step import make_step
from meshpar.recipes.texts import SHAKESPEARE
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import read_texts
from meshpar.train.faults import StopRequest

_END = "<|endoftext|>"


def main(argv: list[str] | None = None) -> int:
    """Prints both times of a step, and the share of throughput that the loop keeps."""
    args = _arguments(argv)
    emulate(8)
    with tempfile.TemporaryDirectory() as folder:
        rounds = measured(_config(args, Path(folder)), args)
    loop_s = [one.loop_s for one in rounds]
    bare_s = [one.bare_s for one in rounds]
    shares = [bare / loop for bare, loop in zip(bare_s, loop_s, strict=True)]
    sizes = {name: getattr(args, name) for name in ("steps", "rounds", "vocab")}
    sizes |= {"global_batch": args.global_batch, "seq": args.seq}
    runs = f"{args.layout}; rounds in turn, after one of each; a checkpoint a round"
    print(conditions("recipes.bench.loop", jax.device_count(), sizes, runs))
    for name, times in (("step alone", bare_s), ("in the loop", loop_s)):
        each = ", ".join(f"{one:.4f}" for one in times)
        print(f"{name} {statistics.median(times):.4f} s (rounds: {each})")
    between_s, data_s = (
        statistics.median(value for one in rounds for value in values(one))
        for values in (lambda one: one.between_s, lambda one: one.data_s)
    )
    print(f"from row to row {between_s:.4f} s, of that waited for data {data_s:.5f} s")
    print(
        f"the loop keeps {statistics.median(shares):.1%} of the throughput (rounds: "
        f"{', '.join(f'{one:.1%}' for one in shares)})"
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of a step in the loop and alone; between rows, and waited for data."""

    loop_s: float
    bare_s: float
    between_s: list[float]
    data_s: list[float]


def measured(config: RunConfig, args: argparse.Namespace) -> list[Round]:
    """Every round but the first, which compiles."""
    rounds = []
    with _started(config) as run:
        state, position = run.step.init(config.seed), Position()
        batch = run.step.place(make_batches(run)(0))
        for number in range(args.rounds + 1):
            steps = args.steps if number else 3
            end = position.step + steps
            here = replace(
                run,
                position=position,
                config=replace(config, steps=end, save_every=end),
            )
            rows: list[tuple[float, float]] = []
            seconds, state = _loop(here, state, rows)
            position = Position(end, position.after(end, config.global_batch))
            alone, state = _alone(run, state, batch, steps)
            state = replace(state, step=_counted(state, end))
            ends, waited = zip(*rows, strict=True)
            rounds.append(
                Round(
                    loop_s=seconds / steps,
                    bare_s=alone / steps,
                    between_s=[two - one for one, two in itertools.pairwise(ends)],
                    data_s=list(waited[1:]),
                )
            )
    return rounds[1:]


def _loop(
    run: Run, state: TrainState, rows: list[tuple[float, float]]
) -> tuple[float, TrainState]:
    def on_metrics(row: dict[str, float]) -> None:
        rows.append((time.perf_counter(), row["data_s"]))

    start = time.perf_counter()
    done = run.position.step
    with metrics_log(run.processes, run.config, on_metrics, done) as log:
        state = train(run, state, log, StopRequest())
        run.checkpoints.finish()
    return time.perf_counter() - start, state


def _alone(
    run: Run, state: TrainState, batch: dict[str, jax.Array], steps: int
) -> tuple[float, TrainState]:
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = run.step(state, batch)
        jax.device_get(metrics)
    return time.perf_counter() - start, state


def _counted(state: TrainState, steps: int) -> jax.Array:
    """The number of the step as the loop counts it."""
    return jax.device_put(
        jax.numpy.asarray(steps, state.step.dtype), state.step.sharding
    )


@contextlib.contextmanager
def _started(config: RunConfig) -> Iterator[Run]:
    """A run but for its first step."""
    step = make_step(config)
    with Checkpoints(
        config.folder / "checkpoints", keep=1, layer_orders=step.layer_orders
    ) as checkpoints:
        yield Run(
            config=config,
            step=step,
            texts=load_corpus(config, Processes(), print),
            checkpoints=checkpoints,
            console=Console(quiet=True),
        )


def _config(args: argparse.Namespace, folder: Path) -> RunConfig:
    texts = read_texts(SHAKESPEARE).values()
    paragraphs = [part for text in texts for part in text.split("\n\n") if part.strip()]
    lines = [json.dumps({"text": paragraph}) for paragraph in paragraphs]
    (folder / "plays.jsonl").write_text("\n".join(lines))
    _train_bpe(paragraphs, args.vocab).save(str(folder / "tokenizer.json"))
    return RunConfig(
        data=(str(folder / "plays.jsonl"),),
        tokenizer=folder / "tokenizer.json",
        pack=True,
        layout=args.layout,
        out=folder / "run",
        global_batch=args.global_batch,
        seq=args.seq,
        decay_steps=10_000,
        validate_every=10_000_000,  # Looks at the validation text are no step's.
    )


def _train_bpe(texts: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.loop")
    parser.add_argument("--layout", default="data=2,fsdp=2,tensor=2")
    sizes = dict(steps=200, rounds=3, vocab=2048, global_batch=16, seq=128)
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"({default})")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
