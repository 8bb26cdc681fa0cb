"""JAX's own errors of a module's code, in the words of who wrote it."""

from __future__ import annotations

import traceback
from pathlib import Path

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
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not set(Path(frame.filename).parts) & set(_PACKAGES)
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return InputError(
        f"{called} asks for the number in an array while it is traced{where}, as "
        "`if scope.layer == 0` does; choose with jnp.where or jax.lax.cond, or give "
        "blocks that differ a group of their own (groups=)"
    )
