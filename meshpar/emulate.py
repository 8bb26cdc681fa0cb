"""Virtual CPU devices in this process, with flags that keep them from deadlocking."""

from __future__ import annotations

import os

import jax

from meshpar.errors import InputError

ENVIRONMENT_VARIABLE = "MESHPAR_EMULATE"

# Without it, two independent collectives that are ready together can take all threads
# of a machine with fewer cores than devices: "Termination timeout ... only 7 of 8
# arrived". In program order there is only ever one collective at a time.
_IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

# A rendezvous of eight threads on two busy cores may take far longer than XLA's default
# 40 s without being stuck.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


class AlreadyStartedError(InputError, RuntimeError):
    """JAX has started with other devices than `emulate` was asked for."""


def emulate(num_devices: int) -> list[jax.Device]:
    """Makes JAX see `num_devices` virtual CPU devices, and returns them.

    Call it before the first JAX operation. Calling it again with the same number is
    fine. Setting `MESHPAR_EMULATE=8` in the environment calls it on `import meshpar`.

    Raises:
        InputError: `num_devices` is not at least 1.
        AlreadyStartedError: JAX has already started with other devices.

    Example:
        >>> len(emulate(8))
        8
    """
    whole = isinstance(num_devices, int) and not isinstance(num_devices, bool)
    if not whole or num_devices < 1:
        raise InputError(f"emulate({num_devices!r}): needs at least 1 device")
    flags = os.environ.get("XLA_FLAGS", "").split()
    wanted = [flag for flag in (_IN_ORDER, _PATIENCE) if not _is_set(flag, flags)]
    if jax.config.jax_num_cpu_devices != num_devices or wanted:
        _start(num_devices, " ".join(flags + wanted))
    devices = jax.devices()
    if len(devices) != num_devices or devices[0].platform != "cpu":
        raise AlreadyStartedError(_already_started(num_devices))
    return devices


def emulate_from_environment() -> None:
    """Calls `emulate` with the number in `MESHPAR_EMULATE`, if that is set.

    Raises:
        InputError: The variable does not hold a whole number.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return
    if not text.isdecimal():
        raise InputError(
            f"{ENVIRONMENT_VARIABLE}={text!r}: must be a number of devices, such as 8"
        )
    emulate(int(text))


def _is_set(flag: str, flags: list[str]) -> bool:
    name = flag.partition("=")[0]
    return any(given.partition("=")[0] == name for given in flags)


def _start(num_devices: int, flags: str) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise AlreadyStartedError(_already_started(num_devices)) from error
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = flags


def _already_started(num_devices: int) -> str:
    devices = jax.devices()
    return (
        f"emulate({num_devices}): JAX has already started with {len(devices)} "
        f"{devices[0].platform} devices; call emulate before the first JAX operation, "
        f"or set {ENVIRONMENT_VARIABLE}={num_devices} before starting Python"
    )
