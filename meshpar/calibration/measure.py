"""Measure a machine, and write what it achieves as the file of a device."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Number
from statistics import geometric_mean

import jax

from meshpar.calibration.fit import attention_constants, fitted_link, matmul_flops
from meshpar.calibration.trials import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    TINY_OPS,
    KernelSizes,
    attention_trial,
    elementwise_trials,
    exchange_trial,
    exchanges,
    launch_trial,
    matmul_trial,
    seconds,
    stream_trial,
)
from meshpar.errors import InputError
from meshpar.hardware.device import Device, Efficiency
from meshpar.hardware.devices import compute_capability
from meshpar.hardware.platforms import platform_named
from meshpar.planner.machine.cluster import Link

_HEAD_DIMS = (64, 128)
_ATTENTION_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of a machine, and its device for the planner.

    Args:
        device: Device as `--hardware FILE.toml` reads it.
        rows: Name, seconds and rate in words of every trial.
        num_devices: Devices that worked at once.
        kind: JAX's name of the device.
    """

    device: Device
    rows: tuple[tuple[str, float, str], ...]
    num_devices: int
    kind: str


def calibrate(
    devices: Sequence[jax.Device],
    *,
    name: str,
    rounds: int = 5,
    like: Device | None = None,
) -> Calibration:
    """Measure matmuls by shape, memory, launches and collectives by size.

    All devices work at the same time, so that virtual devices of one CPU share it as
    they do in a training step.

    Args:
        devices: Devices of one process and kind.
        name: Name of the measured device.
        rounds: Rounds of all trials; the median counts.
        like: The data sheet that fractions are of; None takes what was measured as the
            peaks.

    Raises:
        InputError: No rounds, or several processes.
    """
    if rounds < 1:
        raise InputError(f"rounds={rounds}: must be at least 1", key="value.below_one")
    if jax.process_count() > 1:
        raise InputError(
            f"{jax.process_count()} processes: calibrate on one host; what the network "
            "achieves is network in [efficiency] of the file",
            key="plan.several_processes",
        )
    devices = list(devices)
    is_host = platform_named(devices[0].platform).is_host
    sizes = CPU_SIZES if is_host else ACCELERATOR_SIZES
    stream, memory, memory_rows = _memory(devices, sizes, rounds)
    launch_s = seconds([launch_trial(devices)], rounds)[0] / TINY_OPS
    launch_row = ("tiny kernel", launch_s, f"{launch_s * 1e6:.3g} us")
    flops, matmul_rows = {}, []
    for dtype, value_bytes in (("fp32", 4), ("bf16", 2)):
        flops[dtype], found = _matmuls(
            devices, sizes, rounds, dtype, value_bytes, memory, launch_s
        )
        matmul_rows += found
    link, link_rows = _link(devices, sizes.exchange_bytes, rounds)
    shares, attention_rows = _attention(devices, rounds, flops, like)
    rates = (stream, memory / stream)
    measured = _measured(name, devices, flops, rates, link, launch_s, shares)
    return Calibration(
        device=measured if like is None else _with_measured(like, measured),
        rows=(*matmul_rows, *memory_rows, launch_row, *attention_rows, *link_rows),
        num_devices=len(devices),
        kind=devices[0].device_kind,
    )


Rows = list[tuple[str, float, str]]


def _memory(
    devices: list[jax.Device], sizes: KernelSizes, rounds: int
) -> tuple[float, float, Rows]:
    """Measure bytes per second of a stream, and of a block's elementwise kernels."""
    streams = [stream_trial(devices, size) for size in sizes.stream_bytes]
    largest = sizes.stream_bytes[-1]
    others = elementwise_trials(devices, largest)
    moved = [*sizes.stream_bytes, *[largest] * len(others)]
    taken = seconds([*streams, *others], rounds)
    rates = [size / s for size, s in zip(moved, taken, strict=True)]
    rows = [
        (trial.name, s, f"{rate / 1e9:.4g} GB/s")
        for trial, s, rate in zip([*streams, *others], taken, rates, strict=True)
    ]
    stream = max(rates)
    return stream, geometric_mean(rates[len(streams) :]), rows


def _matmuls(
    devices: list[jax.Device],
    sizes: KernelSizes,
    rounds: int,
    dtype: str,
    value_bytes: int,
    memory: float,
    launch_s: float,
) -> tuple[float, Rows]:
    shapes = sizes.matmuls
    trials = [matmul_trial(devices, shape, dtype, sizes) for shape in shapes]
    taken = [s / 2 for s in seconds(trials, rounds)]
    rows = []
    for trial, (m, k, n), s in zip(trials, shapes, taken, strict=True):
        rows.append((trial.name, s, f"{2 * m * k * n / s / 1e9:.4g} GFLOP/s"))
    flops = matmul_flops(
        shapes,
        taken,
        value_bytes=value_bytes,
        memory_bytes_per_s=memory,
        launch_s=launch_s,
    )
    return flops, rows


