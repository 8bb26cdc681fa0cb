"""Virtual CPU devices in this process, with flags that keep them from deadlocking."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from meshpar.errors import InputError

if TYPE_CHECKING:
    import jax

ENVIRONMENT_VARIABLE = "MESHPAR_EMULATE"

DEFAULT_DEVICES = 8
"""Default number of virtual devices of `meshpar fuzz`."""

MOST_DEVICES = 512
"""Most virtual devices of a process: they start in 4 s and take 0.6 GB; 2,048 took 53 s
and 2 GB (jax 0.10.2, 2 busy cores), as both grow with the square."""

# XLA:CPU holds a collective back until the one before it in the program is done, but
# behind a loop only until the loop has begun. In breadth-first order one that needs
# nothing of a loop stands before it. Depth first, to spare memory, 16 of 17 processes
# of FSDP crashed, hung or gave NaN while all collectives shared a channel; since each
# has its own 9 of 9 agree (`collective_channels`, jax 0.10.2, 2 busy cores).
_BREADTH_FIRST = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"

# The name of the same choice before jax 0.9.1; up to 0.12 XLA still obeys it.
_FORMER_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"

# A rendezvous of eight threads on two busy cores may take far longer than XLA's default
# 40 s without being stuck.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"

# XLA:CPU runs kernels, and what follows them, in one pool of as many threads as there
# are cores. A thread that has reached a collective waits in it; once all of them wait,
# no device gets to the collectives that they wait for. A data-parallel loop that reads
# no metric hung so on 2 cores; with 64 threads 2,000 steps of it ended (jax 0.10.2).
# XLA reads this variable, before NPROC, as the number of threads.
_THREADS_VARIABLE = "PJRT_NPROC"
_THREADS_PER_DEVICE = 8


class AlreadyStartedError(InputError, RuntimeError):
    """JAX has already started with other devices than `emulate` needs."""


def emulate(num_devices: int) -> list[jax.Device]:
    """Make JAX see `num_devices` virtual CPU devices, and return them.

    Call it before the first JAX operation; more calls with the same number do nothing.
    `MESHPAR_EMULATE=8` in the environment does the same on `import meshpar`. Each of
    several processes gets this many.

    It adds missing flags to `XLA_FLAGS`, and raises `PJRT_NPROC`, the size of XLA's
    thread pools, to 8 per device: without either, virtual devices hang. It also gives
    each collective its own channel (`collective_channels`).

    Raises:
        InputError: `num_devices` is below 1 or above `MOST_DEVICES`.
        AlreadyStartedError: JAX has already started with other devices.

    Example:
        >>> len(emulate(8))
        8
    """
    import jax

    from meshpar.hardware.platforms import platform_named

    prepare(num_devices)
    devices = jax.local_devices()
    is_host = platform_named(devices[0].platform).is_host
    if len(devices) != num_devices or not is_host:
        raise AlreadyStartedError(
            _already_started(num_devices), key="mesh.already_started"
        )
    return devices


def prepare(num_devices: int) -> None:
    """Configure virtual devices as `emulate` does, without starting JAX.

    Raises:
        InputError: `num_devices` is below 1 or above `MOST_DEVICES`.
        AlreadyStartedError: JAX has already started with other devices.
    """
    from meshpar.machine.collective_channels import give_own_channels

    whole = isinstance(num_devices, int) and not isinstance(num_devices, bool)
    if not whole or num_devices < 1:
        raise InputError(
            f"emulate({num_devices!r}): needs at least 1 device",
            key="mesh.device_count_below_one",
        )
    if num_devices > MOST_DEVICES:
        raise InputError(
            f"emulate({num_devices}): at most {MOST_DEVICES} virtual devices start in "
            "one process; choose a smaller layout, or let `meshpar plan` and `meshpar "
            "audit --target` look at this one",
            key="mesh.too_many_virtual_devices",
        )
    # XLA, too, ignores a text that is not a number.
    texts = [os.environ.get(name, "") for name in (_THREADS_VARIABLE, "NPROC")]
    given = [int(text) for text in texts if text.isdecimal()]
    usual = given[0] if given else os.cpu_count() or 1
    environment = {
        "XLA_FLAGS": " ".join(_flags(os.environ.get("XLA_FLAGS", "").split())),
        _THREADS_VARIABLE: str(max(usual, _THREADS_PER_DEVICE * num_devices)),
    }
    if (
        num_cpu_devices() != num_devices
        or not environment.items() <= os.environ.items()
    ):
        _set(num_devices, environment)
    give_own_channels()


def num_cpu_devices() -> int:
    """Return the number of virtual CPU devices that JAX starts with, or has started."""
    import jax

    # JAX makes its options when it is imported, where no type checker sees them.
    return cast(Any, jax.config).jax_num_cpu_devices


def emulate_from_environment() -> None:
    """Prepare the number of devices that `MESHPAR_EMULATE` gives, if it is set.

    JAX is not started, so `meshpar.distributed.start` can still join processes.

    Raises:
        InputError: The variable does not hold a whole number.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return
    if not text.isdecimal():
        raise InputError(
            f"{ENVIRONMENT_VARIABLE}={text!r}: must be a number of devices, such as 8",
            key="mesh.device_count_not_number",
        )
    prepare(int(text))


def _flags(given: list[str]) -> list[str]:
    names = {flag.partition("=")[0] for flag in given}
    flags = list(given)
    if names.isdisjoint({_BREADTH_FIRST.partition("=")[0], _FORMER_SCHEDULER}):
        flags.append(_BREADTH_FIRST)
    if _PATIENCE.partition("=")[0] not in names:
        flags.append(_PATIENCE)
    return flags


def _set(num_devices: int, environment: dict[str, str]) -> None:
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise AlreadyStartedError(
            _already_started(num_devices), key="mesh.already_started"
        ) from error
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(environment)


def _already_started(num_devices: int) -> str:
    import jax

    devices = jax.local_devices()
    return (
        f"emulate({num_devices}): JAX has already started with {len(devices)} "
        f"{devices[0].platform} devices; call emulate before the first JAX operation, "
        f"or set {ENVIRONMENT_VARIABLE}={num_devices} before starting Python"
    )
