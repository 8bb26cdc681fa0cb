"""What the recipe for long sequences cannot do is told in one line."""

import pytest

from meshpar.recipes.long_context import main, packed_batches, scenes
from tests.states import begin_with_zeros


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--layout", "context=3,contxt=2"], ("layout.unknown_key", "'contxt'")),
        (["--layout", "context=16"], ("layout.wrong_device_count", 16, 8)),
        (
            ["--layout", "data=2,context=4", "--seq", "64"],
            ("batch.indivisible", 1, 2),
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    words, refusal, monkeypatch, refuses_recipe
):
    begin_with_zeros(monkeypatch)
    refuses_recipe(lambda: main(words), *refusal)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--seq", "3"], (None, "--seq 3", 4)),
        (["--global-batch", "0"], ("value.not_whole_number", "--global-batch", 0, 1)),
    ],
)
def test_sizes_that_hold_nothing_are_refused(words, refusal, refuses_recipe):
    refuses_recipe(lambda: main(words), *refusal)


def test_the_shortest_sequence_has_a_document():
    batch = next(packed_batches(scenes(), seq=4, rows=2, seed=0))
    assert (batch["segment_ids"][:, 0] == 0).all()
