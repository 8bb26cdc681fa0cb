"""Batches are a function of (seed, step), texts are text, and counting sets a bar."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.train.data import (
    DataError,
    TokenWindows,
    bigram_loss,
    byte_tokens,
    padded_batches,
    read_texts,
    shuffled_batches,
    unigram_loss,
)

SEQ = 3
SHAKESPEARE = Path(__file__).parents[1] / "recipes" / "data" / "shakespeare"


def numbered_windows(num_windows, seq=SEQ):
    """Windows of the numbers from 0 on, so that each tells where it began."""
    return TokenWindows(np.arange(num_windows * seq + 1), seq)


def window_indices(batch, seq=SEQ):
    return (batch["tokens"][:, 0] // seq).tolist()


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])


# Windows.


@pytest.mark.parametrize(
    "num_tokens, seq, num_windows", [(4, 3, 1), (6, 3, 1), (7, 3, 2), (9, 1, 8)]
)
def test_windows_cover_the_text_once_as_far_as_whole_ones_go(
    num_tokens, seq, num_windows
):
    windows = TokenWindows(np.arange(num_tokens), seq)
    assert len(windows) == num_windows
    seen = np.concatenate([windows[index]["tokens"] for index in range(num_windows)])
    np.testing.assert_array_equal(seen, np.arange(num_windows * seq))


def test_every_target_is_the_successor_of_its_token():
    tokens = np.random.default_rng(0).integers(0, 256, 50).astype(np.uint8)
    windows = TokenWindows(tokens, SEQ)
    for index in range(len(windows)):
        start = index * SEQ
        assert_same(
            windows[index],
            {
                "tokens": tokens[start : start + SEQ],
                "targets": tokens[start + 1 : start + SEQ + 1],
                "weights": np.ones(SEQ),
            },
        )


@pytest.mark.parametrize("num_tokens, seq", [(0, 1), (1, 1), (3, 3), (128, 128)])
def test_a_text_shorter_than_one_window_is_refused(num_tokens, seq, refuses):
    with refuses("data.too_few_tokens", num_tokens, seq, kind=DataError):
        TokenWindows(np.zeros(num_tokens, np.uint8), seq)


# Batches.


@settings(max_examples=12, deadline=None)
@given(
    num_windows=st.integers(1, 20),
    global_batch=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_every_window_comes_once_an_epoch(num_windows, global_batch, seed):
    batch_of = shuffled_batches(
        numbered_windows(num_windows), global_batch=global_batch, seed=seed
    )
    num_epochs = 3
    num_batches = math.ceil(num_epochs * num_windows / global_batch)
    order = [i for step in range(num_batches) for i in window_indices(batch_of(step))]
    for epoch in range(num_epochs):
        of_epoch = order[epoch * num_windows : (epoch + 1) * num_windows]
        assert sorted(of_epoch) == list(range(num_windows))


@settings(max_examples=12, deadline=None)
@given(step=st.integers(0, 1000), before=st.lists(st.integers(0, 1000), max_size=4))
def test_a_batch_does_not_depend_on_the_batches_asked_for_before(step, before):
    batch_of, fresh_batch_of = (
        shuffled_batches(numbered_windows(12), global_batch=4, seed=7) for _ in range(2)
    )
    for earlier in before:
        batch_of(earlier)
    assert_same(batch_of(step), fresh_batch_of(step))


def test_another_seed_and_another_epoch_have_another_order():
    first, second = (
        shuffled_batches(numbered_windows(64), global_batch=64, seed=seed)
        for seed in (0, 100)
    )
    orders = [window_indices(batch) for batch in (first(0), first(1), second(0))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_neighbouring_seeds_share_no_epochs_order():
    orders = [
        tuple(window_indices(batch_of(epoch)))
        for seed in range(4)
        for batch_of in [
            shuffled_batches(numbered_windows(64), global_batch=64, seed=seed)
        ]
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)


def test_a_batch_holds_whole_windows_example_first():
    windows = numbered_windows(12)
    batch = shuffled_batches(windows, global_batch=4, seed=0)(2)
    for row, index in enumerate(window_indices(batch)):
        assert_same({key: batch[key][row] for key in batch}, windows[index])


@settings(max_examples=12, deadline=None)
@given(num_windows=st.integers(1, 20), global_batch=st.integers(1, 8))
def test_padded_batches_weigh_every_token_once_and_in_order(num_windows, global_batch):
    windows = numbered_windows(num_windows)
    batches = list(padded_batches(windows, global_batch))
    assert {batch["tokens"].shape for batch in batches} == {(global_batch, SEQ)}
    tokens, targets, weights = (
        np.concatenate([batch[key] for batch in batches])
        for key in ("tokens", "targets", "weights")
    )
    expected = np.arange(num_windows * SEQ)
    np.testing.assert_array_equal(tokens[weights == 1], expected)
    np.testing.assert_array_equal(targets[weights == 1], expected + 1)
    assert weights.sum() == num_windows * SEQ


# Texts.


def test_byte_tokens_are_the_utf_8_bytes():
    assert byte_tokens("aé").tolist() == [0x61, 0xC3, 0xA9]


def test_a_folder_gives_its_txt_files_by_name_and_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "notes.md"):
        (tmp_path / name).write_text(f"text of {name}")
    texts = read_texts(tmp_path)
    assert list(texts.items()) == [("a", "text of a.txt"), ("b", "text of b.txt")]
    assert read_texts(tmp_path / "notes.md") == {"notes": "text of notes.md"}


NO_TEXTS = [
    (b"", ("data.empty_file",)),
    (b" \n\t\n", ("data.empty_file",)),
    (b"ab\0cd", ("data.binary_file", 2)),
    (b"caf\xe9", ("data.not_utf8", 3, "0xe9")),
]


@pytest.mark.parametrize("content, refusal", NO_TEXTS)
def test_a_file_that_is_no_text_is_refused_by_name(content, refusal, tmp_path, refuses):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with refuses(*refusal, "text.txt", kind=DataError):
            read_texts(path)


def test_a_path_without_texts_is_refused_by_name(tmp_path, refuses):
    with refuses("data.missing_file", "absent", kind=DataError):
        read_texts(tmp_path / "absent")
    with refuses("data.empty_folder", tmp_path, kind=DataError):
        read_texts(tmp_path)
    (tmp_path / "folder.txt").mkdir()
    with refuses("data.unreadable_file", "folder.txt", kind=DataError):
        read_texts(tmp_path)


# Baselines: (train, validation, vocab) and the probability of each token but the first.

BY_HAND = [
    # Counts 3 and 2 are 4/7 and 3/7; after a 0 come two 1s, after a 1 two 0s.
    (
        [0, 1, 0, 1, 0],
        [0, 1, 0, 0],
        2,
        [3 / 7, 4 / 7, 4 / 7],
        [17 / 21, 18 / 21, 4 / 21],
    ),
    # A token never seen: 1 of 8 alone, and 1/8 of 3 after a 0.
    ([0, 1, 0, 1, 0], [0, 2], 3, [1 / 8], [1 / 24]),
    # After a token never seen nothing is known but the unigram.
    ([0, 1, 0, 1, 0], [2, 0], 3, [4 / 8], [4 / 8]),
]


@pytest.mark.parametrize("train, validation, vocab, unigram, bigram", BY_HAND)
def test_the_baselines_are_the_counts_by_hand(
    train, validation, vocab, unigram, bigram
):
    texts = (np.array(train), np.array(validation), vocab)
    assert unigram_loss(*texts) == pytest.approx(-np.mean(np.log(unigram)))
    assert bigram_loss(*texts) == pytest.approx(-np.mean(np.log(bigram)))


def test_on_real_text_a_bigram_beats_a_unigram_beats_chance():
    train, validation = (
        byte_tokens(next(iter(read_texts(SHAKESPEARE / name).values())))
        for name in ("hamlet.txt", "macbeth.txt")
    )
    bigram = bigram_loss(train, validation, 256)
    assert 0 < bigram < unigram_loss(train, validation, 256) < math.log(256)


@given(before=st.integers(1, 7), after=st.integers(1, 7), steps=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_a_run_with_another_batch_goes_on_with_the_next_window(before, after, steps):
    windows = numbered_windows(11)
    options = dict(seed=5)
    single = shuffled_batches(windows, global_batch=1, **options)
    skip = steps * before
    batch = shuffled_batches(windows, global_batch=after, skip=skip, **options)(1)
    wanted = [window_indices(single(skip + after + i))[0] for i in range(after)]
    assert window_indices(batch) == wanted
