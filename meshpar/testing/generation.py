"""Generation against training: the same numbers, whatever the two layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from meshpar import InputError, Layout, Model, TrainState, TrainStep, make_train_step
from meshpar.generation.cache_plan import reads_source
from meshpar.generation.engine import Engine, Token
from meshpar.generation.generate import placed
from meshpar.generation.programs import Programs, generation_layout
from meshpar.generation.requests import Request
from meshpar.model.contract import check_model
from meshpar.testing.batches import random_batch
from meshpar.testing.layout_cases import Choices, draw_cases

BOUND = 1e-5
"""Largest difference of a log-probability in fp32."""

Pair = tuple[Layout | str, Layout | str]


@dataclass(frozen=True, kw_only=True)
class PairChecked:
    """Result of comparing one pair of layouts.

    Args:
        training: The layout that trained.
        generation: The one that generated.
        largest: Largest difference of a log-probability, over the whole vocabulary.
        same_tokens: Whether each token is the trainer's likeliest, or within the bound
            of it.
        bound: Largest difference that is allowed.
    """

    training: str
    generation: str
    largest: float
    same_tokens: bool
    bound: float = BOUND

    @property
    def ok(self) -> bool:
        """True if they agree."""
        return self.same_tokens and self.largest <= self.bound


def check_generation(
    model: Model,
    pairs: Sequence[Pair] | None = None,
    *,
    num: int = 4,
    num_tokens: int = 4,
    seed: int = 0,
    bound: float = BOUND,
) -> list[PairChecked]:
    """Asserts that a generator's log-probabilities are those that the trainer computes.

    A model is trained for one step under the first layout of a pair. Then it generates
    the likeliest tokens under the second, more requests than slots, so that they join
    and leave while others run; the log-probabilities of the whole vocabulary at each
    place are compared with `TrainStep.logits`. Another step follows in the middle of
    such requests, and the engine goes on with the new parameters.

    Args:
        model: A small one, for every layout is compiled.
        pairs: Training layout and generation layout; `num` random ones when absent.
        num: How many to draw.
        num_tokens: To generate for each request.
        seed: Of values, data and prompts.
        bound: Largest difference that is allowed, which is of fp32.

    Returns:
        What each pair gave.

    Raises:
        AssertionError: A pair differs; all that do are named.
        InputError: A layout is refused, or none can be drawn; or the model has an
            encoder.
    """
    check_model(model)
    if reads_source(model):
        raise InputError(
            "check_generation draws prompts of one text, but the decoder here reads "
            "another; compare meshpar.generate with TrainStep.logits",
            key="testing.decoder_of_source",
        )
    drawn = draw_pairs(model, num, seed) if pairs is None else pairs
    found = [
        _checked(model, Layout.of(one), Layout.of(two), num_tokens, seed + at, bound)
        for at, (one, two) in enumerate(drawn)
    ]
    failed = [one for one in found if not one.ok]
    if failed:
        lines = [
            f"{one.training} -> {one.generation}: log-probabilities differ by "
            f"{one.largest:.1e}"
            + ("" if one.same_tokens else ", and so do the likeliest tokens")
            for one in failed
        ]
        raise AssertionError("\n".join([f"bound {bound:.0e}", *lines]))
    return found


def draw_pairs(model: Model, num: int, seed: int = 0) -> list[tuple[Layout, Layout]]:
    """Draw pairs of random valid layouts in fp32: to train and to generate under."""
    choices = Choices(models=("",), build=lambda _: model)
    layouts = [
        replace(case.layout, precision="fp32", param_dtype="fp32")
        for case in draw_cases(2 * num, seed, choices, jax.devices())
    ]
    return list(zip(layouts[::2], layouts[1::2], strict=True))


def _checked(
    model: Model,
    training: Layout,
    generation: Layout,
    num_tokens: int,
    seed: int,
    bound: float,
) -> PairChecked:
    devices = jax.devices()
    step = make_train_step(
        model, optax.adam(1e-2), training, devices=devices[: training.num_devices]
    )
    shards = training.batch_shards * training.microbatches
    batch = random_batch(model, shards * 2, 16, seed=seed)
    state, _ = step(step.init(seed), batch)
    slots = generation.batch_shards * generation.microbatches
    requests = _requests(batch["tokens"], slots + 1, num_tokens)
    programs = Programs.from_model(
        model,
        generation,
        slots=slots,
        max_seq=max(len(one.tokens) for one in requests) + num_tokens,
        page_size=4,
        chunk=8,
        devices=devices[: generation.num_devices],
    )
    engine = Engine(
        programs, *placed(programs, model, state, training), keep_logits=True
    )
    whole = _submitted(engine, requests)
    _add(engine.run(), whole)
    differences = [_compared(step, state, engine, requests, whole)]
    # What is left in the cache of the old parameters would show in these.
    cut = _submitted(engine, requests)
    while max(map(len, cut.values())) < num_tokens // 2:
        _add(engine.step(), cut)
    old = {number: len(tokens) for number, tokens in cut.items()}
    state, _ = step(state, batch)
    engine.update(*placed(programs, model, state, training))
    _add(engine.run(), cut)
    differences.append(_compared(step, state, engine, requests, cut, old))
    # NumPy's, for which NaN is the largest.
    largest, behind = np.max(differences, axis=0).tolist()
    return PairChecked(
        training=str(training),
        generation=str(generation_layout(generation)),
        largest=largest,
        same_tokens=behind <= bound,
        bound=bound,
    )


def _requests(tokens: np.ndarray, num: int, num_tokens: int) -> list[Request]:
    rows = np.asarray(tokens)
    return [
        Request(
            tokens=tuple(rows[at % len(rows)][: 1 + 5 * at % 16].tolist()),
            max_tokens=num_tokens,
        )
        for at in range(num)
    ]


def _submitted(engine: Engine, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Submit requests; return the empty list of new tokens of each, by its number."""
    return {engine.submit(request): [] for request in requests}


