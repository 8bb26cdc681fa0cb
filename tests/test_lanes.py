"""The slow lane drops slow cases alone, and no draw leaves one out for ever."""

import pytest

TESTS = """
import pytest

slow = [pytest.param(n, marks=pytest.mark.slow) for n in range(3)]

@pytest.mark.parametrize("case", ["fast", *slow])
def test_some(case): pass

@pytest.mark.slow
def test_alone(): pass

def test_fast(): pass
"""


@pytest.fixture
def ran(pytester: pytest.Pytester):
    """Options -> the names of the tests that run with them."""
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = slow")

    def names(*options: str) -> set[str]:
        result = pytester.runpytest_inprocess("-v", "-p", "tests.lanes", *options)
        lines = [line for line in result.outlines if " PASSED" in line]
        return {line.split("::")[1].split(" PASSED")[0] for line in lines}

    return names


def test_one_slow_case_of_each_test_runs_and_every_fast_one(ran):
    always = {"test_some[fast]", "test_alone", "test_fast"}
    draws = [
        ran("--slow-cases", "1", "--draw", str(draw)) - always for draw in range(3)
    ]
    assert [len(draw) for draw in draws] == [1, 1, 1]
    assert set.union(*draws) == {f"test_some[{n}]" for n in range(3)}
    assert always < ran("--slow-cases", "1")


def test_without_the_option_every_slow_case_runs(ran):
    assert len(ran()) == 6
