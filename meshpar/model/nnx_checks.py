"""Errors of `from_nnx` about modules and their builders, in the user's own names."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from meshpar.errors import InputError, nearest


def check_builder(builder: Any, argument: str) -> None:
    """Raise if a builder cannot be called with `nnx.Rngs` alone.

    Args:
        builder: The builder.
        argument: Argument of `from_nnx` that gave it.

    Raises:
        InputError: It is no function or class, or takes other arguments.
    """
    given = f"from_nnx({argument}={getattr(builder, '__name__', builder)!s})"
    if isinstance(builder, nnx.Module):
        name = type(builder).__name__
        raise InputError(
            f"from_nnx({argument}={name}(...)): a module that is built; give what "
            f"builds one from nnx.Rngs, such as {argument}={name}",
            key="model.module_already_built",
        )
    if not callable(builder):
        raise InputError(
            f"{given}: give a function that builds a module from nnx.Rngs, such as "
            "its class",
            key="model.builder_not_callable",
        )
    # A module's class hides its own arguments behind those of its metaclass.
    made_by: Any = builder
    if isinstance(builder, type):
        made_by = builder.__init__  # type: ignore[misc]
    if not _takes(made_by, 1 + isinstance(builder, type)):
        raise InputError(
            f"{given}{inspect.signature(made_by)}: it is called with nnx.Rngs alone; "
            "give a lambda rngs: ... that passes what it needs",
            key="model.wrong_builder_arguments",
        )


def check_module(module: Any, argument: str) -> None:
    """Raise if a builder made no Flax NNX module.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(module, nnx.Module):
        raise InputError(
            f"from_nnx({argument}=...) builds a {type(module).__name__}, no "
            "flax.nnx.Module; return one",
            key="model.not_a_module",
        )


def check_array(value: Any, argument: str, path: str) -> None:
    """Raise if JAX cannot take what Flax takes for an array of a module.

    Raises:
        InputError: It holds text, objects, or several arrays.
    """
    try:
        jax.typeof(value)
    except TypeError as error:
        dtype = f" ({value.dtype})" if hasattr(value, "dtype") else ""
        raise InputError(
            f"from_nnx({argument}=...): the module holds {path!r} of type "
            f"{type(value).__name__}{dtype}, which is no array of numbers; keep one in "
            "each nnx.Variable, and text in a tuple",
            key="model.not_an_array",
        ) from error


def check_method(kind: type, what: str, method: str, arguments: Sequence[str]) -> None:
    """Raise if a module lacks a method, or has one with other arguments.

    Args:
        kind: The module's class.
        what: The argument of `from_nnx`, in words.
        method: The method.
        arguments: Names of its arguments, without the module.

    Raises:
        InputError: It does.
    """
    wanted = f"{method}({', '.join(arguments)})"
    # Not by `getattr`, which finds the metaclass's `__call__` too.
    found = next(
        (vars(one)[method] for one in kind.__mro__ if method in vars(one)), None
    )
    if not callable(found):
        own = [name for name, value in vars(kind).items() if callable(value)]
        names = [name for name in own if not name.startswith("_")]
        hint = f"; {nearest(method, names)}" if names else ""
        raise InputError(
            f"{what}: the module has no method {wanted}{hint}",
            key="model.missing_method",
        )
    if inspect.isfunction(found) and not _takes(found, 1 + len(arguments)):
        raise InputError(
            f"{what}: {method}{inspect.signature(found)} is called as {wanted}; take "
            "those arguments",
            key="model.wrong_method_arguments",
        )


def check_axes(
    what: str, path: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> None:
    """Raise if sharding metadata has another number of dims than the array.

    Raises:
        InputError: It has more, or fewer.
    """
    if len(axes) != len(shape):
        raise InputError(
            f"{what}: {path} of shape {shape} has {len(shape)} dims, but its sharding "
            f"metadata {axes} names {len(axes)}; name every dim, or write None",
            key="model.wrong_number_of_axes",
        )


def _takes(function: Any, num_arguments: int) -> bool:
    """Return True if a function can be called with this many positional arguments."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True


TRACED_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors if Python asks for a number that is unknown until a step runs."""

_PACKAGES = ("jax", "jaxlib", "flax", "meshpar")


def traced_number(called: str, error: Exception) -> InputError:
    """Return the error of code that asks for a number which is unknown in a trace.

    Args:
        called: The method, in words.
        error: JAX's error, one of `TRACED_NUMBER`.
    """
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        # Not by its path: a user's folder may have the name of a package.
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PACKAGES
    ]
    where = lines[-1] if lines else ""
    return InputError(
        f"{called} asks for the number in an array while it is traced{where}, as "
        "`if scope.layer == 0` does; choose with jnp.where or jax.lax.cond, or give "
        "blocks that differ a group of their own (groups=)",
        key="model.traced_number",
    )
