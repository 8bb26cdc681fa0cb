"""What the tests cost, printed at their end: how much of it is the making of programs.

Pytest itself prints the slowest tests (`--durations` in pyproject.toml).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILING = "/jax/core/compile/backend_compile_duration"

_COSTS = pytest.StashKey[Counter]()


def pytest_configure(config: pytest.Config) -> None:
    """Count from here on what this process spends on programs."""
    costs = config.stash[_COSTS] = Counter()

    def listen(event: str, duration_s: float, **_: Any) -> None:
        if event in (LOWERING, COMPILING):
            costs[event] += duration_s
            costs["programs"] += event == COMPILING

    jax.monitoring.register_event_duration_secs_listener(listen)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of all tests, where they are reported."""
    _tests_s[0] += report.duration


_tests_s = [0.0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the costs of a worker to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["costs"] = dict(session.config.stash[_COSTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the costs of a worker of pytest-xdist that has ended."""
    costs = getattr(node, "workeroutput", {}).get("costs", {})
    node.config.stash[_COSTS].update(costs)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the share of programs in the seconds of all tests."""
    costs, tests_s = config.stash[_COSTS], _tests_s[0]
    made_s = costs[LOWERING] + costs[COMPILING]
    if not tests_s:  # Nothing has run, as with --collect-only.
        return
    terminalreporter.write_line(
        f"{tests_s:.0f} s of tests, of which {made_s:.0f} s ({made_s / tests_s:.0%}) "
        f"lowered and compiled {costs['programs']} programs"
    )