def _add(tokens: Iterable[Token], new: dict[int, list[int]]) -> None:
    for token in tokens:
        new[token.request].append(token.token)


def _compared(
    step: TrainStep,
    state: TrainState,
    engine: Engine,
    requests: Sequence[Request],
    new: dict[int, list[int]],
    old: dict[int, int] | None = None,
) -> tuple[float, float]:
    """Return the largest log-probability difference, and how far a token is behind.

    Args:
        step: Of the training layout.
        state: Its state.
        engine: What generated.
        requests: In the order of `new`.
        new: Tokens of each.
        old: How many of them were of other parameters, and are left out.
    """
    texts = [
        [*one.tokens, *tokens]
        for one, tokens in zip(requests, new.values(), strict=True)
    ]
    longest = -(-max(map(len, texts)) // 8) * 8  # Splits of sequences are even.
    shards = step.layout.batch_shards
    window = np.zeros((-(-len(texts) // shards) * shards, longest), np.int32)
    for row, text in zip(window, texts, strict=False):
        row[: len(text)] = text
    known = np.asarray(jax.nn.log_softmax(step.logits(state, window)))
    largest = behind = np.float32(0)
    for row, request, (number, tokens) in zip(
        known, requests, new.items(), strict=False
    ):
        first = 0 if old is None else old[number]
        ends = (len(request.tokens) - 1 + at for at in (first, len(tokens)))
        here = row[slice(*ends)]
        own = np.asarray(jax.nn.log_softmax(np.stack(engine.logits[number][first:])))
        chosen = np.take_along_axis(here, np.array(tokens[first:])[:, None], -1)[:, 0]
        largest = np.maximum(largest, np.abs(own - here).max())
        behind = np.maximum(behind, (here.max(-1) - chosen).max())
    return float(largest), float(behind)
