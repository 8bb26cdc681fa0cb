"""One device: its peaks, memory and links, and what programs achieve of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.hardware.attention_kernels import Kernel, kernel_of
from meshpar.hardware.efficiency import Efficiency, is_number
from meshpar.hardware.plausible import check_plausible

PLATFORMS = ("gpu", "tpu", "cpu")
"""What a device can be."""

_POSITIVE = (
    "memory_bytes",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "host_bytes_per_s",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Args:
        name: What `--hardware` calls it.
        peak_flops: Dense FLOP/s by dtype, `bf16` and `fp32`, which is what JAX's
            default matmul precision runs it as.
        memory_bytes: What a program can have of its memory.
        memory_bytes_per_s: That memory's bandwidth.
        domain_devices: Devices that one fast link domain joins: a host's NVLink, a
            rack's; for a torus the devices of a host, which no link depends on.
        link_bytes_per_s: Per direction and device inside that domain; of one of the
            links in each direction of a torus.
        network_bytes_per_s: Per direction and device, between domains.
        host_bytes_per_s: Per direction and device, to its host's memory.
        torus_dims: Dims of the torus; 0 where a switch joins the domain.
        wraps: Devices along a dim of a torus from which on the ends are joined.
        efficiency: What is achieved.
        platform: `gpu`, `tpu` or `cpu`, as JAX calls it; it decides which kernels a
            program has there (`Run.fused_attention`).
        attention_kernels: What fused attention kernels achieve, by name; of one that is
            not among them `efficiency` says it.
        reserve: Part of the memory that a program leaves to others: the driver, buffers
            of collectives, and what its allocator does not get.
        pod_devices: Most devices of one slice of a torus; 0 for no limit.
        compute_capability: Of a GPU, which decides what its kernels take; 0 where that
            is not known.
        taken_from: The device whose achieved fractions and attention kernels it is
            taken to have, where no published times calibrate it; empty where some do.

    Raises:
        InputError: An unknown platform, or a number that is not positive or that no
            device has.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    domain_devices: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    efficiency: Efficiency
    host_bytes_per_s: float = 32e9  # PCIe gen 4 x16
    torus_dims: int = 0
    wraps: int = 16
    platform: str = "gpu"
    attention_kernels: Mapping[str, Kernel] = field(default_factory=dict)
    pod_devices: int = 0
    reserve: float = 0.0
    compute_capability: float = 0.0
    taken_from: str = ""

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise InputError(
                f"hardware {self.name!r}: platform={self.platform!r} must be one of "
                f"{', '.join(PLATFORMS)}",
                key="hardware.unknown_platform",
            )
        if not isinstance(self.name, str):
            raise InputError(
                f"hardware name={self.name!r}: must be text, in quotes",
                key="hardware.name_not_text",
            )
        for table in ("peak_flops", "attention_kernels"):
            if not isinstance(getattr(self, table), Mapping):
                raise InputError(
                    f"hardware {self.name!r}: {table} must be a table, [{table}]",
                    key="hardware.not_a_table",
                )
        counts = {"domain_devices": 1, "wraps": 1, "torus_dims": 0, "pod_devices": 0}
        for count, least in counts.items():
            value = getattr(self, count)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"hardware {self.name!r}: {count}={value!r} must be a whole number "
                    f"of at least {least}",
                    key="hardware.not_whole_number",
                )
            check_plausible(f"hardware {self.name!r}:", count, value)
        numbers = {name: getattr(self, name) for name in _POSITIVE}
        numbers |= {f"peak_flops {key}": peak for key, peak in self.peak_flops.items()}
        for name, number in numbers.items():
            if not (is_number(number) and 0 < number < math.inf):
                raise InputError(
                    f"hardware {self.name!r}: {name}={number!r} must be a positive "
                    "number",
                    key="hardware.not_positive",
                )
            check_plausible(f"hardware {self.name!r}:", name, number)
        kernels = {
            name: kernel_of(self.name, name, value)
            for name, value in self.attention_kernels.items()
        }
        object.__setattr__(self, "attention_kernels", kernels)
        if not (is_number(self.reserve) and 0 <= self.reserve < 1):
            raise InputError(
                f"hardware {self.name!r}: reserve={self.reserve!r} must be at least 0 "
                "and below 1, a part of memory_bytes",
                key="hardware.reserve_out_of_range",
            )
        capability = self.compute_capability
        if not (is_number(capability) and 0 <= capability < math.inf):
            raise InputError(
                f"hardware {self.name!r}: compute_capability={capability!r} must be a "
                "number of at least 0",
                key="hardware.wrong_compute_capability",
            )
        for dtype in ("bf16", "fp32"):
            if dtype not in self.peak_flops:
                raise InputError(
                    f"hardware {self.name!r} has no peak_flops of {dtype}; give both "
                    "bf16 and fp32",
                    key="hardware.missing_peak_flops",
                )

    @property
    def usable_bytes(self) -> float:
        """What a program's arrays can take of its memory."""
        return self.memory_bytes * (1 - self.reserve)


class Known(NamedTuple):
    """A device, and what others call it.

    Args:
        device: The device.
        kind: A word of what JAX calls a GPU, or the whole of what it calls a TPU.
        other_name: What `--hardware` calls it too; empty for none.
        target: What `meshpar audit --target` calls it; empty where XLA has no such
            target.
    """

    device: Device
    kind: str
    other_name: str = ""
    target: str = ""
