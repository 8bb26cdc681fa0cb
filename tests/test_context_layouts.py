"""Layouts that split the sequence train the model that one device trains."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import (
    Layout,
    RuleError,
    Scope,
    default_rules,
    from_nnx,
    lint,
    make_train_step,
)
from meshpar.checks.sequences import check_token_wise
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import forward, loss
from meshpar.models.inputs import language_inputs
from meshpar.models.layers.attention import Attention
from meshpar.models.layers.rope import rope_frequencies
from meshpar.models.llama import RESIDUAL, LlamaConfig, llama
from meshpar.models.moe import MoEConfig, moe
from meshpar.models.presets import build
from meshpar.parallel.context.attention import trade_tokens_for_heads
from meshpar.schedules import SCHEDULES
from meshpar.testing.equivalence import check_layouts
from meshpar.trace.token_mixing import mixes_tokens
from tests.covering import every_pair
from tests.marks import slow
from tests.pipelined import assert_close
from tests.schedule_cases import SYNCHRONOUS
from tests.states import normal_values, with_parameters
from tests.zoo.denoising import DENOISING
from tests.zoo.sequence import SEQUENCE
from tests.zoo.vision import VIT
from tests.zoo.waves import WAVES

VOCAB, SEQ = 32, 24
CUTS = (0, 5, 12, 20)
"""Where documents of the packed example begin, and padding after the last."""


@functools.cache
def model(kv_heads=2, window=0, layers=2):
    return llama(
        LlamaConfig(
            layers=layers,
            embed=32,
            heads=8,
            kv_heads=kv_heads,
            ffn=32,
            vocab=VOCAB,
            window=window,
        )
    )


class Ends(nnx.Module):
    """A table in and out."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, 16, rngs=rngs)

    def embed(self, batch, scope):
        return self.table(batch["tokens"])

    def head(self, x, batch, scope):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            self.table.attend(x), batch["targets"]
        )
        return (losses * batch["weights"]).sum(), batch["weights"].sum()


class AttentionAlone(nnx.Module):
    """A block without norms and MLP: fewer operations to trace and compile."""

    def __init__(self, rngs):
        sizes = dict(heads=8, kv_heads=2, head_dim=4, init_std=0.3, out_std=0.3)
        turns = rope_frequencies(4, 10_000.0)
        self.attention = Attention(16, **sizes, frequencies=turns, rngs=rngs)

    def __call__(self, x, scope):
        return scope.constrain(x + self.attention(x, scope), RESIDUAL)


@functools.cache
def attention_alone():
    return from_nnx(
        ends=Ends,
        block=AttentionAlone,
        num_layers=2,
        inputs=language_inputs(VOCAB),
        per_token=True,
    )


@functools.cache
def latent_model():
    """Latent attention, as in DeepSeek-V3, and two experts, without their losses."""
    latent = dict(qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, kv_lora_rank=8)
    free = dict(balance_coefficient=0.0, z_coefficient=0.0)
    experts = dict(experts=2, top_k=1, expert_ffn=8)
    return moe(
        MoEConfig(layers=1, embed=16, heads=2, vocab=VOCAB, **latent, **free, **experts)
    )


