"""What a traced `lax.scan` is given, whatever the version of JAX calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Constants of all iterations, and values that one hands to the next.

    JAX 0.12 has no `num_consts` and `num_carry` of a scan. An array of which an
    iteration takes or makes a slice has a dim more outside; all others are constants,
    which come first, and carries.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def add(a, b, c):
        ...     return jax.lax.scan(lambda a, b: (a + b * c, a), a, b)
        >>> program = jax.make_jaxpr(add)(1.0, jnp.arange(3.0), 2.0)
        >>> scan_counts(program.eqns[-1])
        (1, 1)
    """
    inner = equation.params["jaxpr"].jaxpr
    sliced = _with_a_dim_more(equation.invars, inner.invars)
    carries = len(equation.outvars) - _with_a_dim_more(equation.outvars, inner.outvars)
    return len(equation.invars) - sliced - carries, carries


def _with_a_dim_more(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(one.aval.ndim > other.aval.ndim for one, other in pairs)
