"""Metrics are one JSON object a line, on disk as soon as they are written."""

import errno
import json
import math
from pathlib import Path

import pytest

from meshpar.train.metrics import JsonLines, cut_rows

ROWS = [
    {"step": 0, "loss": 4.25, "tokens_per_s": 1000.0},
    {"step": 1, "loss": 0.1, "note": 'a "quoted" line\nof two'},
    {"step": 2, "validation_loss": 1e-30},
]


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_row_is_one_json_object_on_a_line_of_its_own(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as log:
        for row in ROWS:
            log.write(**row)
    assert rows_of(tmp_path / "metrics.jsonl") == ROWS


def test_a_number_that_is_not_finite_is_null_for_readers_of_strict_json(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    with JsonLines(tmp_path / "metrics.jsonl") as log:
        log.write(step=3, loss=math.nan, norm=math.inf, low=-math.inf, note="nan")
    line = (tmp_path / "metrics.jsonl").read_text("utf-8")
    row = {"step": 3, "loss": None, "norm": None, "low": None, "note": "nan"}
    assert json.loads(line, parse_constant=refuse) == row


def test_a_row_can_be_read_while_the_run_goes_on(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as log:
        for written, row in enumerate(ROWS, start=1):
            log.write(**row)
            assert rows_of(log.path) == ROWS[:written]


def test_a_resumed_run_appends_to_the_rows_that_are_there(tmp_path):
    for row in ROWS:
        with JsonLines(tmp_path / "metrics.jsonl") as log:
            log.write(**row)
    assert rows_of(tmp_path / "metrics.jsonl") == ROWS


def test_the_folder_of_the_file_is_made(tmp_path):
    with JsonLines(tmp_path / "runs" / "first" / "metrics.jsonl") as log:
        log.write(step=0)
    assert rows_of(tmp_path / "runs" / "first" / "metrics.jsonl") == [{"step": 0}]


def test_rows_written_before_an_error_are_kept(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        JsonLines(tmp_path / "metrics.jsonl") as log,
    ):
        log.write(**ROWS[0])
        raise ZeroDivisionError
    assert rows_of(tmp_path / "metrics.jsonl") == ROWS[:1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_row_that_cannot_be_written_names_the_file():
    with (
        pytest.raises(OSError, match="/dev/full") as caught,
        JsonLines(Path("/dev/full")) as log,
    ):
        log.write(**ROWS[0])
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("unfinished", "first_stale", "kept"),
    [("", 9, 3), ("", 2, 2), ("", 0, 0), ('{"step": 3, "lo', 9, 3), ("{", 1, 1)],
)
def test_rows_are_cut_at_the_first_stale_or_unfinished_one(
    tmp_path, unfinished, first_stale, kept
):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + unfinished)
    cut_rows(path, lambda row: row["step"] >= first_stale)
    assert rows_of(path) == ROWS[:kept]


@pytest.mark.parametrize("line", ["notes", "notes\n", "3\n", '{"loss": 3}\n', "\0\n"])
def test_a_file_that_holds_no_metrics_is_not_cut(tmp_path, line, refuses):
    path = tmp_path / "notes.txt"
    path.write_text('{"step": 0}\n' + line)
    with refuses("run.unreadable_metrics", 2, "notes.txt"):
        cut_rows(path, lambda row: row["step"] >= 1)
    assert path.read_text() == '{"step": 0}\n' + line


def test_there_is_nothing_to_cut_where_there_is_no_file_or_a_device(tmp_path):
    for path in (tmp_path / "absent.jsonl", Path("/dev/null")):
        cut_rows(path, lambda row: True)
    assert not (tmp_path / "absent.jsonl").exists()
