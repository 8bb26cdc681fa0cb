"""The efficiency with which the planner's times come closest to measured steps; no jax.

Two numbers are fitted: how much of its work a device achieves, and how much of its
links. Each scales what the device had, in the mean square of the logarithm of predicted
over measured; one plan alone, or plans that send nothing, fit the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from scipy.optimize import minimize

from meshpar.planner.cost.estimate import Estimate, estimate_run

WORK = ("matmul", "attention", "memory")
LINKS = ("link", "network")
_FAR = 0.7  # half, as a logarithm
_LEAST = 1e-4
"""Of a fraction, however slow the devices are."""


def fitted_efficiency(
    plans: Sequence[Estimate], measured_s: Sequence[float]
) -> tuple[dict[str, float], list[float]]:
    """Fields of `Efficiency` that fit, and every plan's time with them.

    Args:
        plans: As predicted, all on the same cluster.
        measured_s: A step of each.
    """
    known = plans[0].run.cluster.device.efficiency
    of_links = len(plans) > 1 and any(plan.time.exposed_s for plan in plans)

    def at(logs: Sequence[float]) -> dict[str, float]:
        scales = [*map(math.exp, logs), 1.0][:2]
        return {
            name: min(1.0, max(_LEAST, getattr(known, name) * scale))
            for names, scale in zip((WORK, LINKS), scales, strict=True)
            for name in names
        }

    def error(logs: Sequence[float]) -> float:
        found = times_s(plans, at(logs))
        pairs = zip(found, measured_s, strict=True)
        return sum(math.log(one / s) ** 2 for one, s in pairs)

    # How much longer all of them took together is where to start, and far to look.
    slower = sum(measured_s) / sum(plan.step_s for plan in plans)
    start = [-math.log(slower)] + [0.0] * of_links
    corners = [
        [log - _FAR * (corner == i) for i, log in enumerate(start, 1)]
        for corner in range(len(start) + 1)
    ]
    options = {"initial_simplex": corners, "xatol": 1e-3, "fatol": 1e-9}
    best = minimize(error, start, method="Nelder-Mead", options=options)
    efficiency = at(list(best.x))
    return efficiency, times_s(plans, efficiency)


def times_s(plans: Sequence[Estimate], efficiency: dict[str, float]) -> list[float]:
    """Every plan's time with other fields of `Efficiency`."""
    cluster = plans[0].run.cluster
    changed = replace(cluster.device.efficiency, **efficiency)
    other = replace(cluster, device=replace(cluster.device, efficiency=changed))
    return [estimate_run(replace(plan.run, cluster=other)).step_s for plan in plans]
