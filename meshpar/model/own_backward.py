"""Whether a function has a derivative that a user wrote, of which no trace tells."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.model.equations import equations

_TWISTS = str(Path(__file__).parents[1] / "testing" / "twists.py")
"""Derivatives that are drawn by `meshpar fuzz` in the place of a user's."""


def own_derivatives(program: ClosedJaxpr) -> list[str]:
    """File and line of each derivative that a program's author wrote, in their order.

    Those of the library, JAX, Flax and optax are left out: it is known what they do.
    """
    places = [
        _place(equation)
        for equation in equations(program)
        if equation.primitive.name.startswith(("custom_vjp_call", "custom_jvp_call"))
    ]
    return [place for place in dict.fromkeys(places) if not _is_known(place)]


def _is_known(place: str) -> bool:
    return place.startswith(_known_folders()) and not place.startswith(_TWISTS)


def _place(equation: JaxprEqn) -> str:
    """Where a backward is written, or the function that has a forward derivative."""
    if equation.primitive.name.startswith("custom_jvp"):
        program: Any = equation.params.get("call_jaxpr")
        info: Any = getattr(getattr(program, "jaxpr", None), "debug_info", None)
        file = getattr(info, "func_filename", None)
        return f"{file}:{info.func_lineno}" if file else "a place that JAX hides"
    function = getattr(equation.params.get("bwd"), "f", None)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None:
        return "a place that JAX hides"
    return f"{code.co_filename}:{code.co_firstlineno}"


@functools.cache
def _known_folders() -> tuple[str, ...]:
    own = Path(__file__).parents[1]
    folders = [own, (own / "models").resolve()]
    for name in ("flax", "jax", "optax"):
        spec = importlib.util.find_spec(name)
        folders += [Path(spec.origin).parent] if spec and spec.origin else []
    return tuple(f"{folder}{os.sep}" for folder in folders)
