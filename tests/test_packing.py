"""Rows lose no token, mixtures are exact, and a batch is the same for every host."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.data.batches import (
    PackedRows,
    StreamRows,
    Turns,
    device_batches,
    mixed,
    packed,
)
from meshpar.data.megatron import MegatronWriter, read_megatron
from meshpar.data.token_files import TokenStream
from meshpar.errors import DataError
from meshpar.train.data import ordered_batches
from tests.refusals import names

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def stream_of(folder, lengths):
    """A stream of 1, 2, 3, ... cut into documents of those lengths."""
    bounds = np.cumsum([0, *lengths])
    numbers = np.arange(1, bounds[-1] + 1)
    with MegatronWriter(folder / "a.bin", np.dtype("<i4")) as writer:
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            writer.add(numbers[start:stop])
    return TokenStream.from_files([read_megatron(folder / "a.bin")], vocab=1 << 20)


def pieces_of(row):
    """What a row holds of each document: (tokens, targets, weights, positions)."""
    names = ("tokens", "targets", "weights", "positions")
    for segment in range(row["segment_ids"].max(initial=-1) + 1):
        here = row["segment_ids"] == segment
        assert here.any()
        yield tuple(row[name][here] for name in names)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq=st.integers(1, 16))
def test_packing_loses_no_token_and_cuts_only_what_is_longer(
    tmp_path_factory, lengths, seq
):
    stream = stream_of(tmp_path_factory.mktemp("data"), lengths)
    rows = PackedRows(stream, packed(stream.bounds, seq))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    seen, num_pieces = [], Counter()
    for row in (rows[number] for number in range(len(rows))):
        assert {len(array) for array in row.values()} == {seq}
        empty = row["segment_ids"] == -1
        assert not row["weights"][empty].any()
        filled = int((~empty).sum())
        assert not empty[:filled].any(), "free places come last"
        for tokens, targets, weights, positions in pieces_of(row):
            seen += tokens.tolist()
            assert (np.diff(tokens) == 1).all()
            assert positions.tolist() == [*range(len(tokens))]
            documents = {int(document_of[token - 1]) for token in tokens}
            assert len(documents) == 1, "a segment is of one document"
            num_pieces[documents.pop()] += 1
            for token, target, weight in zip(tokens, targets, weights, strict=True):
                last = token == len(document_of) or (
                    document_of[token] != document_of[token - 1]
                )
                assert (target, weight) == ((0, 0) if last else (token + 1, 1))
    assert sorted(seen) == [*range(1, sum(lengths) + 1)]
    wanted = {n: -(-length // seq) for n, length in enumerate(lengths) if length}
    assert num_pieces == wanted
    assert rows.packing.num_cut == sum(length > seq for length in lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq=st.integers(1, 16))
def test_packing_needs_no_more_rows_than_the_bound_of_best_fit(lengths, seq):
    packing = packed(np.cumsum([0, *lengths]), seq)
    fewest = -(-sum(lengths) // seq)
    assert fewest <= packing.num_rows <= 1.7 * fewest + 1
    of_rows = zip(packing.row_bounds[:-1], packing.row_bounds[1:], strict=True)
    used = [packing.lengths[slice(*bounds)].sum() for bounds in of_rows]
    assert all(0 < one <= seq for one in used)


def test_documents_that_fit_exactly_fill_their_rows():
    packing = packed(np.cumsum([0] + [3, 5] * 50), 8)
    assert packing.num_rows == 50 and packing.filled == 1.0 and packing.num_cut == 0


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_windows_give_every_token_and_its_successor_in_order(tmp_path_factory, lengths):
    stream = stream_of(tmp_path_factory.mktemp("data"), lengths)
    if stream.num_tokens < 4:
        with pytest.raises(DataError) as caught:
            StreamRows(stream, 3)
        assert caught.value.key == "data.too_few_tokens"
        assert names(str(caught.value), stream.num_tokens)
        return
    rows = StreamRows(stream, 3)
    read = [rows[number] for number in range(len(rows))]
    tokens = np.concatenate([row["tokens"] for row in read])
    assert tokens.tolist() == [*range(1, len(rows) * 3 + 1)]
    assert all((row["targets"] == row["tokens"] + 1).all() for row in read)


# Mixtures.


class Numbered:
    """Rows that say where they are from."""

    def __init__(self, source, num_rows):
        self.source, self.num_rows = source, num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return {"source": np.array([self.source]), "row": np.array([index])}


def mixture(weights, num_rows=(1000, 1000), seed=3):
    sources = [Numbered(number, num_rows[number]) for number in range(len(weights))]
    return mixed(sources, seed=seed, weights=[Fraction(one) for one in weights])


WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, denominator=st.integers(1, 7))
def test_a_mixture_has_exactly_its_proportions(weights, denominator):
    turns = Turns([Fraction(weight, denominator) for weight in weights])
    taken = [0] * len(weights)
    for number in range(3 * sum(weights)):
        source, index = turns[number]
        assert index == taken[source], "each source goes on with its next row"
        taken[source] += 1
        first = weights[0] * (number + 1) / sum(weights)
        assert abs(taken[0] - first) < 1
        for count, weight in zip(taken, weights, strict=True):
            assert abs(count - weight * (number + 1) / sum(weights)) < len(weights)
        if (number + 1) % sum(weights) == 0:
            epochs = (number + 1) // sum(weights)
            assert taken == [epochs * weight for weight in weights]


def test_decimal_weights_are_exact():
    turns = Turns([Fraction("0.7"), Fraction("0.3")])
    found = Counter(turns[number][0] for number in range(10_000))
    assert found == {0: 7000, 1: 3000}


def test_each_source_of_a_mixture_is_shuffled_anew_in_each_epoch():
    order = mixture(["0.5", "0.2", "0.3"], (5, 7, 11))
    rows = [order[number] for number in range(80)]
    for source, num_rows in enumerate((5, 7, 11)):
        of_source = [int(row["row"][0]) for row in rows if row["source"][0] == source]
        epochs = [
            tuple(of_source[start : start + num_rows])
            for start in range(0, len(of_source) - num_rows + 1, num_rows)
        ]
        assert all(sorted(epoch) == [*range(num_rows)] for epoch in epochs)
        assert len(set(epochs)) > 1


def test_another_seed_is_another_order_and_the_same_the_same():
    first, again, other = (mixture(["1", "1"], seed=seed) for seed in (1, 1, 2))
    orders = [
        [int(one[n]["row"][0]) for n in range(100)] for one in (first, again, other)
    ]
    assert orders[0] == orders[1] != orders[2]


# Hosts, and where a run goes on.


@settings(max_examples=20, deadline=None)
@given(
    num_hosts=st.sampled_from([1, 2, 4]),
    step=st.integers(0, 40),
    skip=st.integers(0, 100),
)
def test_the_batch_of_a_step_is_the_same_for_any_number_of_hosts(num_hosts, step, skip):
    order, options = mixture(["0.7", "0.3"]), dict(global_batch=8, skip=skip)
    whole = ordered_batches(order, **options)(step)
    parts = [
        ordered_batches(mixture(["0.7", "0.3"]), **options, rows=rows)(step)
        for rows in np.split(np.arange(8), num_hosts)
    ]
    for name, array in whole.items():
        np.testing.assert_array_equal(
            np.concatenate([part[name] for part in parts]), array
        )


def test_a_host_reads_the_rows_of_its_devices_and_no_other(tmp_path):
    asked = []

    class Order:
        def __getitem__(self, index):
            asked.append(index)
            return {"row": np.array([index])}

    ordered_batches(Order(), global_batch=8, skip=3, rows=[2, 5])(10)
    assert asked == [3 + 80 + 2, 3 + 80 + 5]


def test_a_run_that_goes_on_in_the_middle_has_the_rows_it_would_have_had():
    """With another batch, too: where it stands is the number of rows used."""
    order = mixture(["0.4", "0.6"])
    whole = ordered_batches(order, global_batch=4)
    uninterrupted = [
        int(one) for step in range(9) for one in whole(step)["row"].ravel()
    ]
    rest = ordered_batches(mixture(["0.4", "0.6"]), global_batch=6, skip=3 * 4)
    after = [int(one) for step in range(4) for one in rest(step)["row"].ravel()]
    assert uninterrupted[12:36] == after


def test_batches_come_ahead_placed_and_in_order():
    placed = []
    with device_batches(
        lambda step: step * 10, lambda batch: placed.append(batch) or batch, num_steps=7
    ) as batches:
        assert [*batches] == [0, 10, 20, 30, 40, 50, 60]
    assert sorted(placed) == [0, 10, 20, 30, 40, 50, 60]
    with device_batches(lambda step: step, int, num_steps=0) as batches:
        assert [*batches] == []


def test_a_loop_may_end_before_its_batches():
    with device_batches(lambda step: step, int, num_steps=1_000_000) as batches:
        assert next(batches) == 0


def test_data_that_vanish_while_a_run_trains_stop_it_with_the_name_of_the_file(
    tmp_path, refuses
):
    stream = stream_of(tmp_path, [40])
    batch_of = ordered_batches(mixed([StreamRows(stream, 3)], seed=0), global_batch=2)
    with device_batches(batch_of, dict, num_steps=1000) as batches:
        next(batches)
        (tmp_path / "a.bin").unlink()
        with refuses("data.lost_file", "a.bin", kind=DataError):
            for _ in batches:
                pass
