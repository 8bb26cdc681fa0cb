"""Check that a run fits into memory before it allocates any."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from meshpar import InputError, TrainStep, batch_shapes
from meshpar.distributed import Processes
from meshpar.hardware.devices import device_from_kind
from meshpar.recipes import report
from meshpar.recipes.config import RunConfig
from meshpar.train.memory_report import estimated_bytes

_SMALL = 0.01
"""Share of the memory below which the states of a small batch are not estimated."""

_FEW_TOKENS = 8192


def check_memory(config: RunConfig, step: TrainStep, processes: Processes) -> None:
    """Compares what a step takes by arithmetic with the memory of this process.

    Virtual CPU devices share their host's memory, as do several processes there.

    Raises:
        InputError: It takes more, and `on_low_memory` is to stop.
    """
    devices = step.mesh.devices.flat
    here = [one for one in devices if one.process_index == jax.process_index()]
    on_host = processes.hosts.count(processes.hosts[processes.process_id])
    sharing = len(here) * on_host if here[0].platform == "cpu" else 1
    there_bytes = _memory_bytes(here[0])
    if there_bytes is None or _is_small(config, step, there_bytes / sharing):
        return
    batch = batch_shapes(config.global_batch, config.seq)
    states_bytes, temporary_bytes = estimated_bytes(step, batch)
    needed_bytes = sharing * (states_bytes + temporary_bytes)
    if needed_bytes <= there_bytes:
        return
    of = f"{sharing} CPU devices" if here[0].platform == "cpu" else "a device"
    where = "the free memory here is" if here[0].platform == "cpu" else "it has"
    line = (
        f"layout {str(step.layout)!r} needs about {_gb(needed_bytes)} for {of} "
        f"({_gb(states_bytes)} of states and {_gb(temporary_bytes)} of temporaries "
        f"each), but {where} {_gb(there_bytes)}; choose a smaller --preset, "
        "--global-batch or --seq, a layout over more devices (meshpar plan finds one) "
        "or remat=full, or go on with --on-low-memory warn"
    )
    if config.on_low_memory == "stop":
        raise InputError(line, key="run.too_little_memory")
    report.log_warning(line)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def _is_small(config: RunConfig, step: TrainStep, there_bytes: float) -> bool:
    is_short = config.global_batch * config.seq <= _FEW_TOKENS
    return is_short and report.expected_bytes(step) < _SMALL * there_bytes


def _memory_bytes(device: jax.Device) -> float | None:
    """Return the bytes that a program may use, or None if unknown."""
    if device.platform == "cpu":
        return host_memory_bytes()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    known = device_from_kind(device.device_kind)
    return limit or (known and known.memory_bytes)


def host_memory_bytes(root: Path = Path("/")) -> float | None:
    """Free bytes of this host, or of the control group that this process is in.

    Args:
        root: Of the file system that says so: `/proc/meminfo` and, of control groups of
            version 2 and 1, `sys/fs/cgroup`.
    """
    found = []
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        pairs = (line.split(":") for line in meminfo.read_text().splitlines())
        values = {name: rest.split()[0] for name, rest in pairs}
        found.append(1024.0 * int(values["MemAvailable"]))  # proc(5): in kB
    else:
        pages = os.sysconf("SC_PHYS_PAGES")
        found.append(float(pages * os.sysconf("SC_PAGE_SIZE")))
    group = root / "sys/fs/cgroup"
    for limit, used, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        if (group / limit).exists() and (group / used).exists():
            text = (group / limit).read_text().strip()
            if text.isdecimal():  # "max" is no limit.
                in_use = int((group / used).read_text()) - _given_up(group / stat, name)
                found.append(float(int(text) - in_use))
    return min(found)


def _given_up(stat: Path, name: str) -> int:
    """Bytes in use that the kernel gives up first: files that were read long ago."""
    if not stat.exists():
        return 0
    pairs = (line.split() for line in stat.read_text().splitlines())
    return next((int(value) for key, value in pairs if key == name), 0)
