"""What the recipe for long sequences cannot do is told in one line."""

import pytest

from meshpar.recipes.long_context import main, packed_batches, scenes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layout", "context=3,contxt=2"], "contxt"),
        (["--layout", "context=16"], "16"),
        (["--layout", "data=2,context=4", "--seq", "64"], "1 examples"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(words, told, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("long_context: ") and told in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("words", [["--seq", "3"], ["--rows", "0"]])
def test_sizes_that_hold_nothing_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert f"{words[0]} {words[1]}: give " in capsys.readouterr().err


def test_the_shortest_sequence_has_a_document():
    batch = next(packed_batches(scenes(), seq=4, rows=2, seed=0))
    assert (batch["segment_ids"][:, 0] == 0).all()
