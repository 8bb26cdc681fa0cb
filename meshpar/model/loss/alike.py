"""Compare options of two operations: programs, functions and arrays inside them.

Two blocks are one only if nothing that their operations hold differs: a constant that a
nested program closes over, a derivative of one's own, a callback.
"""

from __future__ import annotations

import enum
import functools
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshpar.trace.walk import Program, steps, without_constants

_DEEPEST = 12
_BOOKKEEPING = {"out_trees"}
"""Options that a call fills in for itself."""


def alike(x: Any, y: Any, depth: int = 0) -> bool:
    """Return True if two options are equal, whatever objects hold them.

    Functions are equal if they have the same code, and what they close over is equal.
    """
    if x is y:
        return True
    if depth > _DEEPEST or type(x) is not type(y):
        return False
    deeper = functools.partial(alike, depth=depth + 1)
    if isinstance(x, ClosedJaxpr | Jaxpr):
        return _same_program(x, y, depth)
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return same_array(x, y)
    if isinstance(x, Mapping):
        compared = x.keys() - _BOOKKEEPING
        return x.keys() == y.keys() and all(deeper(x[key], y[key]) for key in compared)
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(deeper, x, y))
    if isinstance(x, types.FunctionType):
        return x.__code__ is y.__code__ and deeper(_closed_over(x), _closed_over(y))
    if isinstance(x, functools.partial):
        parts = [(one.func, one.args, one.keywords) for one in (x, y)]
        return deeper(*parts)
    if isinstance(x, types.MethodType):
        return deeper((x.__func__, x.__self__), (y.__func__, y.__self__))
    if hasattr(x, "transforms") and hasattr(x, "f"):  # A user's function under JAX's.
        return deeper(x.f, y.f)
    fields = _fields(x), _fields(y)
    if fields[0] and not isinstance(x, enum.Enum):
        return deeper(*fields)
    if callable(x):
        return False
    texts = [re.sub(r"0x[0-9a-f]+", "", str(one)) for one in (x, y)]
    return texts[0] == texts[1]


def same_array(x: Any, y: Any) -> bool:
    """Return True if two constants are equal; NaN is equal to NaN."""
    if x is None or y is None:
        return x is y
    is_inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return x is y or np.array_equal(x, y, equal_nan=bool(is_inexact))


def _same_program(x: Program, y: Program, depth: int) -> bool:
    """Return True if two programs have the same operations on the same constants."""
    constants = getattr(x, "consts", ()), getattr(y, "consts", ())
    if len(constants[0]) != len(constants[1]) or not all(map(same_array, *constants)):
        return False
    one, other = without_constants(x), without_constants(y)
    if str(one) != str(other):  # Names of variables are given in order.
        return False
    pairs = zip(steps(one), steps(other), strict=True)
    return all(
        alike(a.params, b.params, depth + 1)
        and all(map(_same_operand, a.invars, b.invars))
        for a, b in pairs
    )


def _same_operand(u: Any, v: Any) -> bool:
    if isinstance(u, Literal) and isinstance(v, Literal):
        return same_array(u.val, v.val)
    return isinstance(u, Literal) == isinstance(v, Literal)


def _closed_over(function: types.FunctionType) -> tuple:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, wherever its class keeps them."""
    classes = type(value).__mro__
    names = [name for one in classes for name in vars(one).get("__slots__", ())]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {name: one for name, one in found.items() if not name.startswith("__")}
