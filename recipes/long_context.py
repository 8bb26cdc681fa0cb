"""Train on documents packed into sequences that no device holds whole.

    python -m recipes.long_context
    python -m recipes.long_context --layout context=4,tensor=2,attention=ulysses

The documents are scenes of Shakespeare's plays. Each row of a batch has several, and a
token attends to its own scene only. Eight virtual CPU devices share each row of 8,192
bytes. Before it trains, the recipe changes one token and checks that exactly the later
outputs of its document change.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax

import meshpar
from meshpar.cli.parsing import not_negative
from meshpar.errors import print_end
from meshpar.models.llama import LlamaConfig, llama
from meshpar.recipes.printed_rows import write_rows
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shared_options import RecipeParser, metrics_file
from meshpar.recipes.texts import BYTE_VOCAB, SHAKESPEARE
from meshpar.train.data import HostBatch, byte_tokens, read_texts

LOGGER = logging.getLogger("meshpar.recipes.long_context")

_SCENE = re.compile(r"(?=^SCENE |^Scene )", re.MULTILINE)
_PADDING = -1
_LEAST_SEQ = 4
"""Half of it is the longest document, which needs a token and the next."""


def main(argv: Sequence[str] | None = None) -> int:
    """Packs, probes and trains; 0 done, 2 on bad input."""
    args = _arguments(argv)
    try:
        with on_console():
            run(args)
    except Exception as error:
        return print_end("long_context", error)
    return 0


def run(args: argparse.Namespace) -> None:
    """Packs, probes and trains.

    Raises:
        InputError: The layout, or what it splits, cannot be.
    """
    meshpar.emulate(8)
    model = llama(
        LlamaConfig(
            layers=2,
            embed=64,
            heads=8,
            kv_heads=4,
            ffn=128,
            vocab=BYTE_VOCAB,
            tied=True,
        )
    )
    step = meshpar.make_train_step(model, optax.adam(3e-3), args.layout)
    state = step.init(args.seed)
    batches = packed_batches(scenes(), args.seq, args.global_batch, args.seed)
    first = next(batches)
    LOGGER.info(f"{args.layout}: {described(first)}")
    LOGGER.info(f"one token changed: {probe(step, state, first)}")
    rows = []
    for number in range(args.steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, next(batches)))
        seconds = time.perf_counter() - start
        rows.append(dict(step=number, loss=float(metrics["loss"]), step_s=seconds))
        LOGGER.info(f"step {number}: loss {rows[-1]['loss']:.4f}, {seconds:.2f} s")
    write_rows(rows, metrics_file(args))


def scenes() -> list[np.ndarray]:
    """The scenes of all plays, as bytes."""
    texts = read_texts(SHAKESPEARE).values()
    return [byte_tokens(scene) for text in texts for scene in _SCENE.split(text)]


def packed_batches(
    documents: list[np.ndarray], seq: int, rows: int, seed: int
) -> Iterator[HostBatch]:
    """Batches of whole documents, as many in a row as fit; longer ones are cut."""
    rng = np.random.default_rng(seed)
    while True:
        yield _stacked([_row(documents, seq, rng) for _ in range(rows)])


def probe(step: meshpar.TrainStep, state: meshpar.TrainState, batch: HostBatch) -> str:
    """Changes a token in the middle of the first document, and counts what follows.

    Raises:
        SystemExit: Other outputs change than the later ones of that document.
    """
    given = {name: batch[name] for name in ("tokens", "segment_ids")}
    (places,) = np.nonzero(batch["segment_ids"][0] == 0)
    at = int(places[len(places) // 2])
    changed = batch["tokens"].copy()
    changed[0, at] ^= 1
    before, after = (
        np.asarray(step.logits(state, {**given, "tokens": tokens}))
        for tokens in (batch["tokens"], changed)
    )
    moved = np.argwhere((before != after).any(-1))
    wanted = [(0, place) for place in range(at, int(places[-1]) + 1)]
    if [tuple(place) for place in moved] != wanted:
        sys.exit(f"{len(moved)} outputs changed, not the {len(wanted)} that follow")
    return f"the {len(moved)} later outputs of its document changed, no other"


def described(batch: HostBatch) -> str:
    """Return a description of a batch's contents."""
    segments = batch["segment_ids"]
    rows, seq = segments.shape
    packed = sum(len(set(row[row >= 0])) for row in segments)
    share = (segments >= 0).mean()
    return f"{rows} rows of {seq} tokens, {packed} documents, {share:.0%} filled"


def _row(documents: list[np.ndarray], seq: int, rng: np.random.Generator) -> HostBatch:
    tokens, targets = np.zeros((2, seq), np.int32)
    segments = np.full(seq, _PADDING, np.int32)
    start, number = 0, 0
    while start < seq - 1:
        document = documents[rng.integers(len(documents))][: seq // 2]
        length = min(len(document) - 1, seq - start)
        if length > 0:
            here = slice(start, start + length)
            tokens[here], targets[here] = document[:length], document[1 : length + 1]
            segments[here] = number
            start, number = start + length, number + 1
    return dict(
        tokens=tokens,
        targets=targets,
        weights=(segments >= 0).astype(np.float32),
        segment_ids=segments,
    )


def _stacked(rows: list[HostBatch]) -> HostBatch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    shared = dict(layout="context=8", seq=8192, global_batch=1, steps=10, seed=0)
    files = dict(out=None, log_json=None)
    renamed = {"--rows": "--global-batch"}
    types = {"steps": not_negative}
    parser = RecipeParser("long_context", __doc__, {**shared, **files}, renamed, types)
    args = parser.parse_options(argv)
    if args.seq < _LEAST_SEQ:
        parser.error(f"--seq {args.seq}: give {_LEAST_SEQ} or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
