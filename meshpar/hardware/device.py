"""A device: its peaks, memory and links, and the fractions that programs achieve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.hardware.attention_kernels import (
    Kernel,
    check_kernel,
    is_number,
    parse_kernel,
)
from meshpar.hardware.platforms import PLATFORMS

_RATE = (1e3, 1e18)
"""Bytes per second: from a modem's to a thousand times a wafer's memory (20 PB/s)."""

PLAUSIBLE: dict[str, tuple[float, float]] = {
    "memory_bytes": (1e3, 1e15),
    "memory_bytes_per_s": _RATE,
    "link_bytes_per_s": _RATE,
    "network_bytes_per_s": _RATE,
    "host_bytes_per_s": _RATE,
    "peak_flops": (1e3, 1e21),
    "domain_devices": (1, 1_000_000),
    "rack_devices": (0, 10_000_000),
    "oversubscription": (1, 1e6),
    "rack_hop_s": (0, 1),
    "wraps": (1, 1_000_000),
    "torus_dims": (0, 6),  # of any machine built: Fujitsu's Tofu (Ajima et al. 2009)
    "chip_devices": (1, 64),
    "chip_bytes_per_s": (0, 1e18),
    "attention_head_dim": (0, 1e6),
    "hop_s": (0, 1),
    "network_hop_s": (0, 1),
    "launch_s": (0, 1),
    "spread": (0, 1),
    "collective_cores": (0, 1),
    "tuned_matmul": (0, 1),
}
"""Field of `Device` or `Efficiency` -> its least and most value, in its own unit."""

_POSITIVE = (
    "memory_bytes",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "host_bytes_per_s",
)


_LEAST_COUNTS = {
    "domain_devices": 1,
    "wraps": 1,
    "torus_dims": 0,
    "chip_devices": 1,
    "pod_devices": 0,
    "rack_devices": 0,
}

SHARED_HOST_LINK = 0.4
"""Fraction of the host link's data sheet that each of many copying devices achieves.

