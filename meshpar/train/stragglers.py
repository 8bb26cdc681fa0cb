"""Which devices are slower than the others: the same work on each, alone.

The processes of a step wait for one another in its collectives, so that all of them
take as long as the slowest. What tells them apart is work without any.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

SLOW = 1.5
"""Times the median of all that a device may take unmentioned."""

_ROUNDS = 5
_MATMULS = 4
_SIZE = {"cpu": 256, "gpu": 8192, "tpu": 8192}


def probe_s(devices: Sequence[jax.Device]) -> list[float]:
    """Seconds that each device takes for some matmuls: the least of five rounds.

    Nothing else may run on them meanwhile.

    Example:
        >>> len(probe_s(jax.local_devices()[:1]))
        1
    """
    work = _work(devices[0].platform)
    size = _SIZE.get(devices[0].platform, 1024)
    return [_least_s(work, jnp.ones((size, size), device=one)) for one in devices]


def slow_ones(times_s: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """A line on each device that takes over 1.5 times the (lower) median of all.

    Args:
        times_s: Of the devices of each process, `probe_s`.
        hosts: Of each process.

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
    def matmuls(matrix: jax.Array) -> jax.Array:
        product = matrix
        for _ in range(_MATMULS):
            product = product @ matrix / len(matrix)
        return product

    return jax.jit(matmuls)
