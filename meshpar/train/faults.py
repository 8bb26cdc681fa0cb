"""Faults of a run: bad steps, hanging or slow devices, a request to stop."""

from __future__ import annotations

import functools
import math
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from meshpar.distributed import Processes
from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named

if TYPE_CHECKING:
    import jax

Policy = Literal["skip", "rollback", "stop"]
"""Action on a bad step: skip it, go back to a checkpoint, or stop the run."""

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
    """Refuse a `spike` that is no limit, or that nothing would follow.

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
    """Find bad steps, and raise where the policy does not let the run go on.

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
        """Check one step.

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


SLOW = 1.5
"""A device that takes more than this many medians is named."""

_ROUNDS = 5
_MATMULS = 4


def probe_s(devices: Sequence[jax.Device]) -> list[float]:
    """Return the seconds that each device takes for some matmuls, the least of five.

    Nothing else may run on them meanwhile.

    Example:
        >>> import jax
        >>> len(probe_s(jax.local_devices()[:1]))
        1
    """
    import jax.numpy as jnp

    platform = devices[0].platform
    work, size = _work(platform), platform_named(platform).probe_size
    return [_least_s(work, jnp.ones((size, size), device=one)) for one in devices]


def slow_ones(times_s: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each device over 1.5 times the (lower) median of all.

    Args:
        times_s: `probe_s` of the devices of each process.
        hosts: Host of each process.

    Example:
        >>> slow_ones([[0.010, 0.011], [0.010, 0.025]], hosts=["a", "b"])
        ['device 1 of process 1 on b takes 2.5 times the median of all for the same \
matmuls: 25.0 ms, not 10.0 ms']
    """
    usual = statistics.median_low(one for times in times_s for one in times)
    return [
        f"device {device} of process {process}"
        + (f" on {hosts[process]}" if hosts[process] else "")
        + f" takes {taken / usual:.1f} times the median of all for the same matmuls: "
        f"{1e3 * taken:.1f} ms, not {1e3 * usual:.1f} ms"
        for process, times in enumerate(times_s)
        for device, taken in enumerate(times)
        if taken > SLOW * usual
    ]


def _least_s(work: Callable[[jax.Array], jax.Array], matrix: jax.Array) -> float:
    work(matrix).block_until_ready()  # Compiled, once for each device.
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work(matrix).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


@functools.cache
def _work(platform: str) -> Callable[[jax.Array], jax.Array]:
    import jax

    def matmuls(matrix: jax.Array) -> jax.Array:
        product = matrix
        for _ in range(_MATMULS):
            product = product @ matrix / len(matrix)
        return product

    return jax.jit(matmuls)


STEP = "step"
"""The phase that comes back again and again."""

_OF_COMPILING = 4
"""Factor of the limit for a phase that compiles a program."""


class Watchdog:
    """Limit the time of each phase of a run, while active.

    A phase ends when the next one begins. Beyond the limit every process of the job
    writes the stacks of its threads to standard error, and all end with status 75
    (`meshpar.distributed.LOST`), as a collective that hangs never returns.

    Args:
        limit_s: Seconds; 0 for none. Four times that for phases that compile.
        processes: The processes of this job.
    """

    def __init__(self, limit_s: float, processes: Processes | None = None) -> None:
        self._limit_s = limit_s
        self._processes = processes or Processes()
        self._is_over = threading.Event()
        self._now = (STEP, _OF_COMPILING * limit_s, time.monotonic())

    def phase(self, name: str, *, compiles: bool = False) -> None:
        """Begin a phase, with a time limit of its own.

        Args:
            name: Name for the message, such as `saving`.
            compiles: Whether it may compile programs, which takes longer.
        """
        limit_s = self._limit_s * (_OF_COMPILING if compiles else 1)
        self._now = (name, limit_s, time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._limit_s:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(self._limit_s / 4, 1.0)):
            name, limit_s, since = self._now
            if time.monotonic() > since + limit_s:
                what = "no step has ended" if name == STEP else f"{name} has not ended"
                self._processes.end_all(f"{what} for {limit_s:g} s", with_stacks=True)
                return


class StopRequest:
    """Note SIGINT and SIGTERM, while active; a second one ends the program.

    Attributes:
        signal: The signal; None before. A shell adds 128 to it for the status.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested
        True
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal has asked the program to stop."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
