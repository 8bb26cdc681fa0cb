"""How far the planner was off for published runs on like devices of like models.

`known_errors.json` has the range of each regime, from the rows of
`meshpar plan --validate` that fitted nothing. A plan prints that of its own regime;
`python -m recipes.bench.planner_validation --write` makes the file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

LONG_SEQ = 32_768
"""Tokens of a sequence from which attention is most of a step."""

FILE = Path(__file__).with_suffix(".json")


class ErrorRange(NamedTuple):
    """Measured over planned step time of the published runs of one regime.

    Args:
        num_runs: Number of runs.
        least, most: Smallest and largest of the ratios, 1 included.
    """

    num_runs: int
    least: float
    most: float

    def step_range_s(self, step_s: float) -> tuple[float, float]:
        """Return the least and most seconds of a planned step, by these runs."""
        return step_s * self.least, step_s * self.most


def regime(device: str, kind: str) -> str:
    """Return the name of a regime, for which memory sizes of a card are alike.

    Args:
        device: Name of the device.
        kind: Kind of the models, in words.

    Example:
        >>> regime("h100-80gb", "dense models"), regime("tpu-v5p", "volumes")
        ('h100, dense models', 'tpu-v5p, volumes')
        >>> regime("h100-80gb+a100-80gb", "dense models")
        'h100+a100, dense models'
    """
    return f"{re.sub(r'-[0-9]+gb(?=[+]|$)', '', device)}, {kind}"


def error_range(name: str) -> ErrorRange | None:
    """Return the range of a regime; None if no published run is of it."""
    found = _ranges().get(name)
    return None if found is None else ErrorRange(**found)


@cache
def _ranges() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())
