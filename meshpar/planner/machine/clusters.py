"""Clusters and devices by name: known ones, TOML files, tori, several kinds."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path

from meshpar.errors import InputError, nearest
from meshpar.foreign_files import read_toml
from meshpar.hardware.device import Device, Efficiency
from meshpar.hardware.devices import DEVICES, OTHER_NAMES
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import joined


def device_of(name: str) -> Device:
    """Return the device of a name, or of a TOML file (`load_device`).

    Raises:
        InputError: No such device, or a file that does not describe one.
    """
    if name.endswith(".toml"):
        return load_device(name)
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    known = {**DEVICES, **OTHER_NAMES}
    if plain not in known:
        raise InputError(
            f"no hardware {name!r}; {nearest(plain, known)}; or name a .toml file",
            key="hardware.unknown_device",
        )
    return known[plain]


def cluster_of(
    hardware: str, *, devices: int | None = None, hosts: int | None = None
) -> Cluster:
    """Return the cluster of `--hardware`, `--devices` and `--hosts`.

    Args:
        hardware: A name, a `.toml` file, a TPU with its torus (`tpu v5p:8x8x8`), or
            several kinds with their numbers (`h100:32+a100:32`).
        devices: Devices of all hosts; None for one host's.
        hosts: Hosts (slices of a TPU); None for as few as hold the devices.

    Raises:
        InputError: Unknown hardware, or counts that do not fit together.
    """
    if "+" in hardware and not Path(hardware).exists():
        return _mixed(hardware, devices, hosts)
    name, _, shape = hardware.partition(":")
    device = device_of(name)
    for argument, value in (("devices", devices), ("hosts", hosts)):
        if value is not None and value < 1:
            raise InputError(
                f"{argument}={value}: must be at least 1",
                key="hardware.count_below_one",
            )
    if device.torus_dims:
        return _slices(device, shape, devices, hosts)
    if shape:
        raise InputError(
            f"--hardware {hardware!r}: {device.name} has no torus; leave ':{shape}' "
            "out",
            key="hardware.no_torus",
        )
    if devices is None:
        return Cluster(device=device, hosts=hosts or 1)
    count = hosts or _fewest_hosts(devices, device.domain_devices)
    if devices % count:
        raise InputError(
            f"{devices} devices do not divide over {count} hosts; change one of them",
            key="hardware.indivisible_hosts",
        )
    if devices // count > device.domain_devices:
        raise InputError(
            f"{devices} devices on {count} hosts are {devices // count} each, but the "
            f"links of {device.name} join at most {device.domain_devices}; take "
            f"--hosts {-(-devices // device.domain_devices)}",
            key="hardware.too_many_devices_per_host",
        )
    return Cluster(device=device, hosts=count, devices_per_host=devices // count)


def _mixed(hardware: str, devices: int | None, hosts: int | None) -> Cluster:
    """Return the cluster of `NAME:DEVICES+NAME:DEVICES`."""
    parts = [_part(hardware, text) for text in hardware.split("+")]
    names = [part.device.name for part in parts]
    if len({*names}) < len(names):
        raise InputError(
            f"--hardware {hardware!r} names {', '.join(names)}; name each kind once, "
            "with all its devices",
            key="hardware.repeated_part",
        )
    if devices is not None or hosts is not None:
        raise InputError(
            f"--hardware {hardware!r} has the devices of each kind; leave --devices "
            "and --hosts out",
            key="hardware.counted_twice",
        )
    return joined(*parts)


def _part(hardware: str, text: str) -> Cluster:
    """Return the cluster of one part, `NAME:DEVICES`, of mixed hardware."""
    name, _, count = text.partition(":")
    if name and device_of(name).torus_dims:
        return cluster_of(text)
    if not name or not re.fullmatch(r"[1-9]\d*", count):
        raise InputError(
            f"--hardware {hardware!r}: {text!r} has no "
            f"{'number of devices' if name else 'name'}; write {name or 'h100'}:8",
            key="hardware.uncounted_part",
        )
    return cluster_of(name, devices=int(count))


def _fewest_hosts(devices: int, most_each: int) -> int:
    """Return the fewest hosts that have as many devices each, `most_each` at most.

    Example:
        >>> _fewest_hosts(4096, 72)
        64
    """
    hosts = -(-devices // most_each)
    while devices % hosts:
        hosts += 1
    return hosts


def _slices(
    device: Device, shape: str, devices: int | None, hosts: int | None
) -> Cluster:
    if not shape and devices is None:
        raise InputError(
            f"{device.name} is joined in a torus; give its sizes, such as "
            f"{device.name}:{'x'.join(['4'] * device.torus_dims)}, or --devices N",
            key="hardware.missing_torus",
        )
    if shape and not re.fullmatch(r"\d+(x\d+)*", shape):
        raise InputError(
            f"{shape!r} is no torus; write sizes joined by x, such as "
            f"{'x'.join(['4'] * device.torus_dims)}",
            key="hardware.unreadable_torus",
        )
    slices = hosts or 1
    if devices is not None and devices < slices:
        raise InputError(
            f"{devices} devices do not divide over {slices} slices; change one of them",
            key="hardware.indivisible_slices",
        )
    torus = (
        _even_torus(max(1, devices // slices // device.chip_devices), device.torus_dims)
        if devices is not None and not shape
        else tuple(map(int, shape.split("x")))
    )
    cluster = Cluster(device=device, hosts=slices, torus=torus)
    if devices is not None and devices != cluster.num_devices:
        raise InputError(
            f"{slices} x {device.name} {'x'.join(map(str, torus))} are "
            f"{cluster.num_devices} devices, not {devices}; change one of them",
            key="hardware.torus_device_mismatch",
        )
    return cluster


def _even_torus(devices: int, dims: int) -> tuple[int, ...]:
    """Return sizes as even as possible, smallest first.

    Example:
        >>> _even_torus(512, 3), _even_torus(128, 2)
        ((8, 8, 8), (8, 16))
    """
    if dims == 1:
        return (devices,)
    size = max(
        size
        for size in range(1, round(devices ** (1 / dims)) + 1)
        if devices % size == 0
    )
    return (size, *_even_torus(devices // size, dims - 1))


def load_device(path: str | Path) -> Device:
    """Read a device from a TOML file.

    The file has the fields of `Device`, `peak_flops` and `efficiency` as tables, and
    may start from a known one with `like`. Its name is the file's, unless it gives one:

        name = "my-a100"
        like = "a100-80gb"
        memory_bytes = 64e9

        [efficiency]
        matmul = 0.81

    Raises:
        InputError: The file cannot be read, or lacks a field or has one too many.
    """
    values = read_toml(path, key="hardware.unreadable_toml")
    like = values.pop("like", None)
    if like is not None and str(like).endswith(".toml"):
        raise InputError(
            f"{str(path)!r}: like={like!r} is a file; start from a device by name: "
            f"{', '.join(DEVICES)}",
            key="hardware.like_is_file",
        )
    base = {}
    if like is not None:
        start_device = device_of(str(like))
        efficiency = vars(start_device.efficiency)
        base = {**vars(start_device), "efficiency": efficiency}
    for table in ("peak_flops", "efficiency"):
        given = values.get(table, {})
        if not isinstance(given, dict):
            raise InputError(
                f"{str(path)!r}: {table} must be a table, [{table}]",
                key="hardware.not_a_table",
            )
        values[table] = {**base.get(table, {}), **given}
    merged = {**base, "name": Path(path).stem, **values}
    start = 'device with like = "h100-80gb"'
    achieved = merged["efficiency"]
    where = f"{str(path)!r}: [efficiency]"
    check_fields(Efficiency, achieved, where, start, room="hardware")
    merged["efficiency"] = Efficiency(**achieved)
    check_fields(Device, merged, f"{str(path)!r}:", start, room="hardware")
    return Device(**merged)


def check_fields(
    kind: type, given: Collection[str], where: str, start: str, *, room: str
) -> None:
    """Check the fields that a TOML file gives a dataclass.

    Args:
        kind: The dataclass.
        given: Names of the fields that have a value.
        where: The file, and the table in it, for an error.
        start: Words for something known that the file may start from.
        room: First part of an error's key: `hardware` or `plan`.

    Raises:
        InputError: A name is no field, or a field without a default has no value.
    """
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise InputError(
                f"{where} no field {name!r}; {nearest(name, known)}",
                key=f"{room}.unknown_field",
            )
    lacking = [
        name
        for name, field in known.items()
        if field.default is MISSING
        and field.default_factory is MISSING
        and name not in given
    ]
    if lacking:
        raise InputError(
            f"{where} give {', '.join(lacking)}, or start from a known {start}",
            key=f"{room}.missing_field",
        )
