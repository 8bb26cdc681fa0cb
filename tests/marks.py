"""Cases that only `make test-full` runs."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case of `pytest.mark.parametrize`, for `make test-full`."""
    return pytest.param(*values, marks=pytest.mark.slow)
