"""Generation against training: the same numbers, whatever the two layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from meshpar import Layout, Model, TrainState, TrainStep, make_train_step
from meshpar.generation.engine import Engine
from meshpar.generation.generate import placed
from meshpar.generation.layouts import generation_layout
from meshpar.generation.programs import Programs
from meshpar.generation.requests import Request
from meshpar.model.contract import check_model
from meshpar.testing.batches import random_batch
from meshpar.testing.layout_cases import Choices, draw_cases

BOUND = 1e-5
"""Largest difference of a log-probability in fp32."""

Pair = tuple[Layout | str, Layout | str]


@dataclass(frozen=True, kw_only=True)
class PairChecked:
    """What one pair of layouts gave.

    Args:
        training: The layout that trained.
        generation: The one that generated.
        largest: Largest difference of a log-probability, over the whole vocabulary.
        same_tokens: Whether the likeliest tokens are alike at every place.
    """

    training: str
    generation: str
    largest: float
    same_tokens: bool

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return self.same_tokens and self.largest <= BOUND


def check_generation(
    model: Model,
    pairs: Sequence[Pair] | None = None,
    *,
    num: int = 4,
    num_tokens: int = 4,
    seed: int = 0,
) -> list[PairChecked]:
    """Asserts that a generator's log-probabilities are those that the trainer computes.

    A model is trained for one step under the first layout of a pair. Then it generates
    the likeliest tokens under the second, more requests than slots, so that they join
    and leave while others run; the log-probabilities of the whole vocabulary at each
    place are compared with `TrainStep.logits`. Another step follows, and the engine
    goes on with the new parameters.

    Args:
        model: A small one, for every layout is compiled.
        pairs: Training layout and generation layout; `num` random ones when absent.
        num: How many to draw.
        num_tokens: To generate for each request.
        seed: Of values, data and prompts.

    Returns:
        What each pair gave.

    Raises:
        AssertionError: A pair differs; all that do are named.
        InputError: A layout is refused, or none can be drawn.
    """
    check_model(model)
    drawn = _drawn(model, num, seed) if pairs is None else pairs
    found = [
        _checked(model, Layout.of(one), Layout.of(two), num_tokens, seed + at)
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
        raise AssertionError("\n".join([f"bound {BOUND:.0e}", *lines]))
    return found


def _drawn(model: Model, num: int, seed: int) -> list[tuple[Layout, Layout]]:
    """Random valid layouts in fp32, in pairs."""
    choices = Choices(models=("",), build=lambda _: model)
    layouts = [
        replace(case.layout, precision="fp32", param_dtype="fp32")
        for case in draw_cases(2 * num, seed, choices, jax.devices())
    ]
    return list(zip(layouts[::2], layouts[1::2], strict=True))


def _checked(
    model: Model, training: Layout, generation: Layout, num_tokens: int, seed: int
) -> PairChecked:
    devices = jax.devices()
    step = make_train_step(
        model, optax.adam(1e-2), training, devices=devices[: training.num_devices]
    )
    shards = training.batch_shards * training.microbatches
    batch = random_batch(model, shards * 2, 16, seed=seed)
    state, _ = step(step.init(seed), batch)
    slots = generation.batch_shards * generation.microbatches
    programs = Programs.of(
        model,
        generation,
        slots=slots,
        max_seq=32,
        page_size=4,
        chunk=8,
        devices=devices[: generation.num_devices],
    )
    engine = Engine(
        programs, *placed(programs, model, state, training), keep_logits=True
    )
    prompts = _prompts(batch["tokens"], slots + 1, num_tokens)
    largest, same = _compared(step, state, engine, prompts, num_tokens)
    state, _ = step(state, batch)
    engine.update(*placed(programs, model, state, training))
    again = _compared(step, state, engine, prompts[:1], num_tokens)
    return PairChecked(
        training=str(training),
        generation=str(generation_layout(generation)),
        largest=max(largest, again[0]),
        same_tokens=same and again[1],
    )


def _prompts(
    tokens: np.ndarray, num: int, num_tokens: int
) -> list[tuple[Request, list[int]]]:
    rows = np.asarray(tokens)
    found = []
    for at in range(num):
        prompt = rows[at % len(rows)][: 1 + 5 * at % 16].tolist()
        found.append((Request(tokens=tuple(prompt), max_tokens=num_tokens), prompt))
    return found


def _compared(
    step: TrainStep,
    state: TrainState,
    engine: Engine,
    prompts: list[tuple[Request, list[int]]],
    num_tokens: int,
) -> tuple[float, bool]:
    """The largest difference of a log-probability, and whether tokens are alike."""
    numbers = [engine.submit(request) for request, _ in prompts]
    new: dict[int, list[int]] = {number: [] for number in numbers}
    for token in engine.run():
        new[token.request].append(token.token)
    longest = max(len(prompt) for _, prompt in prompts) + num_tokens
    longest = -(-longest // 8) * 8  # What splits sequences splits them evenly.
    shards = step.layout.batch_shards
    window = np.zeros((-(-len(prompts) // shards) * shards, longest), np.int32)
    for row, (number, (_, prompt)) in enumerate(zip(numbers, prompts, strict=True)):
        whole = [*prompt, *new[number]]
        window[row, : len(whole)] = whole
    known = np.asarray(jax.nn.log_softmax(step.logits(state, window)))
    largest, same = 0.0, True
    for row, (number, (_, prompt)) in enumerate(zip(numbers, prompts, strict=True)):
        here = known[row, len(prompt) - 1 : len(prompt) - 1 + num_tokens]
        own = np.asarray(jax.nn.log_softmax(np.stack(engine.logits[number])))
        largest = max(largest, float(np.abs(own - here).max()))
        same &= bool((here.argmax(-1) == np.array(new[number])).all())
    return largest, same
