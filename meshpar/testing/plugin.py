"""The pytest plugin: virtual devices by setting, marker or fixture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

# JAX is started inside the functions only: this file is loaded by every pytest run on a
# machine where meshpar is installed, whether or not its tests use JAX.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that starts virtual devices before any test."""
    parser.addini(
        "meshpar_emulate",
        "number of virtual CPU devices that every test sees",
        default="",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the virtual devices that `meshpar_emulate` asks for."""
    config.addinivalue_line(
        "markers", "devices(n): JAX has n devices; virtual ones are started for it"
    )
    number = config.getini("meshpar_emulate")
    if number and not number.isdecimal():
        raise pytest.UsageError(
            f"meshpar_emulate = {number}: must be a number of devices, such as 8"
        )
    if number:
        from meshpar.machine.emulate import emulate

        emulate(int(number))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start as many virtual devices as the most that a `devices` marker asks for."""
    numbers = [number for item in session.items if (number := _wanted(item))]
    if not numbers or session.config.getini("meshpar_emulate"):
        return
    from meshpar.machine.emulate import AlreadyStartedError, emulate, num_cpu_devices

    if num_cpu_devices() < max(numbers):
        # What has started too early is told to each test that has too few.
        with contextlib.suppress(AlreadyStartedError):
            emulate(max(numbers))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test as many devices as its `devices` marker says; fails without them.

    JAX fixes its devices once for all tests. Where it has more, `jax.devices()`,
    `jax.device_count()` and their `local_` forms tell of the first ones for as long as
    the test and the fixtures that it sets up run.
    """
    wanted = _wanted(item)
    if wanted is None:
        return
    import jax

    found = len(jax.devices())
    if found < wanted:
        pytest.fail(
            f"the test needs {wanted} devices, but there are {found}; raise "
            "meshpar_emulate in the pytest settings, and use JAX inside of tests only",
            pytrace=False,
        )
    if found > wanted:
        item.stash[_PATCHED] = _with_first_devices(wanted)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give all devices back."""
    patched = item.stash.get(_PATCHED, None)
    if patched is not None:
        patched.undo()


_PATCHED = pytest.StashKey[pytest.MonkeyPatch]()


def _with_first_devices(number: int) -> pytest.MonkeyPatch:
    import jax

    patched = pytest.MonkeyPatch()

    def first(every: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args, **kwargs: every(*args, **kwargs)[:number]

    for prefix in ("", "local_"):
        name = f"{prefix}devices"
        devices = first(getattr(jax, name))
        patched.setattr(jax, name, devices)
        patched.setattr(
            jax,
            f"{prefix}device_count",
            lambda *args, of=devices, **kwargs: len(of(*args, **kwargs)),
        )
    return patched


def _wanted(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("devices")
    if marker is None:
        return None
    number: Any = marker.args[0] if len(marker.args) == 1 else None
    whole = isinstance(number, int) and not isinstance(number, bool)
    if not whole or number < 1 or marker.kwargs:
        raise pytest.UsageError(
            f"{item.nodeid}: write the marker as devices(8), with the number alone"
        )
    return number


@pytest.fixture(scope="session")
def emulated_devices() -> Callable[[int], list[Any]]:
    """`emulated_devices(8)`: that many virtual CPU devices, in this test process.

    JAX fixes the number at its first operation: a suite that starts with eight can
    have any number up to eight, later calls included.
    """

    import jax

    from meshpar.machine.emulate import emulate, num_cpu_devices

    def devices(num_devices: int) -> list[jax.Device]:
        if num_cpu_devices() < num_devices:
            return emulate(num_devices)
        return jax.devices()[:num_devices]

    return devices
