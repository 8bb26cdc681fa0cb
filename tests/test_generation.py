"""A model generates what the trainer computes, whatever the layout and the company."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar
from meshpar import Layout, make_train_step
from meshpar.data.tokenizer import ByteTokenizer
from meshpar.generation.agreement import sample
from meshpar.generation.engine import Engine, PageBook
from meshpar.generation.generate import make_engine, placed
from meshpar.generation.programs import Programs, generation_layout
from meshpar.generation.requests import Request
from meshpar.generation.sampling import Draws, Sampling, drawn
from meshpar.model.scope import Scope
from meshpar.model.token_cache import DeclaredCache
from meshpar.models import presets
from meshpar.recipes.loaded import OfRun
from meshpar.testing.generation import check_generation, draw_pairs
from tests.marks import slow
from tests.states import normal_values, with_parameters

ONE = Layout()
build = functools.cache(presets.build)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10] * 3, [11, 12], [3, 1, 2]]
SHORT = [11]
"""Whose one token takes a program of its own."""
NEW, WINDOW = 5, 32


@functools.cache
def trained(name, **sizes):
    """A model, and a step and a state of it on one device."""
    model = build(name, **sizes)
    step = make_train_step(model, optax.sgd(0.1), ONE, devices=jax.devices()[:1])
    return model, step, first_state(step)


def first_state(step, seed=0):
    """Parameters large enough to matter."""
    params = normal_values(step.state_shapes.params, seed=seed)
    return with_parameters(step, params)


def recomputed(step, state, prompts, num_tokens):
    """Likeliest tokens and their log-probabilities, the whole text for each token."""
    window = np.zeros((len(PROMPTS), WINDOW), np.int32)
    for row, prompt in zip(window, prompts, strict=False):
        row[: len(prompt)] = prompt
    logprobs = np.zeros((len(prompts), num_tokens))
    for new in range(num_tokens):
        known = np.asarray(jax.nn.log_softmax(step.logits(state, window)))
        for at, prompt in enumerate(prompts):
            here = known[at, len(prompt) + new - 1]
            window[at, len(prompt) + new] = here.argmax()
            logprobs[at, new] = here.max()
    ends = [slice(len(prompt), len(prompt) + num_tokens) for prompt in prompts]
    return [row[end].tolist() for row, end in zip(window, ends, strict=False)], logprobs


def generated(model, state, layout, *, prompts=PROMPTS, num_tokens=NEW, **options):
    layout = Layout.of(layout)
    return meshpar.generate(
        model,
        state,
        prompts,
        layout=layout,
        max_tokens=num_tokens,
        chunk=16,
        page_size=4,
        devices=jax.devices()[: layout.num_devices],
        **options,
    )


def check(found, tokens, logprobs):
    assert [one.tokens for one in found] == tokens
    np.testing.assert_allclose([one.logprobs for one in found], logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def known():
    _, step, state = trained("test")
    return recomputed(step, state, PROMPTS, NEW)


LATENT = (
    *(("layers", 2), ("dense_layers", 1), ("ffn", 64), ("shared_experts", 1)),
    *(("kv_heads", 0), ("q_lora_rank", 8), ("kv_lora_rank", 8)),
    *(("qk_nope_head_dim", 8), ("qk_rope_head_dim", 4), ("v_head_dim", 8)),
)
"""As DeepSeek-V3."""

FAST = ["stage=2,context=2,tensor=2,microbatches=2"]
SLOW = [
    *("data=1", "fsdp=2", "data=2,tensor=2", "stage=2,microbatches=2,context=2"),
    "tensor=4",
    "context=4",
    "stage=2,tensor=2,data=2,microbatches=2",
    "fsdp=2,context=2,tensor=2",
]


@pytest.mark.parametrize("layout", [*FAST, *(slow(one) for one in SLOW)])
def test_tokens_and_probabilities_are_those_of_the_whole_text(layout, known):
    model, _, state = trained("test")
    check(generated(model, state, layout), *known)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "layout"),
    [
        ("test", (("window", 5),), "tensor=2"),
        ("tiny-gpt2", (), "data=2"),
        ("tiny-moe", (), "expert=2,tensor=2"),
        ("tiny-gemma3", (("layers", 3), ("window", 4)), "tensor=2"),
        ("tiny-gemma3", (("window", 4),), "context=2"),
        ("tiny-moe", LATENT, "data=1"),
        ("tiny-moe", LATENT, "expert=2,context=2"),
    ],
)
def test_kinds_of_blocks_generate(name, sizes, layout):
    model, step, state = trained(name, **dict(sizes))
    known = recomputed(step, state, PROMPTS, NEW)
    check(generated(model, state, layout), *known)


def test_windows_keep_no_more_than_a_window():
    model, whole = build("test", window=5), build("test")
    options = {"slots": 2, "max_seq": 256, "page_size": 4, "chunk": 8}
    kept, of_whole = (
        Programs.from_model(one, ONE, devices=jax.devices()[:1], **options).plan
        for one in (model, whole)
    )
    # 5 tokens of the window and 8 of a chunk begin in any place of a page.
    assert kept.bytes_per_device() * 64 == of_whole.bytes_per_device() * 5


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Beside blocks without a window, and with 2 key/value heads copied.
        slow("tiny-gemma3", "tensor=4"),
        slow("test", "data=1"),
        slow("test", "tensor=2,context=2"),
    ],
)
def test_pages_of_a_window_are_written_again_and_again(name, layout):
    """The window's 5 tokens and a chunk's 4 are in 4 pages, of which text has 7."""
    model, step, state = trained(name, layers=2, window=5)
    layout, new = Layout.of(layout), 22
    prompts = [PROMPTS[0], SHORT] * layout.batch_shards
    devices = jax.devices()[: layout.num_devices]
    programs = Programs.from_model(
        model,
        layout,
        slots=len(prompts),
        max_seq=40,
        page_size=4,
        chunk=4,
        num_pages=9 // layout.context,
        devices=devices,
    )
    assert any(programs.plan.rings)
    engine = Engine(programs, *placed(programs, model, state))
    begun = noted_put_backs(engine)
    found = run(engine, [Request(tokens=one, max_tokens=new) for one in prompts])
    assert begun, "two texts of 25 tokens need 14 pages"
    tokens, logprobs = recomputed(step, state, prompts, new)
    assert [[token for token, _ in one] for one in found] == tokens
    np.testing.assert_allclose(
        [[logprob for _, logprob in one] for one in found], logprobs, atol=1e-5
    )


def noted_put_backs(engine):
    """The numbers of the requests that will have to begin anew, as they do."""
    begun = []
    put_back = engine._put_back
    engine._put_back = lambda one: (begun.append(one.number), put_back(one))
    return begun


@functools.cache
def programs_of_test():
    """Of one layer on one device, compiled once for all tests."""
    model, _, _ = trained("test", layers=1)
    options = {"slots": 2, "max_seq": 32, "page_size": 4, "chunk": 16}
    return Programs.from_model(model, devices=jax.devices()[:1], **options)


def engine_of(num_pages=None, **options):
    """An engine of those programs, which may use the first pages alone."""
    model, _, state = trained("test", layers=1)
    programs = programs_of_test()
    engine = Engine(programs, *placed(programs, model, state), **options)
    if num_pages is not None:
        engine._books = [PageBook(num_pages, programs.plan.page_size)]
    return engine


def run(engine, requests):
    numbers = [engine.submit(request) for request in requests]
    found = {number: [] for number in numbers}
    for token in engine.run():
        if token.token >= 0:
            found[token.request].append((token.token, token.logprob))
    return [found[number] for number in numbers]


def test_a_process_that_has_nothing_left_says_so_to_those_that_have():
    def as_if_run(engine, rows):
        counts = [0 if one is None else one.num_unwritten for one in rows]
        return list(engine._record(rows, counts, *np.zeros((2, len(rows)))))

    told = {"x": [], ".": []}
    for letter, digests in told.items():
        engine = engine_of()
        engine._decode = lambda tokens, letter=letter: letter * len(tokens)
        engine._agreement = SimpleNamespace(is_shared=True, check=digests.append)
        engine._advance = lambda rows, _, engine=engine: as_if_run(engine, rows)
        run(engine, [Request(tokens=[1, 2], max_tokens=3, stop=("x",))])
    early, late = told.values()
    assert len(early) < len(late)
    assert early[:-1] == late[: len(early) - 1]
    assert early[-1] != late[len(early) - 1]


REQUESTS = [
    Request(
        tokens=prompt,
        max_tokens=length,
        sampling=Sampling(temperature=heat, top_k=top_k, top_p=top_p, seed=seed),
    )
    for seed, (prompt, length, heat, top_k, top_p) in enumerate(
        [
            (PROMPTS[0], 9, 1.0, 0, 0.95),
            (PROMPTS[1], 3, 0.7, 5, 1.0),
            (SHORT, 12, 0.0, 0, 1.0),
            (PROMPTS[3], 6, 1.3, 0, 0.8),
            (PROMPTS[0], 4, 1.0, 0, 0.95),
        ]
    )
]


@pytest.fixture(scope="module")
def alone():
    engine = engine_of()
    return [run(engine, [request])[0] for request in REQUESTS]


def test_a_request_has_the_tokens_that_it_has_alone(alone):
    together = run(engine_of(), REQUESTS)
    for one, other in zip(together, alone, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        np.testing.assert_allclose(
            *([p for _, p in x] for x in (one, other)), atol=1e-5
        )
    first, fifth = (tuple(zip(*alone[at], strict=True))[0] for at in (0, 4))
    assert first[:4] != fifth, "another seed draws other tokens"


def test_prompts_of_one_length_are_read_together(alone):
    model, _, state = trained("test", layers=1)
    options = {"slots": 2, "max_seq": 32, "page_size": 4, "chunk": 32}
    programs = Programs.from_model(
        model, devices=jax.devices()[:1], unrolled=False, **options
    )
    engine = Engine(programs, *placed(programs, model, state))
    shapes, advance = [], engine._advance

    def noted(rows, num_tokens):
        shapes.append((sum(one is not None for one in rows), num_tokens))
        return advance(rows, num_tokens)

    engine._advance = noted
    pair = [REQUESTS[0], REQUESTS[3]]
    for found, wanted in zip(run(engine, pair), (alone[0], alone[3]), strict=True):
        assert [token for token, _ in found] == [token for token, _ in wanted]
        np.testing.assert_allclose(
            [logprob for _, logprob in found],
            [logprob for _, logprob in wanted],
            atol=1e-5,
        )
    assert [one for one in shapes if one[1] > 1] == [(2, 16)]


@pytest.mark.parametrize(
    ("num_tokens", "waiting", "rows"),
    [(64, 1, 1), (64, 3, 4), (64, 16, 8), (512, 16, 1), (16, 5, 8), (16, 16, 8)],
)
def test_rows_of_a_prefill_have_room_for_a_budget_of_tokens(num_tokens, waiting, rows):
    programs = programs_of("test", slots=12, max_seq=1024)
    assert programs.plan.prefill_tokens == 512
    assert programs.prefill_rows(num_tokens, waiting) == rows


@pytest.mark.parametrize("tokens, unrolled", [(1, False), (64, False), (10**6, True)])
def test_long_runs_have_programs_without_a_loop(tokens, unrolled):
    options = {"devices": jax.devices()[:1], "num_pages": 1}
    model, params = build("test"), trained("test")[2].params
    requests = [Request(tokens=[1], max_tokens=tokens)]
    found = make_engine(model, params, requests, ONE, **options)
    assert found.programs.unrolled == unrolled
    found = make_engine(model, params, requests, ONE, unrolled=False, **options)
    assert not found.programs.unrolled


def test_a_request_reads_nothing_that_was_in_its_pages_before(alone):
    engine = engine_of()
    engine._pools = jax.tree.map(lambda pool: pool * jnp.nan, engine._pools)
    for one, other in zip(run(engine, REQUESTS), alone, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]


@pytest.mark.parametrize(("num_pages", "waits"), [(5, False), (4, True)])
def test_a_request_that_finds_no_page_waits_and_goes_on(alone, num_pages, waits):
    """Two requests that run at once come to need 3 pages and 2."""
    engine = engine_of(num_pages=num_pages)
    begun = noted_put_backs(engine)
    together = run(engine, [REQUESTS[0], REQUESTS[2]])
    assert bool(begun) == waits
    for one, other in zip(together, (alone[0], alone[2]), strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]


def test_other_parameters_leave_nothing_of_the_old_ones():
    model, step, state = trained("test", layers=1)
    other = first_state(step, seed=1)
    engine = engine_of()
    number = engine.submit(Request(tokens=PROMPTS[0], max_tokens=6))
    found = [token.token for _ in range(3) for token in engine.step()]
    engine.update(*placed(engine.programs, model, other))
    found += [token.token for token in engine.run() if token.request == number]
    tokens, _ = recomputed(step, other, [PROMPTS[0] + found[:3]], 3)
    assert found[3:] == tokens[0]


def test_a_request_ends_at_a_token_and_at_a_text(monkeypatch):
    class Letters:
        def encode(self, text):
            return [ord(letter) - 64 for letter in text]

        def decode(self, tokens):
            return "".join(chr(64 + token) for token in tokens)

    model, _, state = trained("test", layers=1)
    shared = SimpleNamespace(from_model=lambda *given, **options: programs_of_test())
    monkeypatch.setattr("meshpar.generation.generate.Programs", shared)
    whole = generated(model, state, ONE, prompts=["ABC"], tokenizer=Letters())[0]
    assert whole.finish == "length"
    assert whole.text == Letters().decode(whole.tokens)
    stop = whole.text[2:4]
    found = generated(
        model, state, ONE, prompts=["ABC"], tokenizer=Letters(), stop=[stop]
    )[0]
    assert found.finish == "stop"
    assert found.text == whole.text[: whole.text.index(stop)]
    for token in (whole.tokens[0], whole.tokens[3]):
        at = whole.tokens.index(token)
        found = generated(model, state, ONE, prompts=[[1, 2, 3]], stop_tokens=[token])[
            0
        ]
        assert (found.finish, found.tokens) == ("stop", whole.tokens[:at])


def test_nothing_is_kept_of_a_request_that_is_forgotten(refuses):
    engine = engine_of(decode=str, keep_logits=True)
    asked = [Request(tokens=(token,), max_tokens=2) for token in (1, 3)]
    for request in asked:
        engine.submit(request)
    with refuses("generation.unfinished_request", "request 1"):
        engine.forget(1)
    list(engine.run())
    engine.forget(0)
    assert engine.text(0) == "" and list(engine.logits) == [1]
    assert engine.text(1)
    engine.forget(7)  # never was one


def test_a_sample_is_of_what_a_process_has_and_passes_over_files():
    class File:
        shape, dtype = (4, 4), np.dtype("float32")

        def __getitem__(self, part):
            raise AssertionError("each process reads its own parts")

    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    other = values.copy()
    other[1, 3] = 0
    assert sample({"a": values, "b": File()}) == sample({"a": jnp.asarray(values)})
    assert sample({"a": values}) != sample({"a": other})


LOGITS = np.random.default_rng(0).normal(size=(40,)).astype(np.float32) * 2


def kept_by_numpy(sampling):
    """Which tokens may be drawn, by sorting."""
    scaled = LOGITS / sampling.temperature
    order = np.argsort(-scaled)
    kept = np.ones(len(LOGITS), bool)
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    chances = np.exp(scaled - scaled.max()) * kept
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    kept[order[before >= sampling.top_p]] = False
    return kept & (chances >= sampling.min_p * chances.max())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.5, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.2, top_k=12, top_p=0.9, min_p=0.05),
        Sampling(temperature=1.0),
    ],
    ids=str,
)
def test_draws_are_of_the_distribution_that_is_asked_for(sampling):
    num = 4000
    rows = [dataclasses.replace(sampling, seed=seed) for seed in range(num)]
    logits = jnp.broadcast_to(LOGITS, (num, len(LOGITS)))
    tokens, logprobs = jax.jit(drawn)(
        logits, Draws.from_rows(rows), jnp.zeros(num, int)
    )
    kept = kept_by_numpy(sampling)
    chances = np.exp(LOGITS / sampling.temperature) * kept
    chances /= chances.sum()
    if not sampling.truncates:
        shorter = jax.jit(functools.partial(drawn, truncated=False))
        again, _ = shorter(logits, Draws.from_rows(rows), jnp.zeros(num, int))
        np.testing.assert_array_equal(again, tokens)
    found = np.bincount(np.asarray(tokens), minlength=len(LOGITS)) / num
    assert not found[~kept].any()
    np.testing.assert_allclose(found, chances, atol=4 / np.sqrt(num) / 2)
    np.testing.assert_allclose(
        logprobs, np.asarray(jax.nn.log_softmax(LOGITS))[tokens], atol=1e-5
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1, top_p=1e-50),
        Sampling(temperature=1, top_p=1e-38),
        Sampling(temperature=2e-38),
        Sampling(temperature=1e-42),
        Sampling(temperature=2e-38, top_k=2**40, top_p=0.5),
    ],
    ids=str,
)
def test_extremes_of_fp32_take_the_likeliest(sampling):
    logits = jnp.asarray([LOGITS, -LOGITS])
    found, _ = jax.jit(drawn)(
        logits, Draws.from_rows([sampling] * 2), jnp.zeros(2, int)
    )
    assert found.tolist() == [LOGITS.argmax(), LOGITS.argmin()]


def test_every_place_and_every_seed_has_a_draw_of_its_own():
    """Of 64 draws of 40 tokens that are all as likely, 32 are different on average."""
    num, logits = 64, jnp.zeros((64, 40))
    hot, places = Sampling(temperature=1.0), jnp.arange(num)
    of_one = Draws.from_rows([hot] * num)
    of_seeds = Draws.from_rows(
        [dataclasses.replace(hot, seed=seed) for seed in range(num)]
    )
    draw = jax.jit(drawn)
    for draws, positions in ((of_one, places), (of_seeds, jnp.zeros(num, int))):
        tokens, _ = draw(logits, draws, positions)
        assert len(set(tokens.tolist())) > 24
        np.testing.assert_array_equal(draw(logits, draws, positions)[0], tokens)


def test_logits_that_are_no_numbers_give_no_token():
    rows = [Sampling(temperature=1), Sampling(temperature=1, top_k=3, min_p=0.5)]
    logits = np.stack([np.where(np.arange(len(LOGITS)) == 3, np.nan, LOGITS)] * 2)
    found, _ = jax.jit(drawn)(logits, Draws.from_rows(rows), jnp.zeros(2, int))
    assert found.tolist() == [len(LOGITS)] * 2


def of_tiny(**options):
    layout, devices = Layout(tensor=2, data=2), jax.devices()[:4]
    model = build("tiny", layers=2)
    return Programs.from_model(
        model, layout, slots=4, max_seq=64, devices=devices, **options
    )


@pytest.fixture(scope="module")
def decode():
    return meshpar.audit(of_tiny(num_pages=400), "decode")


def test_a_decode_step_sends_two_activations_a_layer_and_scalars(decode):
    layers, rows, embed = 2, 2, 128
    large = [
        (row.collective.kind, row.collective.executions)
        for row in decode.rows
        if row.collective.payload_bytes >= 4 * rows * embed
    ]
    # Attention's and the MLP's of each layer, and the embedding's rows.
    assert large == [("all-reduce", 1)] * (2 * layers + 1)
    assert not [row for row in decode.rows if row.surprise]
    assert not decode.hazards


def test_the_cache_has_the_bytes_of_its_formula_and_is_written_in_place(decode):
    layers, tokens, kv_heads, size, arrays = 2, 2 * 64, 2, 16, 2
    of_formula = layers * tokens * kv_heads * size * arrays * 4
    assert of_tiny().plan.bytes_per_device() == of_formula
    of_400 = of_formula * 400 // 8
    assert decode.memory.alias_bytes == of_400
    # Less than a copy of the keys of one layer.
    assert decode.memory.temp_bytes < of_400 // (layers * arrays)


@pytest.mark.slow
def test_temporary_memory_is_that_of_a_small_cache(decode):
    memory = of_tiny().audit_subject("decode").lower().compile().memory_analysis()
    assert decode.memory.temp_bytes <= memory.temp_size_in_bytes + 1024


def test_a_layout_says_that_fewer_key_heads_than_devices_are_copied():
    programs = programs_of("test", "tensor=4")
    assert programs.notes[0].startswith("2 key/value heads do not divide over tensor=4")


def test_what_is_for_training_alone_is_left_out_of_a_layout():
    text = "data=2,stage=2,microbatches=4,schedule=gpipe,remat=full"
    assert str(generation_layout(text)) == (
        "data=2,stage=2,microbatches=4,fsdp_gather=microbatch"
    )


def programs_of(name, layout=ONE, **options):
    options = {"slots": 1, "max_seq": 8, **options}
    devices = jax.devices()[: Layout.of(layout).num_devices]
    return Programs.from_model(build(name), layout, devices=devices, **options)


def submitted(request, **options):
    """A request to an engine that is given no parameters, as nothing runs."""
    options = {"slots": 2, "max_seq": 32, "page_size": 4, **options}
    Engine(programs_of("test", **options), {}, {}).submit(request)


BYTES = OfRun(ByteTokenizer())


def asked(prompts, **options):
    devices = jax.devices()[:1]
    return meshpar.generate(build("test"), {}, prompts, devices=devices, **options)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: programs_of("test", "data=2", slots=3),
            ("generation.indivisible_slots", "slots=3", 2),
        ),
        (
            lambda: programs_of("tiny-vit"),
            ("batch.missing_array", "batch['images']", "'tokens'"),
        ),
        (
            lambda: programs_of("tiny-moe-capacity"),
            ("generation.capacity_drops_tokens", "capacity_factor=1.25"),
        ),
        (
            lambda: submitted(Request(tokens=[1] * 30, max_tokens=3)),
            ("generation.request_too_long", 30, "max_tokens=3", 33, "max_seq=32"),
        ),
        (
            lambda: submitted(Request(tokens=[1] * 9), num_pages=2),
            ("generation.request_too_long", 9, "max_tokens=64", 73),
        ),
        (lambda: Request(tokens=[]), ("generation.empty_prompt",)),
        (
            lambda: Request(tokens=[1.7, 2.9]),
            ("generation.tokens_not_whole_numbers", "tokens=[1.7, 2.9]"),
        ),
        (
            lambda: Request(tokens=[1], stop_tokens=[1.5]),
            ("generation.tokens_not_whole_numbers", "stop_tokens=[1.5]"),
        ),
        (
            lambda: Request(tokens=[1], stop=[5]),
            ("generation.stop_not_texts", "stop=[5]"),
        ),
        (lambda: asked([[1.7]]), ("generation.prompt_not_tokens", [1.7])),
        (
            lambda: asked([[1]], slots=0),
            ("value.not_whole_number", "slots=0", 1),
        ),
        (
            lambda: asked(["to"], stop="END", tokenizer=BYTES),
            ("generation.stop_not_list", "stop='END'"),
        ),
        (
            lambda: asked([[1]], stop_tokens=5),
            ("generation.stop_not_list", "stop_tokens=5", []),
        ),
        (
            lambda: asked([[1]], stop=None),
            ("generation.stop_not_list", "stop=None", []),
        ),
        (
            lambda: asked([[1]], start_tokens=0),
            ("generation.start_tokens_not_list", "start_tokens=0"),
        ),
        (
            lambda: Sampling(temperature=-1),
            ("generation.temperature_out_of_range", "temperature=-1"),
        ),
        (lambda: Sampling(top_p=0), ("generation.top_p_out_of_range", "top_p=0")),
        (lambda: Sampling(seed=-1), ("value.not_whole_number", "seed=-1")),
        (
            lambda: meshpar.generate(build("test"), {}, "abc"),
            ("generation.prompts_not_list", "'abc'"),
        ),
        (
            lambda: meshpar.generate(build("test"), {}, ["abc"]),
            ("generation.prompt_without_tokenizer", "'abc'", "tokenizer="),
        ),
        (lambda: generated(build("test"), {}, ONE), ("model.missing_parameter",)),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, refusal, refuses):
    with refuses(*refusal):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10, 5))
def test_random_pairs_of_layouts_agree(first):
    """Before and after a weight update."""
    model = build("tiny")
    pairs = draw_pairs(model, 10)[first : first + 5]
    assert len(check_generation(model, pairs, seed=first)) == 5


BF16_BOUND = 0.05
"""Of a log-probability: 2**-8 relative in logits of a few units."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=1", "expert=2,tensor=2"])
def test_bf16_generates_what_bf16_trains(layout):
    layout = Layout.parse(f"{layout},precision=bf16,param_dtype=bf16")
    check_generation(build("tiny-moe"), [(layout, layout)], bound=BF16_BOUND)


