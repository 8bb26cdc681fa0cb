"""Several processes started wrongly: one clear line of who can tell, all end soon."""

import pytest

from tests.multiprocess.children import (
    ends_of,
    free_port,
    joined,
    killed_if_raised,
    start,
)
from tests.multiprocess.test_train import OPTIONS, wait_for_steps

pytestmark = pytest.mark.slow

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


def one_line(end, status):
    """What an end says, once it has that status and no traceback."""
    assert end.status == status, end.error[-3000:]
    lines = [line for line in end.error.splitlines() if line.startswith("meshpar")]
    assert len(lines) == 1 and "Traceback" not in end.error, end.error[-3000:]
    return lines[0]


def test_three_of_four_name_the_one_that_did_not_come(options):
    hands = joined(4, free_port())[:3]
    for end in ends_of(started(hands, options), timeout_s=60):
        assert "after 20 s process 3 of 4 (the command line) has not come" in one_line(
            end, 75
        )


def test_a_second_job_on_the_port_is_told_and_the_first_goes_on(options, tmp_path):
    hands = joined(2, free_port())
    first = started(hands, [*options, "--steps", "100000"])
    with killed_if_raised(first):
        wait_for_steps(tmp_path / "run" / "metrics.jsonl", 1)
        other = [*options, "--out", str(tmp_path / "other")]
        coordinator, follower = ends_of(started(hands, other), timeout_s=60)
        assert "cannot be had" in one_line(coordinator, 2)
        assert "whose 2 processes are all there" in one_line(follower, 75)
        first[0].terminate()
    assert [end.status for end in ends_of(first, timeout_s=100)] == [143, 143]


def test_a_text_that_one_host_lacks_is_told_by_that_one(options, small_text):
    options[options.index("--text") + 1] = str(small_text.relative_to("/"))
    children = started(joined(2, free_port()), options, ["-c", ELSEWHERE])
    first, second = ends_of(children, timeout_s=60)
    assert "no text at" in one_line(first, 2)
    assert "process 0 on " in one_line(second, 2) and "no text at" in second.error


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--seq", "8"], "process 1 was started with seq=8, process 0 with seq=16"),
        (["--num-processes", "3"], "has num_processes=3, but the job at localhost:"),
    ],
)
def test_other_options_on_one_of_them_are_named(words, match, options):
    hands = joined(2, free_port())
    hands[1] += words
    ends = ends_of(started(hands, options), timeout_s=60)
    assert any(match in end.error for end in ends), ends
    assert all(end.status in (2, 75) for end in ends)
    assert all("Traceback" not in end.error for end in ends)


def test_a_run_too_large_for_the_machine_ends_before_it_takes_memory(options):
    options = [*options, "--preset", "mixtral-8x7b", "--model", "vocab=32000"]
    for end in ends_of(started(joined(2, free_port()), options), timeout_s=60):
        assert "GB for 2 CPU devices" in one_line(end, 2)
