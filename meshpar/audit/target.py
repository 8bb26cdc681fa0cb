"""Hardware to compile for, by name. No jax: options are read before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.errors import InputError, nearest
from meshpar.hardware.device import Device
from meshpar.hardware.devices import TARGETS

_VIRTUAL = "cpu:virtual"
"""Devices in a row, which have no memory of their own."""

_EXAMPLES = "write for example tpu:v5p:4x4x4, or gpu:h100:8x8 (hosts x GPUs)"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware by name: `tpu:v5p:4x4x4` (a torus), `gpu:h100:8x8` (hosts x GPUs).

    `cpu:virtual:8` is eight virtual CPU devices, compiled for in another process.

    Args:
        platform: `tpu`, `gpu` or `cpu`.
        chip: Such as `v5p`, `h100` or `virtual`.
        shape: Chips along each dim of the torus (`Device.chip_devices` JAX devices
            each), hosts and GPUs of a host, or devices.
    """

    platform: str
    chip: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, target: Target | str) -> Target:
        """Parse the text of a target; return a target as it is.

        Raises:
            InputError: It is neither, has another form, or the chip is unknown.
        """
        if isinstance(target, Target):
            return target
        if not isinstance(target, str):
            raise InputError(
                f"target is a {type(target).__name__}; {_EXAMPLES}",
                key="audit.target_wrong_type",
            )
        platform, _, rest = target.partition(":")
        chip, _, shape = rest.partition(":")
        parts = shape.split("x")
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            raise InputError(
                f"target {target!r} has no sizes; {_EXAMPLES}",
                key="audit.target_without_sizes",
            )
        name = f"{platform}:{chip}"
        if name not in (*TARGETS, _VIRTUAL):
            known = nearest(name, (*TARGETS, _VIRTUAL))
            raise InputError(
                f"target {target!r}: no {name}; {known}", key="audit.unknown_target"
            )
        sizes = tuple(int(part) for part in parts)
        # A TPU's torus; hosts and GPUs of one.
        num_dims = 1 if name == _VIRTUAL else TARGETS[name].torus_dims or 2
        if len(sizes) != num_dims:
            raise InputError(
                f"target {target!r} has {len(sizes)} sizes, but {name} has {num_dims}; "
                f"{_EXAMPLES}",
                key="audit.target_dims_mismatch",
            )
        return cls(platform=platform, chip=chip, shape=sizes)

    def __str__(self) -> str:
        return f"{self.platform}:{self.chip}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        """JAX's devices in all."""
        each = 1 if self._device is None else self._device.chip_devices
        return math.prod(self.shape) * each

    @property
    def devices_per_host(self) -> int | None:
        """Number of GPUs of one host; None on other platforms."""
        return self.shape[1] if self.platform == "gpu" else None

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device; None if it has none of its own."""
        return None if self._device is None else round(self._device.memory_bytes)

    @property
    def _device(self) -> Device | None:
        """Figures of one device; None of a CPU's."""
        return TARGETS.get(f"{self.platform}:{self.chip}")
