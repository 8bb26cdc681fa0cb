"""How far a layout's numbers may lie from those of one device, and why.

fp32: a fixed relative error, `FP32_BOUND`. The orders of summation differ between
layouts, which moves results by a few units of roundoff (6e-8 each); a wrong or missing
term moves them by orders of magnitude more.

bf16: a bound that grows with the roundings that a result went through. After n
roundings, each a factor 1 + d with |d| <= u and, for distinct roundings, independent d
of mean zero, the product of the factors is 1 + t with

    |t| <= gamma(n) = exp(L sqrt(n) u + n u^2 / (1 - u)) - 1

with a probability of at least 1 - 2 exp(-L^2 (1 - u)^2 / 2): Higham and Mary 2019, "A
new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
theorem 2.4. Here

    u  unit roundoff of bf16, 2^-8
    L  `CONFIDENCE`, 2
    n  the longest chain of roundings from the parameters to the result, counted in the
       program itself (`rounding_chains`): it grows linearly with depth, gamma with its
       square root

The root mean square of t is at most sqrt(n) u to first order, which is L = 1, for the
variance of each d is at most u^2; and the relative Frobenius error of a tensor is a
root mean square over its values. L = 2 leaves room for tensors of few values.

The theorem is about products of factors. Where terms of both signs are added, the sum
shrinks by cancellation, and with independent signs so do the errors; that they shrink
alike is the heuristic in the bound. Every report has the largest error beside it: over
120 cases of all families (`meshpar fuzz --num 40`, seeds 0, 1 and 2) the worst bf16
gradient used half of its bound (0.060 of 0.12), the worst fp32 array a fifth (2.1e-6).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.trace.primitives import JOINS, MOVES, RESHAPES
from meshpar.trace.walk import Program, programs_in, walk, without_constants

FP32_BOUND = 1e-5
CONFIDENCE = 2.0
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}

_BF16 = jnp.dtype(jnp.bfloat16)

_EXACT = (RESHAPES | MOVES | JOINS) | {
    *("gather", "max", "min", "neg", "reduce_max", "select_n", "stop_gradient"),
    *("optimization_barrier", "name", "sharding_constraint"),
}
"""Primitives whose results are values that they were given: nothing is rounded."""

_SUMS = {"dot_general", "reduce_sum", "cumsum", "scatter-add"}


def bf16_bound(num_roundings: int) -> float:
    """Largest relative error after a chain of bf16 roundings, gamma above.

    Example:
        >>> round(bf16_bound(1), 4), round(bf16_bound(100), 4)
        (0.0079, 0.0829)
    """
    unit = UNIT_ROUNDOFF["bf16"]
    chain = CONFIDENCE * math.sqrt(num_roundings) * unit
    return math.expm1(chain + num_roundings * unit**2 / (1 - unit))


def rounding_chains(program: ClosedJaxpr, *, sum_parts: int = 1) -> list[int]:
    """For each result, the most bf16 roundings that lie between it and the arguments.

    Every bf16 result of arithmetic counts one, a loop as often as it runs. A sum counts
    `sum_parts`, for its parts may be rounded and added one after another. What a called
    function does counts for each of its results: never too few.

    Args:
        program: Of one device, from `jax.make_jaxpr`.
        sum_parts: Devices that one sum may be split over.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x: (x * x + x, x.astype(jnp.float32)))
        >>> rounding_chains(program(jnp.ones(3, jnp.bfloat16)))
        [2, 0]
    """
    return _chains(program, sum_parts)


def _chains(program: Program, sum_parts: int) -> list[int]:
    def apply(equation: JaxprEqn, before: list[int]) -> list[int]:
        inside = _inside(equation, sum_parts)
        return [
            max(before, default=0)
            + (inside or _roundings(equation, variable, sum_parts))
            for variable in equation.outvars
        ]

    given = [0] * len(without_constants(program).invars)
    return walk(program, given, apply, lambda value: 0)


def _inside(equation: JaxprEqn, sum_parts: int) -> int:
    """Roundings of the programs inside an operation, a loop's as often as it runs."""
    inner = [
        max(_chains(program, sum_parts), default=0) for program in programs_in(equation)
    ]
    return max(inner, default=0) * equation.params.get("length", 1)


def _roundings(equation: JaxprEqn, variable: Any, sum_parts: int) -> int:
    name = equation.primitive.name
    if getattr(variable.aval, "dtype", None) != _BF16 or name in _EXACT:
        return 0
    return sum_parts if name in _SUMS else 1