def test_routers_of_a_bf16_layout_stay_in_fp32():
    model = build("tiny-moe", layers=1)
    layout = Layout.parse("precision=bf16,param_dtype=bf16")
    step = make_train_step(model, optax.sgd(0.1), layout, devices=jax.devices()[:1])
    programs = Programs.from_model(
        model, layout, slots=1, max_seq=8, devices=jax.devices()[:1]
    )
    params, _ = placed(programs, model, first_state(step), layout)
    flat = jax.tree.leaves_with_path(params)
    routers = [one for path, one in flat if "scores" in jax.tree_util.keystr(path)]
    assert routers and all(one.dtype == jnp.float32 for one in routers)


def test_noise_of_whole_sequences_is_refused_token_by_token(refuses):
    cache = DeclaredCache(max_seq=8, positions=jnp.zeros((2, 1), jnp.int32))
    scope = Scope(cache=cache, random=jax.random.key(0), examples=jnp.arange(2))
    with refuses("model.normal_while_generating", "'noise'"):
        scope.normal((2, 1, 4), "noise")


def test_a_model_that_looks_at_the_token_before_is_refused(refuses):
    model = build("test")
    [group] = model.groups

    def block(params, x, scope):
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return group.block(params, x + before, scope)

    shifted = dataclasses.replace(
        model, groups=(dataclasses.replace(group, block=block),)
    )
    with refuses("generation.joined_tokens"):
        Programs.from_model(shifted, ONE, slots=1, max_seq=8, devices=jax.devices()[:1])
