"""Assertions for test suites: programs, equal layouts, virtual devices.

`assertions` counts collectives and bytes of a compiled step, `equivalence` compares
layouts with one device, and `plugin` starts virtual devices for pytest. The library
imports nothing from here.
"""

import importlib
from typing import Any

_HOMES = {
    "assert_collectives": "meshpar.testing.assertions",
    "assert_flat_in": "meshpar.testing.assertions",
    "assert_no_surprises": "meshpar.testing.assertions",
    "assert_overlapped": "meshpar.testing.assertions",
    "assert_peak_bytes": "meshpar.testing.assertions",
    "assert_replicated_bytes_below": "meshpar.testing.assertions",
    "check_generation": "meshpar.testing.generation",
    "check_layouts": "meshpar.testing.equivalence",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Every pytest run imports this package for its plugin: JAX comes when asked for.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
