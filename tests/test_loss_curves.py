"""The lines beside a picture of loss curves."""

import json

import pytest

from meshpar.recipes.bench.loss_curves import main


def metrics_file(folder, name, last):
    rows = [{"step": 0, "loss": 3.0}, {"step": 9, "validation_loss": 2.5}]
    rows.append({"step": 19, "validation_loss": last})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_last_validation_losses_stand_beside_the_first_runs(tmp_path, capsys):
    files = [metrics_file(tmp_path, "one", 2.0), metrics_file(tmp_path, "two", 2.01)]
    assert main(files) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one: validation 2.0000 after 20 steps, +0.00%",
        "two: validation 2.0100 after 20 steps, +0.50%",
    ]


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "curves.png"
    main([metrics_file(tmp_path, "one", 2.0), "--png", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_not_there_is_named(tmp_path, refuses_recipe):
    refuses_recipe(lambda: main([str(tmp_path / "none.jsonl")]), None, "none.jsonl")
