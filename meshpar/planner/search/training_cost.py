"""Time, money and failures of a whole training under a plan."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshpar.errors import InputError
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.cost.seconds import host_s

RESTART_S = 600.0
"""Default time from a failure to the next step: "less than 10 minutes" to find what
failed (Jiang et al. 2024, MegaScale, section 6.3)."""

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_MOST_EXPONENT = 700.0  # of a float's e^x


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training: its length, prices and failures.

    Args:
        tokens: Tokens of the whole training.
        price: Price of a device for an hour, in any currency; None to leave it out.
        mtbf_s: Mean time between failures of the whole machine; None for no failures.
        checkpoint_s: Time that a checkpoint stops the training; None for the time to
            copy a device's parameters and optimizer state to its host, which writes
            them while the training goes on.
        restart_s: Time from a failure to the first step again.

    Raises:
        InputError: A number that is not positive, or finite.
    """

    tokens: float
    price: float | None = None
    mtbf_s: float | None = None
    checkpoint_s: float | None = None
    restart_s: float = RESTART_S

    def __post_init__(self) -> None:
        for name in ("tokens", "price", "mtbf_s", "checkpoint_s", "restart_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(
                    f"{name}={value}: must be above 0, and finite",
                    key="value.not_positive",
                )


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of a training under one plan.

    Args:
        steps: Number of steps.
        train_s: Time from start to end, failures included.
        device_hours: Hours of all devices together.
        price: Price of these hours; None without a price of one.
        goodput: Fraction of the time spent on steps that last; 1 without failures.
        checkpoint_s: Time that each checkpoint stops the training; 0 without failures.
        checkpoint_interval_s: Time between checkpoints; infinite without failures.
        failures: Expected number of failures.
    """

    steps: int
    train_s: float
    device_hours: float
    price: float | None
    goodput: float
    checkpoint_s: float
    checkpoint_interval_s: float
    failures: float

    @property
    def days(self) -> float:
        """The time in days."""
        return self.train_s / _DAY_S

    @property
    def text(self) -> str:
        """Days, device hours, money and failures in words."""
        parts = [f"{self.steps:,} steps in {self.days:,.3g} days"]
        parts.append(f"{self.device_hours:,.0f} device hours")
        if self.price is not None:
            parts.append(f"costs {self.price:,.0f}")
        if self.failures:
            parts.append(
                f"goodput {self.goodput:.1%} with {self.failures:,.1f} failures, a "
                f"checkpoint of {self.checkpoint_s:.3g} s every "
                f"{self.checkpoint_interval_s / 60:,.3g} min"
            )
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """`training` of a plan in what `meshpar plan --json` prints."""
        interval_s = self.checkpoint_interval_s
        finite_s = interval_s if math.isfinite(interval_s) else None
        return {**asdict(self), "checkpoint_interval_s": finite_s}


def training_cost(plan: Estimate, training: Training) -> TrainingCost:
    """Return time, money and failures of a whole training.

    Raises:
        InputError: Failures are so frequent that it never ends.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.cost.estimate import estimate
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=64),
        ...     "fsdp=64,remat=full,precision=bf16",
        ...     global_batch=64,
        ...     seq=8192,
        ... )
        >>> training_cost(plan, Training(tokens=64 * 8192 * 1000)).steps
        1000
    """
    run = plan.run
    steps = math.ceil(training.tokens / (run.global_batch * run.seq))
    work_s = train_s = steps * plan.step_s
    checkpoint_s, interval_s, failures = 0.0, math.inf, 0.0
    if training.mtbf_s is not None:
        state = plan.memory.parameter_bytes + plan.memory.optimizer_bytes
        checkpoint_s = training.checkpoint_s or host_s(run, state)
        interval_s = max(plan.step_s, best_interval_s(checkpoint_s, training.mtbf_s))
        train_s = with_failures_s(
            work_s,
            interval_s=interval_s,
            checkpoint_s=checkpoint_s,
            restart_s=training.restart_s,
            mtbf_s=training.mtbf_s,
        )
        failures = train_s / training.mtbf_s
    hours = train_s / _HOUR_S * run.cluster.num_devices
    return TrainingCost(
        steps=steps,
        train_s=train_s,
        device_hours=hours,
        price=None if training.price is None else training.price * hours,
        goodput=work_s / train_s,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=interval_s,
        failures=failures,
    )


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that loses least time.

        sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d

    with a checkpoint's time d and the mean time between failures M; M where d is 2M or
    more. The first factor alone is Young's.

    Reference: Young 1974, "A first order approximation to the optimum checkpoint
    interval"; Daly 2006, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", eq. 37.

    Example:
        >>> round(best_interval_s(60, 24 * 3600)), round((2 * 60 * 24 * 3600) ** 0.5)
        (3180, 3220)
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    half = checkpoint_s / (2 * mtbf_s)
    more = 1 + math.sqrt(half) / 3 + half / 9
    return math.sqrt(2 * checkpoint_s * mtbf_s) * more - checkpoint_s


def with_failures_s(
    work_s: float,
    *,
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    mtbf_s: float,
) -> float:
    """Return the expected time of work with independent failures.

        M e^(R/M) (e^((t + d)/M) - 1) work / t

    with the time M between failures, R of a restart, t of work and d of a checkpoint.

    Reference: Daly 2006, eq. 20.

    Raises:
        InputError: Failures are so frequent that the work never ends.
    """
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if max(exponent, restart_s / mtbf_s) > _MOST_EXPONENT:
        raise InputError(
            f"a failure every {mtbf_s:g} s, a restart of {restart_s:g} s and "
            f"{interval_s + checkpoint_s:g} s between checkpoints: the training never "
            "ends; give a longer --mtbf or a shorter restart",
            key="plan.training_never_ends",
        )
    tries = math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    return mtbf_s * tries * work_s / interval_s
