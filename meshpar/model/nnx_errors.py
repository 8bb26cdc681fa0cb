"""JAX's own errors of a module's code, in the words of who wrote it."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

import jax

from meshpar.errors import InputError

TRACED_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors where Python asks for a number that is only known as a step runs."""

_PACKAGES = ("jax", "jaxlib", "flax", "meshpar")


def traced_number(called: str, error: Exception) -> InputError:
    """The error of code that asks for a number which is not known as it is traced.

    Args:
        called: The method, in words.
        error: JAX's, one of `TRACED_NUMBER`.
    """
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_of_packages(frame)
    ]
    where = lines[-1] if lines else ""
    return InputError(
        f"{called} asks for the number in an array while it is traced{where}, as "
        "`if scope.layer == 0` does; choose with jnp.where or jax.lax.cond, or give "
        "blocks that differ a group of their own (groups=)",
        key="model.traced_number",
    )


def _is_of_packages(frame: FrameType) -> bool:
    """By the module's name: a user's folders may have the name of a package."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES
