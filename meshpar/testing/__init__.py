"""What test suites of meshpar's users need: a pytest plugin and layout equivalence."""

from typing import Any

__all__ = ["check_layouts"]


def __getattr__(name: str) -> Any:
    # Every pytest run imports this package for its plugin: JAX comes when asked for.
    if name == "check_layouts":
        from meshpar.testing.equivalence import check_layouts

        return check_layouts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
