"""Few cases of many factors, in which each pair of values still meets."""

import itertools
from typing import Any


def every_pair(*factors: Any) -> list[tuple]:
    """Rows of one value a factor; any two values of two factors share a row.

    Most faults of a combination are faults of two of its values (Kuhn, Wallace and
    Gallo 2004, "Software fault interactions and implications for software testing"),
    and the rows are far fewer than the product. Each row is the one of the product that
    has the most pairs not met yet, the first of equals: the rows are always the same.

    Args:
        *factors: Values of each factor; two factors at least.
    """
    product = list(itertools.product(*factors))
    wanted = {pair for row in product for pair in _pairs(row)}
    rows = []
    while wanted:
        row = max(product, key=lambda row: len(wanted & _pairs(row)))
        rows.append(row)
        wanted -= _pairs(row)
    return rows


def _pairs(row: tuple) -> set[tuple]:
    return set(itertools.combinations(enumerate(row), 2))