A copy alone reaches about 0.8 of PCIe (25 of 32 GB/s: NVIDIA's bandwidthTest on an
A100), and two devices share a switch's link to their processor in a DGX A100. An
assumption of ours, not measured.
"""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of its data sheet that a device achieves.

    Args:
        matmul: Fraction of the peak that a matmul of infinite size achieves. A finite
            one takes the time of its operands' traffic besides, so that its fraction
            saturates with its arithmetic intensity.
        tuned_matmul: The same where the compiler timed several kernels for each matmul
            and took the fastest (`Execution.tunes_matmuls`); 0 for `matmul`.
        attention: Fraction of the peak that this library's fused attention kernel
            achieves there with very large heads; `Device.attention_kernels` has others.
        attention_head_dim: Head size at which such a kernel spends as long on softmax
            as on matmuls, so that it achieves half of `attention`.
        memory: Fraction of the memory's bandwidth that elementwise kernels achieve.
        link: Fraction of the in-host link (or torus link) that collectives achieve.
        network: Fraction of the network between hosts that they achieve.
        host: Fraction of the link to the host's memory that each of many copying
            devices achieves.
        hop_s: Latency of one step of a collective in a host, or on a torus.
        network_hop_s: Latency of one step between hosts.
        launch_s: Time between the end of a kernel and the start of the next one.
        spread: Standard deviation of a device's step time, as a fraction of it.
        collective_cores: Share of the device's cores that a collective takes from the
            kernels beside it; 0 where engines of their own move the bytes.

    Raises:
        InputError: A fraction outside of 0 to 1, or a time that no device has.
    """

    matmul: float
    attention: float
    attention_head_dim: float
    memory: float
    link: float
    network: float
    hop_s: float
    network_hop_s: float
    launch_s: float
    spread: float
    collective_cores: float = 0.0
    host: float = SHARED_HOST_LINK
    tuned_matmul: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if not is_number(getattr(self, one.name)):
                raise InputError(
                    f"efficiency {one.name}={getattr(self, one.name)!r}: must be a "
                    "number",
                    key="hardware.not_a_number",
                )
        for name in ("matmul", "attention", "memory", "link", "network", "host"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(
                    f"efficiency {name}={getattr(self, name)}: must be above 0 and at "
                    "most 1, a fraction of the data sheet's number",
                    key="hardware.not_a_fraction",
                )
        for name in (
            "attention_head_dim",
            "hop_s",
            "network_hop_s",
            "launch_s",
            "spread",
            "collective_cores",
            "tuned_matmul",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"efficiency {name}={getattr(self, name)}: must be 0 or more",
                    key="hardware.negative_or_infinite",
                )
            check_plausible("efficiency", name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Args:
        name: Its name for `--hardware`.
        peak_flops: Dense FLOP/s by dtype, `bf16` and `fp32`, which is what JAX's
            default matmul precision runs it as.
        memory_bytes: Memory that a program can have.
        memory_bytes_per_s: Bandwidth of that memory.
        domain_devices: Devices that one fast link domain joins: a host's NVLink, a
            rack's; for a torus the devices of a host, which no link depends on.
        link_bytes_per_s: Per direction and device inside that domain; of one of the
            links in each direction of a torus.
        meshed: True if every two devices of a domain have a link of their own, without
            a switch: a group has only those between its members.
        network_bytes_per_s: Per direction and device, between domains.
        host_bytes_per_s: Per direction and device, to its host's memory.
        rack_devices: Devices that the network joins at `network_bytes_per_s`: those of
            a rack, of a leaf switch, of a site; 0 for all.
        oversubscription: Devices of a rack together over what leads out of it: how many
            times more slowly all of them reach other racks at once.
        rack_hop_s: Latency of one step to another rack; `network_hop_s` when 0.
        shares_host_link: True if collectives, or the network's card, take the link to
            the host's memory (PCIe) from what is moved there.
        torus_dims: Dims of the torus; 0 where a switch joins the domain.
        chip_devices: Devices of each chip of a torus, whose sizes count chips; they
            share its links, so that `link_bytes_per_s` is a chip's.
        chip_bytes_per_s: Per direction and device, to the others of its chip.
        wraps: Devices along a dim of a torus from which on the ends are joined.
        efficiency: Fractions of these numbers that programs achieve.
        platform: `gpu`, `tpu` or `cpu`, as JAX calls it; it decides which kernels a
            program has there (`Run.fused_attention`).
        attention_kernels: Name -> speed of fused attention kernels; `efficiency` has
            that of any other.
        fused_attention: Its kernel in `attention_kernels`, where it has none of its
            platform's (`KERNELS`), which are NVIDIA's: all programs but ours take it.
        reserve: Part of the memory that a program leaves to others: the driver, buffers
            of collectives, and what its allocator does not get.
        pod_devices: Most devices of one slice of a torus; 0 for no limit.
        compute_capability: Compute capability of a GPU, which limits its kernels; 0 if
            unknown.
        taken_from: Device whose achieved fractions and attention kernels it is taken to
            have, as no published times calibrate it; empty if some do.

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
    rack_devices: int = 0
    oversubscription: float = 1.0
    rack_hop_s: float = 0.0
    shares_host_link: bool = False
    torus_dims: int = 0
    chip_devices: int = 1
    chip_bytes_per_s: float = 0.0
    wraps: int = 16
    platform: str = "gpu"
    attention_kernels: Mapping[str, Kernel] = field(default_factory=dict)
    fused_attention: str = ""
    meshed: bool = False
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
        kernels = {
            name: parse_kernel(self.name, name, value)
            for name, value in self.attention_kernels.items()
        }
        object.__setattr__(self, "attention_kernels", kernels)
        if self.fused_attention:
            check_kernel(self.name, str(self.fused_attention))
        self._check_flags()
        self._check_counts()
        self._check_numbers()
        self._check_chips()

    def _check_flags(self) -> None:
        for name in ("meshed", "shares_host_link"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(
                    f"hardware {self.name!r}: {name}={value!r} must be true or false",
                    key="hardware.not_true_or_false",
                )

    def _check_counts(self) -> None:
        for count, least in _LEAST_COUNTS.items():
            value = getattr(self, count)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"hardware {self.name!r}: {count}={value!r} must be a whole number "
                    f"of at least {least}",
                    key="hardware.not_whole_number",
                )
            check_plausible(f"hardware {self.name!r}:", count, value)

    def _check_numbers(self) -> None:
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
        for name in ("oversubscription", "rack_hop_s", "chip_bytes_per_s"):
            if not is_number(getattr(self, name)):
                raise InputError(
                    f"hardware {self.name!r}: {name}={getattr(self, name)!r} must be a "
                    "number",
                    key="hardware.not_a_number",
                )
            check_plausible(f"hardware {self.name!r}:", name, getattr(self, name))
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

    def _check_chips(self) -> None:
        if self.chip_devices > 1 and not (self.torus_dims and self.chip_bytes_per_s):
            raise InputError(
                f"hardware {self.name!r}: chip_devices={self.chip_devices} share the "
                f"links of a torus, but torus_dims={self.torus_dims} and "
                f"chip_bytes_per_s={self.chip_bytes_per_s}; give both, or leave "
                "chip_devices out",
                key="hardware.chip_without_links",
            )

    @property
    def usable_bytes(self) -> float:
        """Bytes of its memory that a program's arrays can take."""
        return self.memory_bytes * (1 - self.reserve)


def check_plausible(owner: str, name: str, value: float) -> None:
    """Check that a number is in the range of its field.

    Args:
        owner: Name of the device in errors.
        name: A field, or a field and its key (`peak_flops bf16`).
        value: Its value.

    Raises:
        InputError: The number is out of range.
    """
    least, most = PLAUSIBLE.get(name.split()[0], (float("-inf"), float("inf")))
    if not least <= value <= most:
        raise InputError(
            f"{owner} {name}={value:g}: must be at least {least:g} and at most "
            f"{most:g}; look at its unit",
            key="hardware.implausible_number",
        )


def matmul_s(
    device: Device,
    dtype: str,
    flops: float,
    num_bytes: float,
    *,
    fraction: float | None = None,
) -> float:
    """Time of matmuls of so many FLOPs that read and write so many bytes.

        time = hypot(flops / (peak * matmul), bytes / (memory bandwidth * memory))

    Traffic hides behind arithmetic as far as there is less of it. So the achieved
    fraction saturates with the arithmetic intensity `I` of the shape:
    `matmul / sqrt(1 + (I0 / I)^2)`, with `I0` the FLOPs per byte that the device
    achieves.

    Args:
        device: The device.
        dtype: A key of its `peak_flops`.
        flops: Two for each multiply and add.
        num_bytes: Bytes of the operands and the result.
        fraction: Instead of `Efficiency.matmul`.
    """
    fraction = fraction or device.efficiency.matmul
    arithmetic_s = flops / (device.peak_flops[dtype] * fraction)
    return math.hypot(arithmetic_s, memory_s(device, num_bytes))


def memory_s(device: Device, num_bytes: float) -> float:
    """Time to read or write so many bytes of a device's memory."""
    return num_bytes / (device.memory_bytes_per_s * device.efficiency.memory)


class Known(NamedTuple):
    """A device and its other names.

    Args:
        device: The device.
        kind: A word of JAX's name of a GPU, or the whole of its name of a TPU.
        other_name: Another name for `--hardware`; empty for none.
        target: Name for `meshpar audit --target`; empty if XLA has no such target.
    """

    device: Device
    kind: str
    other_name: str = ""
    target: str = ""
