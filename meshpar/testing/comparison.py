"""Errors of a layout's numbers against one device's, their bounds, and their report.

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

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from meshpar import MESH_AXES, Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Params, initial_values
from meshpar.rules.sharding import path_name
from meshpar.testing.batches import Arrays
from meshpar.testing.layout_cases import Case, Choices, refusal
from meshpar.testing.reference import (
    NUM_STEPS,
    Batch,
    Values,
    single_device_loss,
    tree_norm,
)
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


def rounding_chains(program: Program, *, sum_parts: int = 1) -> list[int]:
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

    def apply(equation: JaxprEqn, before: list[int]) -> list[int]:
        name = equation.primitive.name
        inner = itertools.chain.from_iterable(
            rounding_chains(program, sum_parts=sum_parts)
            for program in programs_in(equation)
        )
        inside = max(inner, default=0) * equation.params.get("length", 1)
        own = 0 if name in _EXACT else sum_parts if name in _SUMS else 1
        return [
            max(before, default=0)
            + (inside or own * (getattr(result.aval, "dtype", None) == _BF16))
            for result in equation.outvars
        ]

    given = [0] * len(without_constants(program).invars)
    return walk(program, given, apply, lambda value: 0)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one array is from the single-device program's.

    Args:
        quantity: `initial`, `loss`, `grad_norm`, `gradients`, `parameters` (after the
            last step), `state` (the model's, then) or `copies` (the devices' copies of
            one array, of one another).
        path: The parameter; empty for a scalar.
        error: Relative Frobenius error, or the share of values that differ where the
            bound is 0.
        bound: What it may be at most.
    """

    quantity: str
    path: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """True if the error is within the bound; NaN is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        where = f"{self.quantity} of {self.path}" if self.path else self.quantity
        return f"{where}: error {self.error:.2g}, bound {self.bound:.2g}"


def deviations(
    found: Values, wanted: Values, chains: tuple[int, list[int]] | None
) -> list[Deviation]:
    """Return every array's deviation.

    The error of an array is `|found - wanted| / |wanted|` in the Frobenius norm. An
    array so small that one rounding of the whole tree (all gradients, or all
    parameters) is more than the bound allows is measured against the tree instead:
    the divisor is at least `u / bound * |tree|`, u the unit roundoff. (A key's bias has
    no gradient, whatever the layout; its rounding error is no error.)

    Args:
        found: A layout's.
        wanted: The single-device program's.
        chains: Roundings before the loss and each gradient under bf16; None for fp32.
    """
    leaves = len(jax.tree.leaves(wanted.gradients))
    of_loss, of_gradients = chains or (0, [0] * leaves)
    longest = max(of_gradients)
    roundings = {
        "loss": [of_loss],
        "grad_norm": [longest],
        "gradients": of_gradients,
        # Every step's gradients start from the parameters that the one before has left.
        "parameters": [NUM_STEPS * longest] * leaves,
        "state": [NUM_STEPS * longest] * len(jax.tree.leaves(wanted.state)),
    }
    precision = "fp32" if chains is None else "bf16"
    every = [
        # Parameters that are stored in bf16 start from the rounded values.
        Deviation(
            quantity="initial",
            path=path,
            error=_share_that_differs(one, other.astype(one.dtype)),
            bound=0.0,
        )
        for path, one, other in _pairs(found.initial, wanted.initial)
    ]
    for name, each in roundings.items():
        one, other = getattr(found, name), getattr(wanted, name)
        every += _relative(name, one, other, each, precision)
    return every


def copies(tree: Any) -> list[Deviation]:
    """Compare the copies of each part of an array, bit by bit."""
    found = []
    for path, array in jax.tree.leaves_with_path(tree):
        first: dict[str, np.ndarray] = {}
        worst = 0.0
        for shard in array.addressable_shards:
            part = np.asarray(shard.data)
            other = first.setdefault(str(shard.index), part)
            worst = max(worst, _share_that_differs(part, other))
        name = path_name(path)
        found.append(Deviation(quantity="copies", path=name, error=worst, bound=0.0))
    return found


def _relative(
    quantity: str, found: Any, wanted: Any, chains: list[int], precision: str
) -> Iterator[Deviation]:
    whole = tree_norm(wanted)
    pairs = zip(_pairs(found, wanted), chains, strict=True)
    for (path, one, other), num_roundings in pairs:
        bound = FP32_BOUND if precision == "fp32" else bf16_bound(max(1, num_roundings))
        floor = UNIT_ROUNDOFF[precision] / bound * whole
        divisor = max(tree_norm(other), floor) or 1.0
        wide = np.complex128 if np.iscomplexobj(other) else np.float64
        error = tree_norm(np.subtract(one, other, dtype=wide)) / divisor
        yield Deviation(quantity=quantity, path=path, error=error, bound=bound)


def _pairs(found: Any, wanted: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    pairs = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    for (path, other), one in pairs:
        yield path_name(path), np.asarray(one), np.asarray(other)


def _share_that_differs(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return 1.0
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return float(1 - same.mean())


def bf16_chains(
    model: Model, batch: Arrays, *, sum_parts: int = 1
) -> tuple[int, list[int]]:
    """Count the bf16 roundings before the loss and each gradient, in tree order.

    Counted in the single-device program with bf16 blocks.
    """
    params, state = jax.eval_shape(lambda: initial_values(model, 0))

    def half_loss(params: Params, state: Params, batch: Batch) -> jax.Array:
        half = jax.tree.map(lambda value: value.astype(jnp.bfloat16), params)
        return single_device_loss(
            model, half, state, batch, jnp.uint32(0), jnp.int32(0)
        )[0]

    program = jax.make_jaxpr(jax.value_and_grad(half_loss))(params, state, batch)
    of_loss, *of_gradients = rounding_chains(program, sum_parts=sum_parts)
    return of_loss, of_gradients


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case's comparison.

    Args:
        case: The case.
        deviations: Of every array; empty where the case did not run to its end.
        failure: What ended it, where it did not.
        refused: Key of the error with which the library refuses it, as it must.
        seconds: Wall time, nearly all of it compiling.
    """

    case: Case
    deviations: tuple[Deviation, ...]
    failure: str = ""
    refused: str = ""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if it ran and every deviation is within its bound."""
        return not self.failure and all(deviation.ok for deviation in self.deviations)

    @property
    def worst(self) -> dict[str, Deviation]:
        """The deviation that uses most of its bound, by quantity."""
        return _worst(self.deviations)

    @property
    def summary(self) -> str:
        """One line with the worst error and bound of each quantity."""
        columns = (
            f"{name} {one.error:.1e}/{one.bound:.0e}{'' if one.ok else ' FAILS'}"
            for name, one in self.worst.items()
            if one.bound or not one.ok
        )
        verdict = "ok" if self.ok else "FAIL"
        found = self.failure or ", ".join(columns)
        if self.refused and not self.failure:
            found = f"refused as expected: {self.refused}"
        return f"{verdict} ({self.seconds:.0f} s): {found}"

    def __str__(self) -> str:
        return f"{self.case}\n    {self.summary}"

    def explain(self) -> str:
        """Return what is wrong, and the command that repeats it."""
        wrong = [str(one) for one in self.worst.values() if not one.ok]
        lines = [self.failure] if self.failure else wrong
        again = f"again with: {self.case.command}"
        return "\n".join(
            [str(self.case.layout), *(f"    {x}" for x in (*lines, again))]
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cases, and the smallest failing one that was found from the first failure."""

    results: tuple[Result, ...]
    smallest: Result | None = None

    @property
    def ok(self) -> bool:
        """True if all layouts agree with one device."""
        return all(result.ok for result in self.results)

    def worst(self, precision: str) -> dict[str, Deviation]:
        """Return the deviation that uses most of its bound, by quantity."""
        return _worst(
            deviation
            for result in self.results
            if result.case.layout.precision == precision
            for deviation in result.deviations
        )

    def __str__(self) -> str:
        failed = sum(not result.ok for result in self.results)
        head = f"{len(self.results) - failed} of {len(self.results)} layouts agree"
        lines = [f"{head} with one device (error/bound of the worst array)"]
        lines += map(str, self.results)
        if self.smallest is not None:
            lines += ["", "smallest failing case:", self.smallest.explain()]
        return "\n".join(lines)


