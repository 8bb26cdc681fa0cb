"""Fit the planner's constants to measured times; no jax.

Each fit goes through the planner's own formulas and minimizes the mean square of the
logarithm of predicted over measured, so that small and large sizes count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from meshpar.planner.cost.estimate import Estimate, estimate_run
from meshpar.planner.machine.cluster import Link

WORK = ("matmul", "attention", "memory")
LINKS = ("link", "network")
_FAR = 0.7  # half, as a logarithm
_LEAST = 1e-4
"""Least fraction, however slow the devices are."""


def matmul_flops(
    shapes: Sequence[tuple[int, int, int]],
    measured_s: Sequence[float],
    *,
    value_bytes: int,
    memory_bytes_per_s: float,
    launch_s: float,
) -> float:
    """Fit the FLOP/s of a matmul of infinite size.

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
        lambda guess: _mean_error(expected_s(guess), measured_s),
        bounds=around,
        method="bounded",
    )
    return math.exp(found.x)


def fitted_link(
    expected: Sequence[Callable[[Link], float]], measured_s: Sequence[float]
) -> Link:
    """Fit the link on which the formulas give the measured times.

    Args:
        expected: Time of each collective as a function of the link.
        measured_s: Measured time of each.
    """

    def at(logs: Sequence[float]) -> Link:
        speed, hop_s = map(math.exp, logs)
        return Link(name="host", bytes_per_s=speed, hop_s=hop_s)

    def error(logs: Sequence[float]) -> float:
        link = at(logs)
        return _mean_error([each(link) for each in expected], measured_s)

    # From several starts: where one term is small everywhere, the error is flat.
    starts = [(math.log(1e9), math.log(s)) for s in (1e-6, 1e-5, 1e-4, 1e-3)]
    found = [minimize(error, start, method="Nelder-Mead") for start in starts]
    return at(min(found, key=lambda one: one.fun).x)


def attention_constants(fractions: dict[int, float]) -> tuple[float, float]:
    """Fit `attention` and `attention_head_dim` to shares of the peak at two head sizes.

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


def fitted_efficiency(
    plans: Sequence[Estimate], measured_s: Sequence[float]
) -> tuple[dict[str, float], list[float]]:
    """Fit fields of `Efficiency`; return them and every plan's time with them.

    Two factors are fitted: of the fractions in `WORK` and of those in `LINKS`. One plan
    alone, or plans that send nothing, fit the first.

    Args:
        plans: Predictions, all on the same cluster.
        measured_s: Measured time of a step of each.
    """
    known = plans[0].run.cluster.device.efficiency
    fits_links = len(plans) > 1 and any(plan.time.exposed_s for plan in plans)

    def at(logs: Sequence[float]) -> dict[str, float]:
        scales = [*map(math.exp, logs), 1.0][:2]
        return {
            name: min(1.0, max(_LEAST, getattr(known, name) * scale))
            for names, scale in zip((WORK, LINKS), scales, strict=True)
            for name in names
        }

    def error(logs: Sequence[float]) -> float:
        pairs = zip(times_s(plans, at(logs)), measured_s, strict=True)
        return sum(math.log(predicted_s / s) ** 2 for predicted_s, s in pairs)

    # Start at how much longer all plans took together.
    slower = sum(measured_s) / sum(plan.step_s for plan in plans)
    start = [-math.log(slower)] + [0.0] * fits_links
    corners = [
        [log - _FAR * (corner == i) for i, log in enumerate(start, 1)]
        for corner in range(len(start) + 1)
    ]
    options = {"initial_simplex": corners, "xatol": 1e-3, "fatol": 1e-9}
    best = minimize(error, start, method="Nelder-Mead", options=options)
    efficiency = at(list(best.x))
    return efficiency, times_s(plans, efficiency)


def times_s(plans: Sequence[Estimate], efficiency: dict[str, float]) -> list[float]:
    """Return every plan's step time with other values of fields of `Efficiency`."""
    cluster = plans[0].run.cluster
    changed = replace(cluster.device.efficiency, **efficiency)
    other = replace(cluster, device=replace(cluster.device, efficiency=changed))
    return [estimate_run(replace(plan.run, cluster=other)).step_s for plan in plans]


def _mean_error(expected_s: Sequence[float], measured_s: Sequence[float]) -> float:
    ratios = np.asarray(expected_s) / np.asarray(measured_s)
    return float(np.mean(np.log(ratios) ** 2))
