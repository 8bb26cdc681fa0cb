"""`meshpar schedule` draws, writes and reports one schedule, and ends with a status."""

import json
import struct
import xml.etree.ElementTree as ElementTree

import pytest

from meshpar.cli.main import main
from meshpar.schedules import make_schedule, to_csv
from tests.marks import slow

SMALL = ["schedule", "--schedule", "1f1b", "--stages", "4", "--microbatches", "6"]
KEYS = {"schedule", "stages", "microbatches", "chunks", "bubble_fraction", "span_s"}
KEYS |= {"peak_in_flight", "ticks", "orders", "execution"}


def status_of(argv):
    """The status that the shell would see."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def report_of(argv, capsys):
    assert status_of([*argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert captured.err == ""
    return json.loads(captured.out)


def of(name, stages, microbatches, *more):
    sizes = ["--stages", str(stages), "--microbatches", str(microbatches)]
    return ["schedule", "--schedule", name, *sizes, *more]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def csv_file(tmp_path):
    def write(text):
        path = tmp_path / "orders.csv"
        path.write_text(text)
        return str(path)

    return write


# Output.


def test_the_timeline_is_drawn_to_scale_with_idle_time_as_dots(capsys):
    assert status_of(SMALL) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("1f1b: stages=4, chunks=1, microbatches=6: span 27 ms")
    drawn = [line for line in lines if line.startswith("rank ")]
    assert drawn[3].startswith("rank 3 |............3F0 3B0BBBB 3F1 ")
    assert len({len(line) for line in drawn}) == 1
    assert "in flight a rank: 4 3 2 1" in lines
    assert "in flight a rank in lock step: 6 5 3 1" in lines


def test_a_timeline_too_long_for_names_has_letters(capsys):
    assert status_of(of("gpipe", 2, 64)) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert all(len(line) <= 160 for line in drawn)
    assert set(drawn[1].split("|")[1]) == set("FB.")


def test_json_has_the_promised_keys(capsys):
    report = report_of(of("interleaved_1f1b", 4, 8, "--chunks", "2"), capsys)
    assert report.keys() >= KEYS
    assert (report["stages"], report["microbatches"], report["chunks"]) == (4, 8, 2)
    assert report["bubble_fraction"] == 3 / (2 * 8 + 3)
    assert report["span_s"] == 3 * (2 * 8 + 3) / 2 / 1e3
    assert report["peak_in_flight"] == [11, 9, 7, 5]
    assert report["ticks"] == report["lock_step"]["ticks"] == 26
    assert report["orders"][1][:2] == ["1F0", "1F1"]
    assert report["execution"] == "asynchronous"


def test_lock_step_numbers_stand_beside_those_of_the_asynchronous_replay(capsys):
    report = report_of(SMALL, capsys)
    assert report["peak_in_flight"] == [4, 3, 2, 1]
    assert report["lock_step"]["peak_in_flight"] == [6, 5, 3, 1]
    assert report["lock_step"]["bubble_fraction"] == report["bubble_fraction"]


def test_the_times_of_a_published_run_give_its_bubble(capsys):
    # Qi et al., ICLR 2024: 1.5B model, p = 8, m = 24.
    times = ["--forward-ms", "18.522", "--input-grad-ms", "18.086"]
    times += ["--weight-grad-ms", "9.337", "--hop-ms", "0.601"]
    report = report_of(of("1f1b", 8, 24, *times), capsys)
    assert round(report["bubble_fraction"], 4) == 0.2431


@pytest.mark.parametrize(
    "forward_ms, rank_0_ms, all_ms",
    [("2", 1, 4), ("1/5", 0.5, 6), ("1/1/2/4", 1, 8)],
)
def test_a_time_is_of_any_rank_of_each_rank_or_of_each_stage(
    forward_ms, rank_0_ms, all_ms, tmp_path, capsys
):
    trace = tmp_path / "trace.json"
    options = ["--chunks", "2", "--forward-ms", forward_ms, "--trace", str(trace)]
    report = report_of(of("looped_bfs", 2, 1, *options), capsys)
    backwards_ms = 4
    assert report["span_s"] * 1e3 == all_ms + backwards_ms
    events = json.loads(trace.read_text())["traceEvents"]
    first = next(event for event in events if event["name"] == "0F0")
    assert first["dur"] == rank_0_ms * 1e3


def test_all_times_zero_is_no_bubble(capsys):
    zeros = ["--forward-ms", "0", "--input-grad-ms", "0", "--weight-grad-ms", "0"]
    assert report_of([*SMALL, *zeros], capsys)["bubble_fraction"] == 0
    assert status_of([*SMALL, *zeros]) == 0


# Files.


def test_an_svg_has_a_box_for_every_action_and_says_what_is_what(tmp_path, capsys):
    path = tmp_path / "timeline.svg"
    assert status_of([*SMALL, "--plot", str(path)]) == 0
    elements = [*ElementTree.parse(path).getroot().iter()]
    boxes = {element.get("id"): len(element) for element in elements}
    # A path each; those of one shape share its definition.
    assert boxes["forward"] >= 24 and boxes["backward"] >= 24
    texts = [element.text for element in elements if element.tag.endswith("text")]
    assert {"forward", "backward", "rank 3", "time, ms", "in flight"} < set(texts)
    assert {"warm-up", "steady", "cool-down"} < set(texts)
    assert texts.count("5") >= 8  # the last microbatch's number, on both of its boxes


@pytest.mark.parametrize(
    "name, stages, microbatches, chunks",
    [slow("1f1b", 8, 64, 1), ("interleaved_1f1b", 4, 8, 2), ("gpipe", 1, 1, 1)],
)
def test_a_png_grows_with_the_schedule(name, stages, microbatches, chunks, tmp_path):
    path = tmp_path / "timeline.png"
    argv = of(name, stages, microbatches, "--chunks", str(chunks))
    assert status_of([*argv, "--plot", str(path)]) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    # 20 pixels are two digits of the shortest action, 27 a row.
    assert 6000 >= width >= 20 * 3 * microbatches
    assert height >= 27 * (stages + 1)


def test_two_schedules_are_reported_and_plotted_on_one_time_axis(tmp_path, capsys):
    path = tmp_path / "both.html"
    more = ["--compare", "zero_bubble_v", "--activation-mb", "100", "--plot", str(path)]
    report = report_of(of("1f1b", 4, 8, *more), capsys)
    other = report["compare"]
    assert (report["schedule"], other["schedule"]) == ("1f1b", "zero_bubble_v")
    assert other["span_s"] < report["span_s"]
    assert report["peak_memory_bytes"] == [10**8 * (4 - rank) for rank in range(4)]
    text = path.read_text()
    assert text.count("Plotly.newPlot(") >= 2 and "memory, MB" in text
    for name in ("1f1b", "zero_bubble_v"):
        assert f"{name}: stages=4" in text


def test_a_picture_of_nothing_that_takes_time_is_drawn(tmp_path):
    zeros = ["--forward-ms", "0", "--input-grad-ms", "0", "--weight-grad-ms", "0"]
    for suffix in ("png", "html"):
        path = tmp_path / f"timeline.{suffix}"
        assert status_of([*SMALL, *zeros, "--plot", str(path)]) == 0
        assert path.stat().st_size > 1000


def test_a_trace_has_an_event_for_every_action_on_its_ranks_thread(tmp_path, capsys):
    path = tmp_path / "trace.json"
    report = report_of([*SMALL, "--trace", str(path)], capsys)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for rank, order in enumerate(report["orders"]):
        assert [event["name"] for event in complete if event["tid"] == rank] == order
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(27e3)


# Schedules of one's own.


def test_a_csv_needs_no_sizes_and_may_state_them(csv_file, capsys):
    argv = ["schedule", "--schedule", csv_file(to_csv(make_schedule("gpipe", 2, 3)))]
    assert report_of(argv, capsys)["peak_in_flight"] == [3, 3]
    stated = ["--stages", "2", "--microbatches", "3", "--chunks", "1"]
    assert report_of([*argv, *stated], capsys)["stages"] == 2


WRONG = [
    (
        "0B0,0F0\n1F0,1B0",
        "deadlock at tick 0:\n  rank 0 wants 0B0, which needs 0F0, 1B0",
    ),
    ("0F0,0B0\n1F0", "missing work: 1B0"),
    ("0F0,0B0,0F0", "doubled work: 0F0"),
]


@pytest.mark.parametrize("text, message", WRONG)
def test_a_wrong_schedule_ends_with_1_and_the_checkers_words(
    text, message, csv_file, capsys
):
    argv = ["schedule", "--schedule", csv_file(text)]
    assert status_of(argv) == 1
    captured = capsys.readouterr()
    assert message in captured.out
    assert captured.err == ""
    assert status_of([*argv, "--json"]) == 1
    assert message in "\n".join(json.loads(capsys.readouterr().out)["problems"])


def test_over_full_buffers_end_with_1(capsys):
    assert status_of([*SMALL, "--max-in-flight", "4"]) == 0
    assert status_of([*SMALL, "--max-in-flight", "3"]) == 1
    assert "rank 0 holds 4 microbatches at 0F3" in capsys.readouterr().out


# Bad input.


@pytest.mark.parametrize(
    "argv, refusal",
    [
        (of("1f1b", 4, 0), ("value.not_whole_number", "--microbatches", 0, 1)),
        (of("1f1b", 0, 4), ("value.not_whole_number", "--stages", 0, 1)),
        (
            of("1f1b", 4, 4, "--chunks", "2"),
            ("schedule.unsupported_chunks", "chunks=2", "1f1b"),
        ),
        (
            [*SMALL, "--stash", "0.5"],
            ("schedule.stash_of_nothing", "--stash", "--activation-mb"),
        ),
        ([*SMALL, "--compare", "1f1"], ("schedule.unknown_name", "'1f1'")),
        (of("1f1", 4, 4), ("schedule.unknown_name", "'1f1'", "'1f1b'")),
        (
            ["schedule", "--schedule", "1f1b", "--stages", "4"],
            ("schedule.no_size", "--stages", "--microbatches"),
        ),
        (
            ["schedule", "--schedule", "absent.csv"],
            ("command.unreadable_file", "absent.csv"),
        ),
        ([*SMALL, "--hop-ms", "-1"], ("value.out_of_range", "--hop-ms", -1, 0)),
        (
            [*SMALL, "--forward-ms", "1/x"],
            ("value.out_of_range", "--forward-ms", "'x'"),
        ),
        (
            [*SMALL, "--forward-ms", "nan"],
            ("value.out_of_range", "--forward-ms", "nan"),
        ),
        (
            [*SMALL, "--forward-ms", "1/2"],
            ("schedule.wrong_number_of_times", "--forward-ms", 2, 4),
        ),
        ([*SMALL, "--plot", "a.gif"], ("command.unknown_suffix", "a.gif", ".svg")),
        (
            [*SMALL, "--trace", "no/such/file.json"],
            ("command.no_folder", "--trace", "'no/such'"),
        ),
        (
            [*SMALL, "--plot", "no/such/file.svg"],
            ("command.no_folder", "--plot", "'no/such'"),
        ),
        ([*SMALL, "--plot", "/tmp"], ("command.file_is_folder", "--plot", "/tmp")),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(argv, refusal, refuses_command):
    refuses_command(argv, *refusal)


PLANNED = ["--preset", "llama3-8b", "--hardware", "h100-80gb", "--global-batch", "8"]


@pytest.mark.parametrize(
    "argv",
    [
        ["estimate", *PLANNED],
        ["plan", *PLANNED, "--devices", "2"],
        ["lint", "--model", "layers=4,hidden=32,heads=4,vocab=64"],
    ],
)
@pytest.mark.parametrize("name", ["zero_bubble_h3", "v_third"])
def test_no_command_takes_a_layout_of_a_schedule_that_there_is_none_of(
    argv, name, refuses_command
):
    line = f"stage=2,microbatches=4,schedule={name}"
    refuses_command([*argv, "--layout", line], "schedule.unknown_name", name)


@pytest.mark.parametrize(
    "text, sizes, refusal",
    [
        (
            "0F0,0B0",
            ["--microbatches", "2"],
            ("schedule.wrong_size", "microbatches=1", "microbatches=2"),
        ),
        (
            "0F0,0B0",
            ["--stages", "2"],
            ("schedule.wrong_size", "stages=1", "stages=2"),
        ),
        (
            "0F0,0B0",
            ["--chunks", "2"],
            ("schedule.wrong_size", "chunks=1", "chunks=2"),
        ),
        ("0F0,1F0,2F0\n2B0", [], ("schedule.indivisible_stages", 3, 2)),
        ("0F0,what", [], ("schedule.unreadable_action", "'what'")),
    ],
)
def test_a_csv_of_other_sizes_is_one_line_and_status_2(
    text, sizes, refusal, csv_file, refuses_command
):
    refuses_command(["schedule", "--schedule", csv_file(text), *sizes], *refusal)


def test_a_limit_on_weight_gradients_does_not_refuse_whole_backwards_beside(capsys):
    sizes = ["--stages", "2", "--microbatches", "4", "--max-pending-w", "1"]
    names = ["--schedule", "zero_bubble_h1", "--compare", "1f1b"]
    assert main(["schedule", *names, *sizes, "--json"]) == 0
    assert '"compare": {' in capsys.readouterr().out