def _worst(deviations: Iterable[Deviation]) -> dict[str, Deviation]:
    worst: dict[str, Deviation] = {}
    for one in deviations:
        other = worst.get(one.quantity)
        if other is None or _severity(one) > _severity(other):
            worst[one.quantity] = one
    return worst


def _severity(one: Deviation) -> float:
    if math.isnan(one.error):
        return math.inf
    return one.error / (one.bound or 1e-300)


MAX_TRIES = 40


def shrink(failed: Result, run: Callable[[Case], Result], choices: Choices) -> Result:
    """Return the failure reached by always taking the first simpler failing case.

    Deterministic; gives up after `MAX_TRIES` runs.

    Args:
        failed: Where to start.
        run: Runs a case.
        choices: What says whether a simpler case is valid, and what it may not change.
    """
    tried = {failed.case}
    smaller: Result | None = failed
    while smaller is not None:
        failed, smaller = smaller, None
        for case in simpler_cases(failed.case, choices):
            if case in tried or refusal(case, choices) is not None:
                continue
            if len(tried) > MAX_TRIES:
                return failed
            tried.add(case)
            result = run(case)
            if not result.ok:
                smaller = result
                break
    return failed


def simpler_cases(case: Case, choices: Choices) -> Iterator[Case]:
    """Yield cases one step simpler, largest steps first; they may be invalid."""
    if case.resume_as is not None:
        yield replace(case, resume_as=None)
        for layout in _simpler_layouts(case.resume_as):
            yield replace(case, resume_as=layout)
    for layout in _simpler_layouts(case.layout):
        yield replace(case, layout=layout)
    if case.mask != "full":
        yield replace(case, mask="full")
    fewer_layers = re.sub(r"layers=\d+", "layers=1", case.model)
    if fewer_layers != case.model:
        yield replace(case, model=fewer_layers)
    shards = case.layout.batch_shards * case.layout.microbatches
    if choices.global_batch is None and case.global_batch > shards:
        yield replace(case, global_batch=shards)
    if choices.seq is None and case.seq > 2:
        yield replace(case, seq=max(2, case.seq // 2))
    if case.seed:
        yield replace(case, seed=0)


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    default = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if value == getattr(default, field.name):
            continue
        yield replace(layout, **{field.name: getattr(default, field.name)})
        if field.name in MESH_AXES and value > 2:
            sizes: list[Any] = [2, value // 2] if value > 5 and value % 2 == 0 else [2]
            for size in sizes:
                yield replace(layout, **{field.name: size})
