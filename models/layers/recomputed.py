"""Functions whose backward keeps their inputs only: what costs no matmul to repeat.

Without it a bf16 block keeps fp32 copies of every step of a norm, and six arrays for a
GELU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def recomputed(function: Callable[..., jax.Array], *fixed: Any) -> Callable[..., Any]:
    """`function(*fixed, ...)` of arrays; its backward runs it again."""
    # Inside the loop over blocks XLA cannot merge the two runs anyway.
    return jax.checkpoint(functools.partial(function, *fixed), prevent_cse=False)