def _link(
    devices: list[jax.Device], payloads: Sequence[int], rounds: int
) -> tuple[Link | None, Rows]:
    wanted = exchanges(len(devices), payloads)
    if not wanted:
        return None, []
    taken = seconds([exchange_trial(devices, one) for one in wanted], rounds)
    rows = [
        (one.name, s, f"{one.payload_bytes / s / 1e9:.4g} GB/s of payload")
        for one, s in zip(wanted, taken, strict=True)
    ]
    return fitted_link([one.expected_s for one in wanted], taken), rows


def _attention(
    devices: list[jax.Device], rounds: int, flops: dict, like: Device | None
) -> tuple[tuple[float, float] | None, Rows]:
    """Measure cuDNN's attention, where the platform has it."""
    cudnn = platform_named(devices[0].platform).fused_attention == "cudnn"
    if not cudnn or not compute_capability(devices[0]):
        return None, []
    peak = flops["bf16"] if like is None else like.peak_flops["bf16"]
    trials = [attention_trial(devices, size, _ATTENTION_SEQ) for size in _HEAD_DIMS]
    # 4 s^2 h of scores and mixed values, of which a causal mask hides half.
    num_flops = 2 * _ATTENTION_SEQ**2 * 2048
    taken = seconds(trials, rounds)
    rates = [num_flops / s for s in taken]
    rows = [
        (trial.name, s, f"{rate / 1e9:.4g} GFLOP/s")
        for trial, s, rate in zip(trials, taken, rates, strict=True)
    ]
    fractions = {
        size: rate / peak for size, rate in zip(_HEAD_DIMS, rates, strict=True)
    }
    return attention_constants(fractions), rows


def _measured(
    name: str,
    devices: list[jax.Device],
    flops: dict[str, float],
    rates: tuple[float, float],
    link: Link | None,
    launch_s: float,
    shares: tuple[float, float] | None,
) -> Device:
    """Return a device whose peaks are the measured ones.

    `rates` are the bytes per second of a stream and the share of it that elementwise
    kernels achieve.
    """
    memory, elementwise = rates
    # One device has no links: its own memory stands for them.
    speed, hop_s = (link.bytes_per_s, link.hop_s) if link else (memory, 0.0)
    attention, head_dim = shares or (1.0, 0.0)
    return Device(
        name=name,
        peak_flops=dict(flops),
        platform=devices[0].platform,
        memory_bytes=_memory_bytes(devices),
        memory_bytes_per_s=memory,
        domain_devices=len(devices),
        link_bytes_per_s=speed,
        network_bytes_per_s=speed,
        compute_capability=compute_capability(devices[0]),
        efficiency=Efficiency(
            matmul=1.0,
            attention=attention,
            attention_head_dim=head_dim,
            memory=elementwise,
            link=1.0,
            network=1.0,
            hop_s=hop_s,
            network_hop_s=hop_s,
            launch_s=launch_s,
            spread=0.0,
        ),
    )


def _with_measured(like: Device, measured: Device) -> Device:
    """Return the data sheet's device with the fractions of it that were measured.

    Anything not measured (a network, links of one device alone) stays as it was.
    """
    known, found = like.efficiency, measured.efficiency
    fractions = {
        "matmul": measured.peak_flops["bf16"] / like.peak_flops["bf16"],
        "memory": measured.memory_bytes_per_s * found.memory / like.memory_bytes_per_s,
    }
    if measured.domain_devices > 1:
        fractions["link"] = measured.link_bytes_per_s / like.link_bytes_per_s
    achieved = {key: min(1.0, fraction) for key, fraction in fractions.items()}
    # The compiler tuned what was measured: `matmul` is the fraction of either kind.
    achieved |= {"launch_s": found.launch_s, "tuned_matmul": 0.0}
    if measured.domain_devices > 1:
        achieved["hop_s"] = found.hop_s
    if found.attention < 1:
        achieved["attention"] = found.attention
        achieved["attention_head_dim"] = found.attention_head_dim
    efficiency = replace(known, **achieved)
    return replace(like, name=measured.name, efficiency=efficiency)


def _memory_bytes(devices: list[jax.Device]) -> float:
    """Return the memory of one device; virtual devices share the host's evenly."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / len(devices)


def device_toml(calibration: Calibration) -> str:
    """Return the TOML file that `--hardware` reads, with every trial as a comment."""
    device = calibration.device
    lines = [
        f"# Measured by meshpar calibrate on {calibration.num_devices} x "
        f"{calibration.kind}, jax {jax.__version__}, {datetime.date.today()}; all "
        "devices at once, medians.",
        *(f"# {name}: {s:.4g} s, {rate}" for name, s, rate in calibration.rows),
        "",
        f'name = "{device.name}"',
        f'platform = "{device.platform}"',
        f'fused_attention = "{device.fused_attention}"',
        *_number_lines(device),
        "",
        "[peak_flops]",
        *(f"{dtype} = {peak:.6g}" for dtype, peak in device.peak_flops.items()),
        "",
        "[efficiency]",
        *_number_lines(device.efficiency),
    ]
    return "\n".join(lines) + "\n"


def _number_lines(values: Device | Efficiency) -> list[str]:
    found = {field.name: getattr(values, field.name) for field in fields(values)}
    return [
        f"{name} = {str(value).lower() if isinstance(value, int) else f'{value:.6g}'}"
        for name, value in found.items()
        if isinstance(value, Number)
    ]
