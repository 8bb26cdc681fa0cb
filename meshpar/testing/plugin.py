"""The pytest plugin: virtual devices by setting, marker or fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# JAX is imported inside the functions: this file is loaded by every pytest run on a
# machine where meshpar is installed, whether or not its tests use JAX.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the setting that starts virtual devices before any test."""
    parser.addini(
        "meshpar_emulate",
        "number of virtual CPU devices that every test sees",
        default="",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts the virtual devices that `meshpar_emulate` asks for."""
    config.addinivalue_line(
        "markers", "devices(n): needs n devices; virtual ones are started for it"
    )
    number = config.getini("meshpar_emulate")
    if number:
        from meshpar.emulate import emulate

        emulate(int(number))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts as many virtual devices as the most that a `devices` marker asks for."""
    numbers = [
        int(marker.args[0])
        for item in session.items
        if (marker := item.get_closest_marker("devices"))
    ]
    if numbers and not session.config.getini("meshpar_emulate"):
        from meshpar.emulate import emulate

        emulate(max(numbers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a test whose `devices` marker asks for more than there are."""
    marker = item.get_closest_marker("devices")
    if marker is None:
        return
    import jax

    wanted, found = int(marker.args[0]), len(jax.devices())
    if found < wanted:
        pytest.fail(
            f"the test needs {wanted} devices, but there are {found}; raise "
            "meshpar_emulate in the pytest settings",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def emulated_devices() -> Callable[[int], list[Any]]:
    """`emulated_devices(8)`: that many virtual CPU devices, in this test process.

    JAX fixes the number at its first operation: a suite that starts with eight can
    have any number up to eight, later calls included.
    """

    import jax

    from meshpar.emulate import emulate

    def devices(num_devices: int) -> list[jax.Device]:
        if jax.config.jax_num_cpu_devices < num_devices:
            return emulate(num_devices)
        return jax.devices()[:num_devices]

    return devices
