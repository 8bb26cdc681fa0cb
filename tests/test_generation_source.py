"""An encoder-decoder writes what its trainer computes, its source read once."""

import functools

import jax
import numpy as np
import optax
import pytest

import meshpar
from meshpar import Layout, make_train_step
from meshpar.generation.engine import Engine
from meshpar.generation.generate import placed
from meshpar.generation.programs import Programs
from meshpar.generation.requests import Request
from meshpar.models.presets import build
from meshpar.testing.generation import check_generation
from tests.marks import slow
from tests.states import normal_values, with_parameters

SOURCES = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]
NEW = 5
SIZES = dict(embed=16, heads=4, ffn=32, vocab=32, max_seq=24, init_std=0.3)
LEARNED = tuple(SIZES.items())
T5 = (
    *SIZES.items(),
    *(("relative_buckets", 8), ("relative_distance", 6), ("scaled_scores", False)),
    *(("activation", "relu"), ("mlp_bias", False), ("scaled_head", True)),
)
"""As the first T5: distances beyond the last bucket's are among those below."""


def single():
    return jax.devices()[:1]


@functools.cache
def trained(sizes):
    model = build("tiny-t5", **dict(sizes))
    step = make_train_step(model, optax.sgd(0.1), "data=1", devices=single())
    return model, step, first_state(step)


def first_state(step, seed=3):
    """Parameters large enough to matter, which no program draws."""
    return with_parameters(step, normal_values(step.state_shapes.params, seed=seed))


@functools.cache
def recomputed(sizes, first=0, num_tokens=NEW):
    """Likeliest tokens and their log-probabilities, all of both texts each time."""
    _, step, state = trained(sizes)
    longest = max(map(len, SOURCES))
    batch = {
        "source_tokens": np.zeros((len(SOURCES), longest), np.int32),
        "source_mask": np.zeros((len(SOURCES), longest), bool),
        "target_tokens": np.full((len(SOURCES), num_tokens + 1), first, np.int32),
    }
    for at, source in enumerate(SOURCES):
        batch["source_tokens"][at, : len(source)] = source
        batch["source_mask"][at, : len(source)] = True
    logprobs = np.zeros((len(SOURCES), num_tokens))
    for at in range(num_tokens):
        known = np.asarray(jax.nn.log_softmax(step.logits(state, batch)))[:, at]
        batch["target_tokens"][:, at + 1] = known.argmax(-1)
        logprobs[:, at] = known.max(-1)
    return batch["target_tokens"][:, 1:].tolist(), logprobs


def generated(sizes, layout, **options):
    model, _, state = trained(sizes)
    devices = jax.devices()[: Layout.of(layout).num_devices]
    options = {"max_tokens": NEW, "page_size": 4, "devices": devices, **options}
    return meshpar.generate(model, state, SOURCES, layout=layout, **options)


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        slow(T5, "data=1"),
        slow(LEARNED, "data=2"),
        slow(T5, "tensor=2"),
        slow(T5, "data=2"),
        slow(T5, "fsdp=2"),
        slow(LEARNED, "tensor=2"),
        slow(LEARNED, "data=2,fsdp=2,tensor=2"),
    ],
)
def test_tokens_and_probabilities_are_those_of_the_whole_texts(sizes, layout):
    tokens, logprobs = recomputed(sizes)
    assert len(set(map(tuple, tokens))) > 2, "sources make a difference"
    found = generated(sizes, layout)
    assert [one.tokens for one in found] == tokens
    np.testing.assert_allclose([one.logprobs for one in found], logprobs, atol=1e-5)


@pytest.mark.slow
def test_requests_that_share_slots_and_pages_have_the_tokens_that_they_have_alone():
    """Two slots for four sources, too few pages, and other weights on the way."""
    model, step, state = trained(T5)
    programs = Programs.from_model(
        model,
        slots=2,
        max_seq=12,
        max_source=12,
        page_size=2,
        num_pages=4,
        chunk=4,
        devices=single(),
    )
    engine = Engine(programs, *placed(programs, model, first_state(step, seed=1)))
    requests = [Request(tokens=[0], source=one, max_tokens=NEW) for one in SOURCES]
    found = {engine.submit(request): [] for request in requests}
    begun = []
    put_back = engine._put_back
    engine._put_back = lambda one: (begun.append(one.number), put_back(one))
    engine.step()
    engine.update(*placed(programs, model, state))
    # What the first weights have drawn stays; all others are the second ones'.
    drawn = {one.number: list(one.new) for one in engine._waiting}
    for token in engine.run():
        found[token.request].append(token.token)
    assert len(begun) > 2, "a request had to begin anew for want of pages"
    tokens, _ = recomputed(T5)
    for number, wanted in enumerate(tokens):
        if not drawn.get(number):
            assert found[number] == wanted
    assert sum(not one for one in drawn.values()) >= 2


def test_what_is_kept_of_a_source_has_the_bytes_of_its_formula():
    model = build("tiny-t5", **dict(LEARNED))
    options = {"slots": 4, "max_seq": 8, "page_size": 4, "devices": jax.devices()[:2]}
    plan = Programs.from_model(model, "tensor=2", max_source=10, **options).plan
    layers, heads, size, arrays = 2, 4 // 2, 4, 2
    source = layers * (4 * 12) * heads * size * arrays * 4
    target = layers * (4 * 8) * heads * size * arrays * 4
    assert plan.bytes_per_device() == source + target


def asked(layout, **options):
    """What is refused before parameters are looked at."""
    devices = jax.devices()[: Layout.of(layout).num_devices]
    model = build("tiny-t5", **dict(LEARNED))
    meshpar.generate(model, {}, SOURCES, layout=layout, devices=devices, **options)


def programs_of(preset, sizes=(), **options):
    options = {"slots": 1, "max_seq": 8, "devices": single(), **options}
    return Programs.from_model(build(preset, **dict(sizes)), **options)


def submitted(**request):
    """A request to an engine that is given no parameters, as nothing runs."""
    engine = Engine(programs_of("tiny-t5", LEARNED, max_source=8), {}, {})
    engine.submit(Request(**request, max_tokens=1))


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: asked("stage=2"), ("generation.split_encoder_decoder", "stage=2")),
        (
            lambda: asked("context=2"),
            ("generation.split_encoder_decoder", "context=2"),
        ),
        (
            lambda: asked("data=1", start_tokens=[]),
            ("generation.no_start_tokens", "start_tokens=[]"),
        ),
        (
            lambda: submitted(tokens=[32], source=[1]),
            ("generation.token_outside_vocabulary", "token 32", 0),
        ),
        (
            lambda: submitted(tokens=[0]),
            ("generation.missing_source", 0, "max_source=8"),
        ),
        (
            lambda: submitted(tokens=[0], source=[1] * 9),
            ("generation.source_too_long", 9, "max_source=8"),
        ),
        (
            lambda: meshpar.generate(build("test"), {}, [[1]], start_tokens=[0]),
            ("generation.start_tokens_without_encoder", "start_tokens=[0]"),
        ),
        (
            lambda: programs_of("test", max_source=4),
            ("generation.max_source_mismatch", "max_source=4", 0),
        ),
        (
            lambda: programs_of("tiny-t5", LEARNED, max_source=25),
            ("batch.sequence_too_long", "source", 25, "max_seq=24"),
        ),
        (
            lambda: check_generation(build("tiny-t5", **dict(LEARNED))),
            ("testing.decoder_of_source",),
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, refusal, refuses):
    with refuses(*refusal):
        make()
