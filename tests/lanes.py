"""Plugin of the slow lane: `--slow-cases N` runs N of the slow cases of each test."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest

_T = TypeVar("_T")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the lane; without them every slow case runs."""
    group = parser.getgroup("lanes")
    group.addoption(
        "--slow-cases",
        type=int,
        default=0,
        help="slow cases to run of each parametrized test; 0 runs all",
    )
    group.addoption(
        "--draw", type=int, default=0, help="number that other slow cases go with"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect the slow cases that the lane leaves to `make test-all`."""
    count = config.getoption("--slow-cases")
    if not count:
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    kept = {
        id(item)
        for name, group in cases.items()
        for item in chosen(group, count, zlib.crc32(name.encode()) + config.option.draw)
    }
    left = [
        item
        for item in items
        if item.get_closest_marker("slow") and id(item) not in kept
    ]
    config.hook.pytest_deselected(items=left)
    ids = {*map(id, left)}
    items[:] = [item for item in items if id(item) not in ids]


def chosen(cases: Sequence[_T], count: int, draw: int) -> list[_T]:
    """Return `count` of the cases, spread evenly; each is in one of `len(cases)` draws.

    Example:
        >>> chosen("abcdef", 2, draw=1), chosen("abc", 5, draw=1)
        (['b', 'e'], ['a', 'b', 'c'])
    """
    size = len(cases)
    if count >= size:
        return list(cases)
    places = {(draw + step * size // count) % size for step in range(count)}
    return [cases[place] for place in sorted(places)]
