"""Steps that went wrong: losses that are not finite, or far above those before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

from meshpar.errors import InputError

Policy = Literal["skip", "rollback", "stop"]
"""What follows a bad step: nothing more, an earlier state, or the end."""

_REMEMBERED = 32
"""Losses whose median is the usual one."""

_FEWEST = 8
"""Before there is a usual one."""


class BadStepError(InputError):
    """A step after which the run cannot simply go on.

    Attributes:
        step: Its number, from 0.
        why: What is wrong with it.
    """

    def __init__(self, step: int, why: str, *, key: str) -> None:
        super().__init__(f"step {step}: {why}", key=key)
        self.step, self.why = step, why


def check_spike(policy: Policy, spike: float | None) -> None:
    """Refuses a `spike` that is no limit, or that nothing would follow.

    Raises:
        InputError: It is not above 1, or the policy is to go on.
    """
    if spike is not None and not 1 < spike < math.inf:
        raise InputError(
            f"spike={spike!r}: must be a finite number above 1",
            key="run.spike_not_above_one",
        )
    if spike is not None and policy == "skip":
        raise InputError(
            f"spike={spike:g} needs another on_bad_step than 'skip': a loss is known "
            "once its step is done; choose 'rollback' or 'stop'",
            key="run.spike_with_skip",
        )


class StepWatch:
    """Says which steps are bad, and ends what the policy does not let go on.

    A step whose gradients are not finite has changed nothing: that is "skip", which
    goes on until `patience` of them come in a row. A spike has been learned from, so
    that only "rollback" and "stop" look for it.

    Args:
        policy: What follows a bad step.
        spike: A loss above this many times the median of the last 32 is bad; None
            looks for none.
        patience: Steps in a row that may be skipped.

    Raises:
        InputError: `spike` is not above 1, or nothing would follow it.

    Example:
        >>> watch = StepWatch("stop", spike=3.0)
        >>> for step in range(8):
        ...     watch.check(step, loss=2.0, skipped=False)
        >>> watch.check(8, loss=7.0, skipped=False)
        Traceback (most recent call last):
        ...
        meshpar.train.faults.BadStepError: step 8: loss 7 is 3.5 times the usual 2
    """

    def __init__(
        self, policy: Policy, *, spike: float | None = None, patience: int = 10
    ) -> None:
        check_spike(policy, spike)
        self._policy, self._spike, self._patience = policy, spike, patience
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_a_row = 0

    def check(self, step: int, *, loss: float, skipped: bool) -> None:
        """Notes a step.

        Args:
            step: Its number, from 0.
            loss: Of the parameters before it.
            skipped: Whether its gradients were not finite.

        Raises:
            BadStepError: The policy does not let the run go on after it.
        """
        is_bad = skipped or not math.isfinite(loss)
        self._in_a_row = self._in_a_row + 1 if is_bad else 0
        if is_bad and self._policy != "skip":
            raise BadStepError(
                step,
                f"loss {loss:g} or its gradients are not finite",
                key="run.loss_not_finite",
            )
        if self._in_a_row >= self._patience:
            raise BadStepError(
                step,
                f"the gradients of {self._in_a_row} steps in a row are not finite, so "
                "that nothing is learned any more; go on from an earlier checkpoint "
                "with on_bad_step='rollback', or lower the learning rate",
                key="run.gradients_not_finite",
            )
        if is_bad:
            return
        self._check_spike(step, loss)
        self._losses.append(loss)

    def _check_spike(self, step: int, loss: float) -> None:
        if self._spike is None or len(self._losses) < _FEWEST:
            return
        usual = statistics.median(self._losses)
        if loss > self._spike * usual:
            raise BadStepError(
                step,
                f"loss {loss:g} is {loss / usual:.2g} times the usual {usual:g}",
                key="run.loss_spike",
            )
