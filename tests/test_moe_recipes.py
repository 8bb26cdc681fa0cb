"""The programs about experts run, and show what they say."""

import json

import pytest

from meshpar.recipes import moe
from meshpar.recipes.bench import moe as bench


@pytest.mark.slow
def test_the_recipe_has_every_experts_load_and_drops_under_a_capacity(tmp_path, capsys):
    log, png = tmp_path / "load.jsonl", tmp_path / "load.png"
    words = (
        f"--preset tiny-moe-capacity --steps 3 --seq 32 --log-json {log} --png {png}"
    )
    assert moe.main(words.split()) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 < row["dropped"] < 1
        assert row["rounds"] == row["further"] == 0
        for load in row["load"]:
            assert len(load) == 8 and sum(load) == pytest.approx(8, abs=1e-2)
    assert png.stat().st_size > 0
    assert "dropped" in capsys.readouterr().out


def test_a_preset_without_experts_is_refused_in_one_line(refuses_recipe):
    words = ["--preset", "test", "--steps", "1"]
    refuses_recipe(lambda: moe.main(words), "model.no_experts", "test", "tiny-moe")


@pytest.mark.parametrize(
    "words, refusal",
    [
        ("--steps 0", ("value.not_whole_number", "--steps", 0, 1)),
        ("--log-json nowhere/load.jsonl", ("command.no_folder", "'nowhere'")),
        ("--png load.gif", ("command.unknown_suffix", "--png", "load.gif", ".png")),
        ("--layout data=-1,expert=4", ("layout.open_size", "data=-1,expert=4")),
        ("--global-batch 3", ("batch.indivisible", 3, 8)),
    ],
)
def test_bad_options_are_refused_in_one_line_before_training(
    words, refusal, refuses_recipe
):
    words = ["--preset", "tiny-moe", *words.split()]
    assert refuses_recipe(lambda: moe.main(words), *refusal) == ""


@pytest.mark.slow
def test_every_program_of_the_bench_has_the_gradients_of_one_device(capsys):
    words = "--tokens 128 --embed 16 --hidden 16 --rounds 1"
    assert bench.main(words.split()) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        assert float(row.split("|")[4]) < 1e-5
