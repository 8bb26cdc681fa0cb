"""Find derivatives that a user wrote, which a trace does not show."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.trace.walk import equations

_UNKNOWN = "an unknown place"
_MOST_NESTED = 6
"""Closures within one another that are searched for the rule of a `custom_jvp`."""


def own_derivatives(program: ClosedJaxpr) -> list[str]:
    """Return file and line of each user-written derivative, in program order.

    Derivatives of meshpar, JAX, Flax and optax are left out. `jax.custom_gradient`
    hides the function that it calls, so all of its derivatives count as the user's.
    """
    places = []
    for equation in equations(program):
        name = equation.primitive.name
        if name.startswith("custom_vjp_call"):
            places.append(_vjp_place(equation))
        elif name.startswith("custom_jvp_call"):
            places += _jvp_places(equation)
        elif name == "linear_call":
            places.append(_UNKNOWN)
    folders, testing = _own_folders()
    return [
        place
        for place in dict.fromkeys(places)
        if place.startswith(testing) or not place.startswith(folders)
    ]


def _vjp_place(equation: JaxprEqn) -> str:
    """Return `file:line` of the backward of a `custom_vjp`."""
    function = getattr(equation.params.get("bwd"), "f", None)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None or code.co_filename.endswith("custom_derivatives.py"):
        return _UNKNOWN
    return _place(code)


def _jvp_places(equation: JaxprEqn) -> list[str]:
    """Return `file:line` of a `custom_jvp` function, and of its rule."""
    program: Any = equation.params.get("call_jaxpr")
    info: Any = getattr(getattr(program, "jaxpr", None), "debug_info", None)
    file = getattr(info, "func_filename", None)
    first = f"{file}:{info.func_lineno}" if file else _UNKNOWN
    rule = equation.params.get("jvp_jaxpr_fun") or equation.params.get(
        "jvp_jaxpr_thunk"
    )
    return [first, *map(_place, _codes(rule, _MOST_NESTED))]


def _codes(function: Any, most: int) -> Iterator[CodeType]:
    """Yield the code of a function, and of those in its closures."""
    if most == 0 or function is None:
        return
    if isinstance(function, functools.partial):
        yield from _codes(function.func, most)
    elif isinstance(getattr(function, "__code__", None), CodeType):
        yield function.__code__
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
            yield from _codes(content, most - 1)
    elif hasattr(function, "f") and hasattr(function, "transforms"):
        yield from _codes(function.f, most - 1)


def _place(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


@functools.cache
def _own_folders() -> tuple[tuple[str, ...], str]:
    """Return the folders whose derivatives are not a user's, and an exception in them.

    `meshpar.testing` writes derivatives in place of a user's.
    """
    own = Path(__file__).parents[1]
    folders = [own, (own / "models").resolve()]
    for name in ("flax", "jax", "optax"):
        spec = importlib.util.find_spec(name)
        folders += [Path(spec.origin).parent] if spec and spec.origin else []
    own_folders = tuple(f"{folder}{os.sep}" for folder in folders)
    return own_folders, f"{own / 'testing'}{os.sep}"
