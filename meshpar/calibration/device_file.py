"""A calibrated device as the TOML file that `--hardware` reads."""

from __future__ import annotations

import datetime
from dataclasses import fields
from numbers import Number

import jax

from meshpar.calibration.measure import Calibration
from meshpar.hardware.device import Device, Efficiency


def device_toml(found: Calibration) -> str:
    """The file's text: every field of the device, and every trial as a comment."""
    device = found.device
    lines = [
        f"# Measured by meshpar calibrate on {found.num_devices} x {found.kind}, jax "
        f"{jax.__version__}, {datetime.date.today()}; all devices at once, medians.",
        *(f"# {name}: {s:.4g} s, {rate}" for name, s, rate in found.rows),
        "",
        f'name = "{device.name}"',
        f'platform = "{device.platform}"',
        *_numbers(device),
        "",
        "[peak_flops]",
        *(f"{dtype} = {peak:.6g}" for dtype, peak in device.peak_flops.items()),
        "",
        "[efficiency]",
        *_numbers(device.efficiency),
    ]
    return "\n".join(lines) + "\n"


def _numbers(values: Device | Efficiency) -> list[str]:
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    return [
        f"{name} = {value}" if isinstance(value, int) else f"{name} = {value:.6g}"
        for name, value in found.items()
        if isinstance(value, Number)
    ]
