"""Several processes started wrongly: one clear line of who can tell, all end soon."""

import pytest

from tests.marks import slow
from tests.multiprocess.children import (
    ends_of,
    free_port,
    joined,
    killed_if_raised,
    start,
)
from tests.multiprocess.test_train import OPTIONS, wait_for_steps
from tests.refusals import names

ELSEWHERE = """
import os, sys
if sys.argv[sys.argv.index("--process-id") + 1] == "1":
    os.chdir("/")
from meshpar.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""
TRAIN = ("-m", "meshpar", "train")


@pytest.fixture
def options(small_text, tmp_path):
    """Of a run that would work."""
    common = [*OPTIONS, "--start-timeout", "20", "--layout", "data=2", "--steps", "2"]
    return [*common, "--text", str(small_text), "--out", str(tmp_path / "run")]


def started(hands, options, words=TRAIN):
    """Each process with its own words, and one device."""
    return [start([*words, *options, "--emulate", "1", *hand]) for hand in hands]


def check_line(end, status, *values):
    """Checks that an end has that status and no traceback, and one line of values."""
    assert end.status == status, end.error[-3000:]
    lines = [line for line in end.error.splitlines() if line.startswith("meshpar")]
    assert len(lines) == 1 and "Traceback" not in end.error, end.error[-3000:]
    assert all(names(lines[0], value) for value in values), lines[0]


@pytest.mark.slow
def test_three_of_four_name_the_one_that_did_not_come(options):
    hands = joined(4, free_port())[:3]
    for end in ends_of(started(hands, options), timeout_s=60):
        check_line(end, 75, "20 s", "process 3", 4)


@pytest.mark.slow
def test_a_second_job_on_the_port_is_told_and_the_first_goes_on(options, tmp_path):
    port = free_port()
    hands = joined(2, port)
    first = started(hands, [*options, "--steps", "100000"])
    with killed_if_raised(first):
        wait_for_steps(tmp_path / "run" / "metrics.jsonl", 1)
        other = [*options, "--out", str(tmp_path / "other")]
        coordinator, follower = ends_of(started(hands, other), timeout_s=60)
        check_line(coordinator, 2, port)
        check_line(follower, 75, f"localhost:{port}", "process 1", "2 processes")
        first[0].terminate()
    assert [end.status for end in ends_of(first, timeout_s=100)] == [143, 143]


@pytest.mark.slow
def test_a_text_that_one_host_lacks_is_told_by_that_one(options, small_text):
    path = str(small_text.relative_to("/"))
    options[options.index("--text") + 1] = path
    children = started(joined(2, free_port()), options, ["-c", ELSEWHERE])
    first, second = ends_of(children, timeout_s=60)
    check_line(first, 2, f"'{path}'")
    check_line(second, 2, "process 0", f"'{path}'")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--seq", "8"], ("process 1", "seq=8", "process 0", "seq=16")),
        slow(["--num-processes", "3"], ("process 1", "num_processes=3", 2)),
    ],
)
def test_other_options_on_one_of_them_are_named(words, values, options):
    hands = joined(2, free_port())
    hands[1] += words
    ends = ends_of(started(hands, options), timeout_s=60)
    assert any(all(names(end.error, one) for one in values) for end in ends), ends
    assert all(end.status in (2, 75) for end in ends)
    assert all("Traceback" not in end.error for end in ends)


@pytest.mark.slow
def test_a_run_too_large_for_the_machine_ends_before_it_takes_memory(options):
    options = [*options, "--preset", "mixtral-8x7b", "--model", "vocab=32000"]
    for end in ends_of(started(joined(2, free_port()), options), timeout_s=60):
        check_line(end, 2, "GB", "2 CPU")
