"""Two sets of values side by side: relative errors and their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshpar.rules.sharding import path_name
from meshpar.testing.bounds import FP32_BOUND, UNIT_ROUNDOFF, bf16_bound
from meshpar.testing.reference import NUM_STEPS, Values, tree_norm


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
    every = [*_bitwise("initial", found.initial, wanted.initial)]
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


def _bitwise(quantity: str, found: Any, wanted: Any) -> Iterator[Deviation]:
    for path, one, other in _pairs(found, wanted):
        # Parameters that are stored in bf16 start from the rounded values.
        error = _share_that_differs(one, other.astype(one.dtype))
        yield Deviation(quantity=quantity, path=path, error=error, bound=0.0)


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