def packed_batch(seq=SEQ):
    """One example of documents and padding, one all padding, two of one document."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCAB, (2, 4, seq), np.int32)
    segments = np.zeros((4, seq), np.int32)
    segments[0] = np.searchsorted(CUTS, np.arange(seq), side="right")
    segments[0, CUTS[-1] :] = -1
    segments[1] = -1
    weights = (segments >= 0).astype(np.float32)
    return dict(tokens=tokens, targets=targets, weights=weights, segment_ids=segments)


def step_of(layout, made=None, **sizes):
    layout, made = Layout.parse(layout), made or model(**sizes)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(made, optax.sgd(0.1), layout, devices=devices)


@functools.cache
def params_of(made):
    return normal_values(jax.eval_shape(made.init, 0))


def state_of(step, made):
    """A first state of those values; stages have the layers in their own order."""
    return with_parameters(step, params_of(made))


def rows_of_documents():
    """Each document of the packed batch by itself, at the start of its own row."""
    batch = packed_batch()
    del batch["segment_ids"]
    cut = [(0, slice(*pair)) for pair in itertools.pairwise(CUTS)]
    documents = [*cut, (2, slice(SEQ)), (3, slice(SEQ))]
    found = {
        name: np.zeros((len(documents), SEQ), x.dtype) for name, x in batch.items()
    }
    for row, (example, places) in enumerate(documents):
        for name, x in batch.items():
            document = x[example, places]
            found[name][row, : len(document)] = document
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (attention_alone, "fsdp=2,context=2"),
        (attention_alone, "stage=2,context=2,microbatches=2,attention=ulysses"),
        (model, "fsdp=2,context=2,remat=full"),
        (model, "stage=2,context=2,microbatches=2"),
        (model, "stage=2,context=2,microbatches=2,attention=ulysses"),
    ],
)
def test_packed_documents_have_loss_and_gradients_of_each_by_itself(make, layout):
    """On one device, where a document has no segments and attention another code."""
    made = make()
    step = step_of(layout, made)
    value, gradients = step.loss_and_gradients(state_of(step, made), packed_batch())
    wanted, wanted_gradients = loss_of_documents(made)
    assert float(value) == pytest.approx(wanted, rel=1e-5)
    assert_close(step.in_layer_order(gradients), wanted_gradients)


@functools.cache
def loss_of_documents(made):
    """Loss and gradients of one device."""
    batch = rows_of_documents()
    run = jax.jit(jax.value_and_grad(lambda params: loss(made, params, batch)))
    value, gradients = run(params_of(made))
    return float(value), jax.device_get(gradients)


FEW = [
    "fsdp=2,context=2,tensor=2,sequence_parallel=true,attention=allgather,remat=full",
    "stage=2,context=2,tensor=2,microbatches=2",
    "context=4,attention=ulysses:2+ring:2",
]


@pytest.mark.slow
def test_a_layout_trains_as_one_device_does():
    assert check_layouts(model(), packed_batch(), FEW).ok


MATRIX = [
    f"context={size},attention={method}"
    for size in (2, 4, 8)
    for method in ("ring", "allgather", "ulysses")
] + [
    "context=4,attention=ulysses:2+ring:2",
    "context=8,attention=ulysses:2+ring:4",
    "context=8,attention=ulysses:4+ring:2",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kv_heads", "window", "packed"),
    every_pair(MATRIX, (1, 4, 8), (0, 5), (False, True)),
)
def test_every_method_trains_as_one_device_does(layout, kv_heads, window, packed):
    batch = packed_batch()
    if not packed:
        del batch["segment_ids"]
    assert check_layouts(model(kv_heads, window), batch, [layout]).ok


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_it_composes_with_every_schedule(schedule, method):
    chunks = SCHEDULES[schedule].default_chunks
    line = f"stage=2,context=2,schedule={schedule},chunks={chunks},microbatches=4"
    batch = {name: np.concatenate([x, x]) for name, x in packed_batch().items()}
    layouts = [f"{line},attention={method}"]
    assert check_layouts(model(layers=4), batch, layouts).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "data=2,context=2,remat=none",
        "fsdp=2,context=2,zero=2,remat=full",
        "fsdp=2,context=2,zero=2,remat=dots",
        "data=2,context=2,zero=1,remat=selective",
        "fsdp=2,context=2,tensor=2,precision=bf16,remat=none",
        "fsdp=2,context=2,tensor=2,precision=bf16,remat=selective",
        "fsdp=2,context=2,microbatches=2,fsdp_gather=microbatch,remat=full",
        "fsdp=2,context=2,microbatches=2,fsdp_gather=microbatch,remat=dots",
        "context=4,tensor=2,sequence_parallel=true,remat=none",
        "context=4,tensor=2,sequence_parallel=true,remat=full",
    ],
)
def test_it_composes_with_the_rest(layout):
    assert check_layouts(model(), packed_batch(), [layout]).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "seq"), [*zip(MATRIX, itertools.cycle([9, 23]), strict=False)]
)
def test_sequences_that_do_not_divide_are_padded(layout, seq):
    batch = {name: x[:, :seq] for name, x in packed_batch().items()}
    assert check_layouts(model(), batch, [layout]).ok


@pytest.mark.parametrize(
    "layout",
    [
        "context=4",
        slow("context=4,attention=allgather"),
        slow("context=4,attention=ulysses"),
        slow("context=2,stage=2,microbatches=1"),
    ],
)
def test_a_token_changes_the_later_ones_of_its_document_alone(layout):
    """Of a sequence of 22, which divides into no 8 chunks, in its own order."""
    made, batch = model(layers=2 if "stage" in layout else 1), packed_batch(seq=22)
    step = step_of(layout, made)
    state = state_of(step, made)
    batch = {name: batch[name] for name in ("tokens", "segment_ids")}
    before = np.asarray(step.logits(state, batch))
    wanted = plain_logits(made)(params_of(made), batch)
    np.testing.assert_allclose(before, wanted, rtol=1e-5, atol=2e-6)
    changed = batch["tokens"].copy()
    at = CUTS[1] + 2  # in the second document
    changed[0, at] = (changed[0, at] + 1) % VOCAB
    after = np.asarray(step.logits(state, {**batch, "tokens": changed}))
    moved = np.argwhere((before != after).any(-1)).tolist()
    assert moved == [[0, place] for place in range(at, CUTS[2])]


@functools.cache
def plain_logits(made):
    """(params, batch) -> logits on one device."""

    @jax.jit
    def run(params, batch):
        x = forward(made, params, batch)
        return made.logits(made.split(params)[0], x, Scope(batch=batch))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("made", [model(), latent_model()], ids=["llama", "latent"])
def test_packed_documents_have_the_loss_of_each_by_itself(made):
    """By itself a document has no segments, and attention another code."""
    step, alone = step_of("context=2", made), step_of("data=1", made)
    state, whole = step.init(0), alone.init(0)
    batch = packed_batch()
    evaluation = step.evaluate(state, batch)
    found = evaluation["loss_sum"]
    counted = evaluation["weight_sum"]
    assert counted == batch["weights"].sum()
    total = 0.0
    rows = [(0, slice(*pair)) for pair in itertools.pairwise(CUTS)]
    for row, places in [*rows, (2, slice(SEQ)), (3, slice(SEQ))]:
        document = {name: batch[name][row : row + 1, places] for name in batch}
        del document["segment_ids"]
        total += float(alone.evaluate(whole, document)["loss_sum"])
    np.testing.assert_allclose(found, total, rtol=1e-5)


@pytest.mark.slow
def test_logits_are_in_the_order_of_the_sequence():
    tokens = packed_batch(seq=22)["tokens"]  # 22 divides into no 4 chunks
    wanted = step_of("data=1")
    found = step_of("context=2")
    np.testing.assert_allclose(
        np.asarray(found.logits(found.init(0), tokens)),
        np.asarray(wanted.logits(wanted.init(0), tokens)),
        atol=2e-6,
    )


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        (SEQUENCE, ("model.joins_tokens", "pad", "zoo/sequence.py", "context=1")),
        (WAVES, ("model.joins_tokens", "matmul", "zoo/waves.py")),
        (DENOISING, ("model.key_of_shared_tokens", "context")),
        (VIT, ("model.no_sequence_input", "'seq'", "context=1")),
    ],
)
def test_a_model_that_mixes_tokens_by_itself_is_refused_by_name(
    refuses, entry, refusal
):
    with refuses(*refusal):
        check_token_wise(entry.model(2))


def test_positions_counted_from_the_first_token_at_hand_are_refused(refuses):
    made = model()

    def embed(params, batch, scope):
        x = made.embed(params, batch, scope)
        return x + jax.numpy.arange(x.shape[1])[:, None] / 100

    counted = type(made)(**{**vars(made), "embed": embed, "per_token": False})
    with refuses("model.joins_tokens", "scope.positions"):
        check_token_wise(counted)


def by_the_mean(made, params, x, batch, scope):
    """A mean over the tokens at hand."""
    loss, weight = made.head(params, x, batch, scope)
    return loss / x.shape[1], weight


def by_the_norm(made, params, x, batch, scope):
    """A term without tokens."""
    loss, weight = made.head(params, x, batch, scope)
    return loss + jax.numpy.sum(params["token_embed"] ** 2), weight


def by_examples(made, params, x, batch, scope):
    """A weight without tokens."""
    return made.head(params, x, batch, scope)[0], jax.numpy.float32(x.shape[0])


def with_head(head):
    made = model()
    head = functools.partial(head, made)
    return type(made)(**{**vars(made), "head": head})


@pytest.mark.parametrize(
    ("head", "values"),
    [
        (by_the_mean, ("scope.seq_length",)),
        (by_the_norm, ("add",)),
        (by_examples, ("scope.sequence_sum",)),
    ],
)
def test_what_each_device_would_count_once_is_refused_by_name(refuses, head, values):
    with refuses("model.joins_tokens", *values):
        check_token_wise(with_head(head))


def test_sums_of_tokens_by_the_length_of_the_sequence_are_taken():
    def head(made, params, x, batch, scope):
        loss, weight = made.head(params, x, batch, scope)
        return 0.0 + loss / scope.seq_length(x.shape[1]), weight

    check_token_wise(with_head(head))


def test_inputs_that_a_batch_may_have_are_traced_too(refuses):
    made = model()

    def embed(params, batch, scope):
        x = made.embed(params, batch, scope)
        if "segment_ids" in batch:
            x = x + jax.numpy.cumsum(batch["segment_ids"], axis=1)[..., None]
        return x

    with refuses("model.joins_tokens", "cumsum"):
        check_token_wise(type(made)(**{**vars(made), "embed": embed}))


def test_sequences_of_one_length_can_be_split():
    made = model()
    inputs = {name: replace(x, shape=(None, SEQ)) for name, x in made.inputs.items()}
    check_token_wise(type(made)(**{**vars(made), "inputs": inputs}))


def test_dropout_of_an_array_without_tokens_is_refused(refuses):
    made = model()

    def embed(params, batch, scope):
        x = made.embed(params, batch, scope)
        return x + scope.dropout(x[:, :1].repeat(5, 1), 0.5, "few")[:, :1]

    with refuses("model.wrong_number_of_tokens", "scope.dropout('few')", 5, 2):
        check_token_wise(type(made)(**{**vars(made), "embed": embed}))


def until_a_token(x):
    return jax.lax.while_loop(lambda x: x.max() < 5, lambda x: x + 1, x)


def with_all_beside_each(x):
    total = x.sum(1)
    return jax.lax.map(lambda one: one + total, x.swapaxes(0, 1))


def from_one(x):
    return jax.lax.fori_loop(0, 3, lambda _, total: total + x.sum(), 1.0)


def from_zero(x):
    return jax.lax.fori_loop(0, 3, lambda _, total: total + x.sum(), 0.0)


def of_either(x):
    many = jax.numpy.ones(()) > 2
    return jax.lax.cond(many, lambda x: x.sum(), lambda x: 7.0, x)


def from_how_many(x):
    first = jax.numpy.full(x.shape, float(x.shape[1]))
    return jax.lax.fori_loop(0, 3, lambda _, y: x + y, first).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (until_a_token, "over the sequence|a loop that tokens end"),
        (with_all_beside_each, "of a sum over tokens|beside each token"),
        (from_one, "each device has alike, which would count once"),
        (of_either, "each device has alike, which would count once"),
    ],
)
def test_loops_that_join_tokens_are_found(function, message):
    x = jax.ShapeDtypeStruct((3, 8, 4), np.float32)
    found = mixes_tokens(lambda tokens: function(*tokens), 8, [(x, 1)])
    assert re.search(message, found)


def test_a_loop_that_starts_at_how_many_tokens_are_at_hand_is_found():
    few, many = (jax.ShapeDtypeStruct((3, size, 4), np.float32) for size in (4, 8))

    def found(function):
        return mixes_tokens(function, 8, (many, 1), fewer=(function, (few, 1)))

    assert re.search("how many are at hand", found(from_how_many))
    assert found(from_zero) is None


def test_heads_that_do_not_divide_are_refused_for_ulysses():
    (found,) = lint(model(), "context=8,tensor=2,attention=ulysses", seq=32).findings
    assert (found.path, found.key) == ("context", "attention.indivisible_heads")
    assert "context=8 x 2" in found.message


def test_heads_that_are_traded_are_refused_with_the_methods_degrees(refuses):
    order = TokenOrder(mesh_axis="context", num_ranks=8, heads=4)
    q, k, v = (jax.numpy.zeros((1, 4, heads, 4)) for heads in (6, 2, 2))
    with refuses("attention.indivisible_heads", "attention=ulysses:4+ring:2", 4, 6):
        trade_tokens_for_heads(q, k, v, order)


def test_a_rule_may_not_use_context(refuses):
    rules = default_rules("context=2").with_rules(seq="context")
    with refuses("rules.claimed_twice", "'context'", "'seq'", kind=RuleError):
        make_train_step(
            model(),
            optax.sgd(0.1),
            "context=2",
            rules=rules,
            devices=jax.devices()[:2],
        )


def test_sequences_that_would_be_padded_alike_are_refused(refuses):
    made = build("tiny-t5", embed=16, heads=2, ffn=16, vocab=VOCAB)
    step = step_of("context=2,attention=ulysses", made)
    tokens = np.zeros((2, 8), np.int32)
    batch = dict(
        source_tokens=tokens, target_tokens=tokens[:, :7], labels=tokens[:, :7]
    )
    batch["weights"] = np.ones((2, 7), np.float32)
    with refuses("batch.lengths_padded_alike", 7, 8, "context=2"):
        step.place(batch)


def test_a_layout_with_context_has_no_findings():
    assert lint(model(), "context=2,tensor=2,fsdp=2", seq=32).findings == ()
