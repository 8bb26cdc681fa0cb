"""The accelerators that the planner knows, each number with its source."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.layout import nearest
from meshpar.link_speeds import NVIDIA_LINKS
from meshpar.planner.hardware import Cluster, Device, Efficiency

# How each number was got:
#   matmul, memory       A100: the layer times of Korthikanti et al. 2022, table 4
#                        (22B, five rows). H100: two rows of the nanotron grid (the
#                        calibration rows of meshpar.planner.validate).
#   attention            Dao 2023 (FlashAttention-2), section 4.1: up to 230 TFLOP/s of
#                        312 on A100, 335 of 989 on H100 with the same kernel; and its
#                        head sizes 64 and 128 (about 0.85 of each other): 24.
#   link                 nccl-tests' bus bandwidth of a DGX A100 (235 GB/s of 300), of
#                        a DGX H100 (rings, 360 GB/s of 450).
#   network              9/10 of the line rate, after headers and imperfect routes.
#   hop_s, network_hop_s NCCL's tuning table: some microseconds a step.
#   launch_s             CUDA's launch latency, 3 to 5 microseconds.
_A100 = Efficiency(
    matmul=0.9,
    attention=0.85,
    attention_head_dim=24,
    memory=0.8,
    link=0.78,
    network=0.9,
    hop_s=4e-6,
    network_hop_s=12e-6,
    launch_s=8e-6,
    spread=0.003,
)
_H100 = replace(_A100, matmul=0.78, attention=0.45, link=0.8)
# No published step times calibrate these: Blackwell takes Hopper's fractions.
_B200 = _H100
# TPUs run one compiled program: no launches. Achieved fractions as stated for
# matmuls and ICI by "How to Scale Your Model" (Austin et al., 2025, chapters 2 and 3).
_TPU = Efficiency(
    matmul=0.9,
    attention=0.6,
    attention_head_dim=24,
    memory=0.85,
    link=0.9,
    network=0.8,
    hop_s=1e-6,
    network_hop_s=30e-6,
    launch_s=0.0,
    spread=0.001,
)


def _nvidia(
    name: str,
    kind: str,
    *,
    bf16: float,
    fp32: float,
    fp8: float | None,
    memory_bytes: float,
    memory_bytes_per_s: float,
    efficiency: Efficiency,
    domain_devices: int = 8,
) -> Device:
    links = NVIDIA_LINKS[kind]
    return Device(
        name=name,
        peak_flops={"bf16": bf16, "fp32": fp32, **({"fp8": fp8} if fp8 else {})},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        domain_devices=domain_devices,
        link_bytes_per_s=links.host_bytes_per_s,
        network_bytes_per_s=links.network_bytes_per_s,
        efficiency=efficiency,
    )


def _tpu(
    name: str,
    *,
    bf16: float,
    memory_bytes: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    network_bytes_per_s: float,
    devices_per_host: int,
    torus_dims: int,
    wraps: int,
) -> Device:
    # The MXU multiplies bf16; fp32 at JAX's default precision is one bf16 pass.
    return Device(
        name=name,
        peak_flops={"bf16": bf16, "fp32": bf16},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        domain_devices=devices_per_host,
        link_bytes_per_s=link_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        torus_dims=torus_dims,
        wraps=wraps,
        efficiency=_TPU,
    )


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 data sheet, 2021-06: bf16 312, TF32 156 TFLOP/s dense, HBM2e
        # 2,039 GB/s (80 GB SXM), HBM2 1,555 GB/s (40 GB).
        _nvidia(
            "a100-80gb",
            "A100",
            bf16=312e12,
            fp32=156e12,
            fp8=None,
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            efficiency=_A100,
        ),
        _nvidia(
            "a100-40gb",
            "A100",
            bf16=312e12,
            fp32=156e12,
            fp8=None,
            memory_bytes=40e9,
            memory_bytes_per_s=1.555e12,
            efficiency=_A100,
        ),
        # NVIDIA H100 data sheet, 2023-03 (SXM; half of the numbers with sparsity).
        _nvidia(
            "h100-80gb",
            "H100",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            efficiency=_H100,
        ),
        # The H800 is an H100 whose NVLink is cut to 400 GB/s in both directions
        # (DeepSeek-AI 2025, "Insights into DeepSeek-V3", section 4.1).
        _nvidia(
            "h800-80gb",
            "H800",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            efficiency=_H100,
        ),
        # NVIDIA H200 data sheet, 2024-11: the H100's peaks, 141 GB at 4.8 TB/s.
        _nvidia(
            "h200-141gb",
            "H200",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            efficiency=_H100,
        ),
        # NVIDIA DGX B200 data sheet, 2025-02: 8 GPUs with 72 PFLOP/s fp8 with
        # sparsity, 1,440 GB and 64 TB/s together.
        _nvidia(
            "b200-180gb",
            "B200",
            bf16=2.25e15,
            fp32=1.125e15,
            fp8=4.5e15,
            memory_bytes=180e9,
            memory_bytes_per_s=8e12,
            efficiency=_B200,
        ),
        # NVIDIA GB200 NVL72 data sheet, 2024-03: 72 GPUs with 360 PFLOP/s bf16 with
        # sparsity, 13.4 TB and 576 TB/s together, one NVLink domain.
        _nvidia(
            "gb200-186gb",
            "B200",  # the same NVLink ports, joined across the rack
            bf16=2.5e15,
            fp32=1.25e15,
            fp8=5e15,
            memory_bytes=186e9,
            memory_bytes_per_s=8e12,
            efficiency=_B200,
            domain_devices=72,
        ),
        # Cloud TPU documentation, system architecture pages (read 2025): bf16 peak,
        # HBM, ICI per chip over its 6 (v4, v5p) or 4 (v5e, v6e) ports. The network is a
        # host's NICs over its chips: 2 x 100 Gb/s over 8 (v5e), 4 x 200 over 8 (v6e);
        # 200 Gb/s over 4 chips (v4, v5p).
        _tpu(
            "tpu-v4",
            bf16=275e12,
            memory_bytes=32 * 2**30,
            memory_bytes_per_s=1.2e12,
            link_bytes_per_s=50e9,
            network_bytes_per_s=6.25e9,
            devices_per_host=4,
            torus_dims=3,
            wraps=4,
        ),
        _tpu(
            "tpu-v5e",
            bf16=197e12,
            memory_bytes=16e9,
            memory_bytes_per_s=819e9,
            link_bytes_per_s=50e9,
            network_bytes_per_s=3.125e9,
            devices_per_host=8,
            torus_dims=2,
            wraps=16,
        ),
        _tpu(
            "tpu-v5p",
            bf16=459e12,
            memory_bytes=95e9,
            memory_bytes_per_s=2.765e12,
            link_bytes_per_s=100e9,
            network_bytes_per_s=6.25e9,
            devices_per_host=4,
            torus_dims=3,
            wraps=4,
        ),
        _tpu(
            "tpu-v6e",
            bf16=918e12,
            memory_bytes=32e9,
            memory_bytes_per_s=1.638e12,
            link_bytes_per_s=100e9,
            network_bytes_per_s=12.5e9,
            devices_per_host=8,
            torus_dims=2,
            wraps=16,
        ),
    )
}
"""What `--hardware` knows by name."""

_OTHER_NAMES = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h800": "h800-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
    **{f"v{version}": f"tpu-v{version}" for version in ("4", "5e", "5p", "6e")},
}


def device_of(name: str) -> Device:
    """The device of a name, or of a TOML file (`load_device`).

    Raises:
        InputError: No such device, or a file that does not describe one.
    """
    if name.endswith(".toml"):
        return load_device(name)
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = _OTHER_NAMES.get(plain, plain)
    if plain not in DEVICES:
        raise InputError(
            f"no hardware {name!r}; {nearest(plain, DEVICES)}; or name a .toml file"
        )
    return DEVICES[plain]


def cluster_of(
    hardware: str, *, devices: int | None = None, hosts: int | None = None
) -> Cluster:
    """The cluster of `--hardware`, `--devices` and `--hosts`.

    Args:
        hardware: A name, a `.toml` file, or a TPU with its torus (`tpu v5p:8x8x8`).
        devices: Devices of all hosts; one host's when absent.
        hosts: Hosts (slices of a TPU); as few as hold the devices when absent.

    Raises:
        InputError: Unknown hardware, or counts that do not fit together.
    """
    name, _, shape = hardware.partition(":")
    device = device_of(name if not name.endswith("toml") else hardware)
    for count, value in (("devices", devices), ("hosts", hosts)):
        if value is not None and value < 1:
            raise InputError(f"{count}={value}: must be at least 1")
    if device.torus_dims:
        return _slices(device, shape, devices, hosts)
    if shape:
        raise InputError(
            f"--hardware {hardware!r}: {device.name} has no torus; leave ':{shape}' out"
        )
    if devices is None:
        return Cluster(device=device, hosts=hosts or 1)
    count = hosts or math.ceil(devices / device.domain_devices)
    if devices % count:
        raise InputError(
            f"{devices} devices do not divide over {count} hosts; change one of them"
        )
    return Cluster(device=device, hosts=count, devices_per_host=devices // count)


def _slices(
    device: Device, shape: str, devices: int | None, hosts: int | None
) -> Cluster:
    if not shape and devices is None:
        raise InputError(
            f"{device.name} is joined in a torus; give its sizes, such as "
            f"{device.name}:{'x'.join(['4'] * device.torus_dims)}, or --devices N"
        )
    if shape and not re.fullmatch(r"\d+(x\d+)*", shape):
        raise InputError(
            f"{shape!r} is no torus; write sizes joined by x, such as "
            f"{'x'.join(['4'] * device.torus_dims)}"
        )
    slices = hosts or 1
    torus = (
        tuple(map(int, shape.split("x")))
        if shape
        else _even_torus(devices // slices, device.torus_dims)
    )
    cluster = Cluster(device=device, hosts=slices, torus=torus)
    if devices is not None and devices != cluster.num_devices:
        raise InputError(
            f"{slices} x {device.name} {'x'.join(map(str, torus))} are "
            f"{cluster.num_devices} devices, not {devices}; change one of them"
        )
    return cluster


def _even_torus(devices: int, dims: int) -> tuple[int, ...]:
    """Sizes as even as possible, smallest first.

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
    """A device from a TOML file.

    The file has the fields of `Device`, `peak_flops` and `efficiency` as tables, and
    may start from a known one with `like`:

        name = "my-a100"
        like = "a100-80gb"
        memory_bytes = 64e9

        [efficiency]
        matmul = 0.81

    Raises:
        InputError: The file cannot be read, or lacks a field or has one too many.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r} as TOML: {error}") from error
    like = values.pop("like", None)
    base = {} if like is None else _fields(device_of(str(like)))
    for table in ("peak_flops", "efficiency"):
        given = values.get(table, {})
        if not isinstance(given, dict):
            raise InputError(f"{str(path)!r}: {table} must be a table, [{table}]")
        values[table] = {**base.get(table, {}), **given}
    merged = {"name": Path(path).stem, **base, **values}
    efficiency = _checked(Efficiency, merged.pop("efficiency"), path, "[efficiency] ")
    merged = {**merged, "efficiency": efficiency}
    return _checked(Device, merged, path, "")


def _fields(device: Device) -> dict[str, Any]:
    values = {field.name: getattr(device, field.name) for field in fields(device)}
    values["efficiency"] = {
        field.name: getattr(device.efficiency, field.name)
        for field in fields(Efficiency)
    }
    return values


def _checked(kind: type, values: dict[str, Any], path: str | Path, where: str) -> Any:
    known = {field.name for field in fields(kind)}
    for name in values:
        if name not in known:
            raise InputError(
                f"{str(path)!r}: {where}no field {name!r}; {nearest(name, known)}"
            )
    try:
        return kind(**values)
    except TypeError as error:
        lacking = ", ".join(sorted(known - values.keys()))
        raise InputError(
            f"{str(path)!r}: {where}give {lacking}, or start from a known device with "
            f'like = "h100-80gb" ({error})'
        ) from error
