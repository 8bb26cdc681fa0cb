"""An encoder-decoder refuses sizes that do not fit, and reads what it should."""

import functools

import jax
import numpy as np
import pytest

from meshpar import InputError, Layout, lint
from meshpar.model.single import forward, loss
from meshpar.models.presets import build, configure

SEQ, SOURCE, VOCAB = 6, 8, 32


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"decoder_layers": 0}, "decoder_layers=0: must be at least 1"),
        ({"heads": 3}, "embed=128 is not a multiple of heads=3; set head_dim"),
        ({"head_dim": -1}, "head_dim=-1: must be at least 0; 0 is embed / heads"),
        ({"logits_bytes": -1}, "logits_bytes=-1: must be at least 0; 0 is no limit"),
        ({"dropout": 1.5}, "dropout=1.5: must be at least 0 and below 1"),
        ({"gated": 1}, "gated=1: must be true or false"),
        ({"layers": 2}, "EncoderDecoderConfig has no 'layers'; did you mean"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, match):
    with pytest.raises(InputError, match=match):
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
    return build("tiny-t5", embed=16, heads=4, ffn=32, vocab=VOCAB, max_seq=SOURCE)


@functools.cache
def params():
    return jax.jit(model().init)(0)


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
    found, wanted = (loss(model(), params(), given) for given in (none, every))
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def test_a_sequence_longer_than_the_positions_is_refused():
    long = {**batch(), "source_tokens": np.zeros((2, SOURCE + 1), np.int32)}
    with pytest.raises(InputError, match="source sequences of 9 tokens, but the model"):
        jax.eval_shape(lambda: forward(model(), params(), long))
