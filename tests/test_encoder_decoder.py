"""An encoder-decoder refuses sizes that do not fit, and reads what it should."""

import functools

import jax
import numpy as np
import pytest

from meshpar import Layout, lint
from meshpar.model.tracing import forward
from meshpar.models.presets import build, configure
from tests.states import normal_values

SEQ, SOURCE, VOCAB = 6, 8, 32


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"decoder_layers": 0}, ("value.below_one", "decoder_layers=0", 1)),
        (
            {"heads": 3},
            ("model.heads_indivisible", "embed=128", "heads=3", "head_dim"),
        ),
        ({"head_dim": -1}, ("value.negative", "head_dim=-1", 0)),
        ({"logits_bytes": -1}, ("value.negative", "logits_bytes=-1", 0)),
        ({"dropout": 1.5}, ("model.dropout_out_of_range", "dropout=1.5", 0, 1)),
        ({"gated": 1}, ("value.not_boolean", "gated=1")),
        ({"layers": 2}, ("model.unknown_size", "EncoderDecoderConfig", "'layers'")),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, refusal, refuses):
    with refuses(*refusal):
        configure("tiny-t5", **changes)


# Raffel et al. 2020's checkpoints; ours have 1,024 positions and biases more.
@pytest.mark.parametrize(
    "preset, published", [("t5-small", 60.5e6), ("t5-base", 222.9e6)]
)
def test_a_preset_has_about_the_published_number_of_parameters(preset, published):
    assert build(preset).num_parameters == pytest.approx(published, rel=0.015)


@pytest.mark.parametrize("preset", ["tiny-t5", "t5-base"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    assert lint(build(preset), Layout.parse("fsdp=2,tensor=2")).findings == ()


@functools.cache
def model():
    layers = dict(encoder_layers=1, decoder_layers=1)
    sizes = dict(embed=16, heads=4, ffn=32, vocab=VOCAB, max_seq=SOURCE)
    return build("tiny-t5", **layers, **sizes)


@functools.cache
def params():
    return jax.device_put(normal_values(jax.eval_shape(model().init, 0)))


def batch():
    rng = np.random.default_rng(0)
    return {
        "source_tokens": rng.integers(0, VOCAB, (2, SOURCE)),
        "source_mask": np.arange(SOURCE) < np.array([[3], [SOURCE]]),
        "target_tokens": rng.integers(0, VOCAB, (2, SEQ)),
        "labels": rng.integers(0, VOCAB, (2, SEQ)),
        "weights": np.ones((2, SEQ), np.float32),
    }


@functools.cache
def program():
    return jax.jit(lambda params, batch: forward(model(), params, batch)["decoded"])


def decoded(batch):
    return program()(params(), batch)


def changed(name, example, at):
    """A batch with another token there."""
    found = batch()
    found[name][example, at] = (found[name][example, at] + 1) % VOCAB
    return found


def test_source_tokens_outside_the_mask_change_nothing():
    before, after = decoded(batch()), decoded(changed("source_tokens", 0, 5))
    np.testing.assert_array_equal(before, after)


def test_source_tokens_inside_the_mask_change_every_target_token():
    before, after = decoded(batch()), decoded(changed("source_tokens", 0, 2))
    differs = np.any(np.asarray(before != after), axis=-1)
    np.testing.assert_array_equal(differs, [[True] * SEQ, [False] * SEQ])


def test_a_target_token_changes_none_before_it():
    before, after = decoded(batch()), decoded(changed("target_tokens", 1, 3))
    differs = np.any(np.asarray(before != after), axis=-1)
    np.testing.assert_array_equal(differs, [[False] * SEQ, [False] * 3 + [True] * 3])


def test_without_a_mask_the_whole_source_is_read():
    every, none = batch(), batch()
    every["source_mask"] = np.ones((2, SOURCE), bool)
    del none["source_mask"]
    np.testing.assert_allclose(decoded(none), decoded(every), rtol=1e-5, atol=1e-6)


def test_a_sequence_longer_than_the_positions_is_refused(refuses):
    long = {**batch(), "source_tokens": np.zeros((2, SOURCE + 1), np.int32)}
    with refuses("batch.sequence_too_long", "source", 9, f"max_seq={SOURCE}"):
        jax.eval_shape(lambda: forward(model(), model().init(0), long))
