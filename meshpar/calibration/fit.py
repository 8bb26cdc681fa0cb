"""The planner's constants that come closest to measured times; no jax.

Each is fitted through the planner's own formulas, in the mean square of the logarithm
of predicted over measured, so that small and large sizes count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from meshpar.planner.machine.link import Link


def matmul_flops(
    shapes: Sequence[tuple[int, int, int]],
    measured_s: Sequence[float],
    *,
    value_bytes: int,
    memory_bytes_per_s: float,
    launch_s: float,
) -> float:
    """FLOP/s of a matmul of infinite size.

        time = launch + hypot(2 rows inner columns / FLOPs, operand bytes / memory)

    Example:
        >>> round(matmul_flops([(10, 10, 10)], [2e-6], value_bytes=4,
        ...                    memory_bytes_per_s=1e12, launch_s=0.0) / 1e6)
        1000
    """

    def expected_s(log_flops: float) -> list[float]:
        return [
            launch_s
            + math.hypot(
                2 * rows * inner * columns / math.exp(log_flops),
                (rows * inner + inner * columns + rows * columns)
                * value_bytes
                / memory_bytes_per_s,
            )
            for rows, inner, columns in shapes
        ]

    rates = [
        2 * math.prod(shape) / s for shape, s in zip(shapes, measured_s, strict=True)
    ]
    around = math.log(min(rates)) - 1, math.log(max(rates)) + 3
    found = minimize_scalar(
        lambda guess: _error(expected_s(guess), measured_s),
        bounds=around,
        method="bounded",
    )
    return math.exp(found.x)


def link_of(
    expected: Sequence[Callable[[Link], float]], measured_s: Sequence[float]
) -> Link:
    """The link on which the formulas give what was measured.

    Args:
        expected: Time of each collective on a link.
        measured_s: The same as measured.
    """

    def at(logs: Sequence[float]) -> Link:
        speed, hop_s = map(math.exp, logs)
        return Link(name="host", bytes_per_s=speed, hop_s=hop_s)

    def error(logs: Sequence[float]) -> float:
        link = at(logs)
        return _error([each(link) for each in expected], measured_s)

    # From several starts: where one term is small everywhere, the error is flat.
    starts = [(math.log(1e9), math.log(s)) for s in (1e-6, 1e-5, 1e-4, 1e-3)]
    found = [minimize(error, start, method="Nelder-Mead") for start in starts]
    return at(min(found, key=lambda one: one.fun).x)


def attention_constants(fractions: dict[int, float]) -> tuple[float, float]:
    """`attention` and `attention_head_dim` from the peak's share at two head sizes.

        share = attention head_dim / (head_dim + attention_head_dim)

    Example:
        >>> attention_constants({64: 0.4, 128: 0.5})
        (0.6666666666666666, 42.666666666666664)
    """
    (small, low), (large, high) = sorted(fractions.items())
    # 1 / share is a line in 1 / head_dim.
    slope = (1 / low - 1 / high) / (1 / small - 1 / large)
    whole = 1 / high - slope / large
    if whole <= 0 or slope <= 0:
        return min(1.0, high), 0.0
    return min(1.0, 1 / whole), slope / whole


def _error(expected_s: Sequence[float], measured_s: Sequence[float]) -> float:
    ratios = np.asarray(expected_s) / np.asarray(measured_s)
    return float(np.mean(np.log(ratios) ** 2))
