"""The picture of the planner's error, and the table beside it."""

import pytest

from meshpar.planner.published import validate
from meshpar.recipes.bench.planner_validation import main, series


def test_every_row_of_a_quantity_is_in_one_series():
    rows = validate.rows()
    for quantity in ("step", "memory"):
        drawn = series(rows, quantity)
        assert sum(map(len, drawn.values())) == sum(
            row.quantity == quantity for row in rows
        )
    steps = series(rows, "step")
    assert all(row.calibrates for row in steps["calibrates"])
    assert all(row.counts for row in steps["Tazi et al. 2025"])


def test_the_table_is_printed_and_the_picture_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png = tmp_path / "validation.png"
    assert main(["--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (
        "step time, A100 (Narayanan et al. 2021): 5 rows, mean"
        in capsys.readouterr().out
    )
