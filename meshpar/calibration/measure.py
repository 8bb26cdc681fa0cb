"""Measures a machine: one `Calibration` of the devices that JAX sees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

import jax

from meshpar.calibration import exchanges, kernels
from meshpar.calibration.exchanges import exchange_trial
from meshpar.calibration.fit import attention_constants, link_of, matmul_flops
from meshpar.calibration.kernels import (
    KernelSizes,
    elementwise_trials,
    matmul_trial,
    stream_trial,
)
from meshpar.calibration.trial import seconds
from meshpar.errors import InputError
from meshpar.hardware.device import Device, Efficiency
from meshpar.planner.machine.link import Link

_HEAD_DIMS = (64, 128)
_ATTENTION_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and the device that it makes.

    Args:
        device: As `--hardware FILE.toml` reads it.
        rows: Name, seconds, and the rate as people read it, of every trial.
        num_devices: Devices that worked at once.
        kind: What JAX calls them.
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
    """Matmuls by shape, memory, launches and collectives by size, on all devices.

    All devices work at the same time, so that what virtual devices of one CPU share is
    divided among them as it is in a training step.

    Args:
        devices: Of one process and kind.
        name: What the device is to be called.
        rounds: Of which the median counts.
        like: The data sheet: peaks and memory that are not measured, and against which
            fractions are counted. Without it the peaks are what was measured.

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
    on_cpu = devices[0].platform == "cpu"
    sizes = kernels.CPU_SIZES if on_cpu else kernels.ACCELERATOR_SIZES
    stream, memory, memory_rows = _memory(devices, sizes, rounds)
    launch_s, launch_rows = _launch(devices, rounds)
    flops, matmul_rows = {}, []
    for dtype, value_bytes in (("fp32", 4), ("bf16", 2)):
        flops[dtype], found = _matmuls(
            devices, sizes, rounds, dtype, value_bytes, memory, launch_s
        )
        matmul_rows += found
    payloads = exchanges.CPU_BYTES if on_cpu else exchanges.ACCELERATOR_BYTES
    link, link_rows = _link(devices, payloads, rounds)
    shares, attention_rows = _attention(devices, rounds, flops, like)
    rates = (stream, memory / stream)
    measured = _measured(name, devices, flops, rates, link, launch_s, shares)
    return Calibration(
        device=measured if like is None else _beside(measured, like),
        rows=(*matmul_rows, *memory_rows, *launch_rows, *attention_rows, *link_rows),
        num_devices=len(devices),
        kind=devices[0].device_kind,
    )


Rows = list[tuple[str, float, str]]


def _memory(
    devices: list[jax.Device], sizes: KernelSizes, rounds: int
) -> tuple[float, float, Rows]:
    """Bytes per second of a stream, and of what a block does elementwise."""
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


def _launch(devices: list[jax.Device], rounds: int) -> tuple[float, Rows]:
    trial = kernels.launch_trial(devices)
    each_s = seconds([trial], rounds)[0] / kernels.TINY_OPS
    return each_s, [("tiny kernel", each_s, f"{each_s * 1e6:.3g} us")]


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
    wanted = exchanges.exchanges(len(devices), payloads)
    if not wanted:
        return None, []
    taken = seconds([exchange_trial(devices, one) for one in wanted], rounds)
    rows = [
        (one.name, s, f"{one.payload_bytes / s / 1e9:.4g} GB/s of payload")
        for one, s in zip(wanted, taken, strict=True)
    ]
    return link_of([one.expected_s for one in wanted], taken), rows


def _attention(
    devices: list[jax.Device], rounds: int, flops: dict, like: Device | None
) -> tuple[tuple[float, float] | None, Rows]:
    """Fused attention, where there is such a kernel."""
    if devices[0].platform != "gpu":
        return None, []
    peak = flops["bf16"] if like is None else like.peak_flops["bf16"]
    trials = [
        kernels.attention_trial(devices, size, _ATTENTION_SEQ) for size in _HEAD_DIMS
    ]
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
    """A device whose peaks are what was measured; `rates` a stream's, and a share."""
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
        compute_capability=float(getattr(devices[0], "compute_capability", 0)),
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


def _beside(measured: Device, like: Device) -> Device:
    """The data sheet's device, with the fractions of it that were measured.

    What was not measured (a network, links of one device alone) stays as it was.
    """
    known, found = like.efficiency, measured.efficiency
    fractions = {
        "matmul": measured.peak_flops["bf16"] / like.peak_flops["bf16"],
        "memory": measured.memory_bytes_per_s * found.memory / like.memory_bytes_per_s,
    }
    if measured.domain_devices > 1:
        fractions["link"] = measured.link_bytes_per_s / like.link_bytes_per_s
    achieved = {key: min(1.0, fraction) for key, fraction in fractions.items()}
    achieved["launch_s"] = found.launch_s
    if measured.domain_devices > 1:
        achieved["hop_s"] = found.hop_s
    if found.attention < 1:
        achieved["attention"] = found.attention
        achieved["attention_head_dim"] = found.attention_head_dim
    efficiency = replace(known, **achieved)
    return replace(like, name=measured.name, efficiency=efficiency)


def _memory_bytes(devices: list[jax.Device]) -> float:
    """Of one device; virtual devices have a share of the host's each."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / len(devices)
