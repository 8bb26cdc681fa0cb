"""A model of volumes as the planner sees it: its convolutions, sums, and memory.

All numbers are of one example, whose space one device has; how they divide over devices
follows from sizes and windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.rules.spatial import short_dim


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The halos of one convolution, on one device.

    Args:
        sent_bytes: To its neighbours, along all split dims together.
    """

    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpaceWorkload:
    """What a step on volumes holds at once at its fullest, one device for all of space.

    Args:
        volume_bytes: Of arrays that grow with the examples of a device.
        other_bytes: Of all others: gradients, and parameters as they are used.
        exchanges: Of each convolution, forward and backward.
    """

    volume_bytes: int
    other_bytes: int
    exchanges: tuple[Exchange, ...] = ()

    @classmethod
    def of(
        cls, once: int, twice: int, exchanges: tuple[Exchange, ...] = ()
    ) -> SpaceWorkload:
        """From the most bytes that a step holds of a batch, and of one of twice that.

        Example:
            >>> SpaceWorkload.of(12, 20)
            SpaceWorkload(volume_bytes=8, other_bytes=4, exchanges=())
        """
        return cls(
            volume_bytes=twice - once,
            other_bytes=max(0, 2 * once - twice),
            exchanges=exchanges,
        )

    @property
    def halo_bytes(self) -> int:
        """Sent to neighbours in a step by one device."""
        return sum(one.sent_bytes for one in self.exchanges)

    def activation_bytes(self, degree: int) -> float:
        """Of arrays of volumes, where so many devices share an example's space.

        Example:
            >>> SpaceWorkload(volume_bytes=800, other_bytes=10).activation_bytes(8)
            100.0
        """
        return self.volume_bytes / degree

    @property
    def received_bytes(self) -> int:
        """The halos of one convolution, the largest: they are there while it runs."""
        return max((one.sent_bytes for one in self.exchanges), default=0)

    def temporary_bytes(self, degree: int) -> float:
        """The most that is there at once beside what is kept between steps."""
        return self.activation_bytes(degree) + self.received_bytes + self.other_bytes


SPACE = ("depth", "height", "width")
Degrees = tuple[int, int, int]
"""Devices that share each dim of space."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A convolution or a matmul of a step, forward or backward.

    Args:
        flops: Two for each multiply and add.
        num_bytes: Of its operands and its result.
        sizes: Places of what it reads, along each dim of space.
        reach: Places over the edge of a part that it reads, both sides together; none
            of a matmul.
        window: Places of its window, along each dim; 1 of a matmul.
        place_bytes: Of one place; 0 of what is no convolution of volumes.
    """

    flops: float
    num_bytes: float
    sizes: tuple[int, int, int] = (1, 1, 1)
    reach: tuple[int, int, int] = (0, 0, 0)
    window: tuple[int, int, int] = (1, 1, 1)
    place_bytes: int = 0

    def halo_bytes(self, degrees: Degrees) -> tuple[float, float, float]:
        """What one device sends along each dim, to both sides together.

        Dims are exchanged one after another, a later one with the halos that are there:

            sent(dim) = reach(dim) * places of the other dims * bytes of a place

        Example:
            >>> kernel = Kernel(
            ...     flops=0,
            ...     num_bytes=0,
            ...     sizes=(8, 4, 4),
            ...     reach=(2, 2, 2),
            ...     place_bytes=2,
            ... )
            >>> kernel.halo_bytes((4, 2, 1))
            (32.0, 64.0, 0.0)
        """
        here = [size / degree for size, degree in zip(self.sizes, degrees, strict=True)]
        sent = [0.0, 0.0, 0.0]
        for dim, places in enumerate(self.reach):
            if degrees[dim] > 1 and places:
                sent[dim] = places * math.prod(here) / here[dim] * self.place_bytes
                here[dim] += places
        return sent[0], sent[1], sent[2]


@dataclass(frozen=True, kw_only=True)
class VolumeWorkload:
    """A step on one volume, one device for all of space, as a trace has it.

    Args:
        name: What reports call it.
        precision: Of its blocks.
        num_parameters: All of them.
        kernels: Convolutions and matmuls, forward and backward.
        summed_bytes: Of what sums over space read: norms and the loss.
        num_sums: Of these, the sums of each example, which the next operation waits
            for; those over examples too are gradients of norms and biases.
        at_once: What it holds at its fullest, halos left out.
        on_tpus: The same, as XLA:TPU lays arrays out.
        batch_bytes: Of an example's arrays.
        least_sizes: Along each dim of space, the size that devices must divide: the
            greatest common divisor of all levels'.
        recomputed_flops: Of the kernels', what the backward computes again.
    """

    name: str
    precision: str
    num_parameters: int
    kernels: tuple[Kernel, ...]
    summed_bytes: float
    num_sums: int
    at_once: SpaceWorkload
    on_tpus: SpaceWorkload
    batch_bytes: int
    least_sizes: tuple[int, int, int]
    recomputed_flops: float = 0.0

    @property
    def flops(self) -> float:
        """Of one example, forward and backward, nothing computed again."""
        return sum(kernel.flops for kernel in self.kernels) - self.recomputed_flops

    @property
    def passed_bytes(self) -> float:
        """What is read and written beside the kernels.

        Sums read their operand; what the fullest moment holds is written and read once.
        """
        return self.summed_bytes + 2 * self.at_once.volume_bytes

    def short_part(self, degrees: Degrees) -> tuple[Kernel, int] | None:
        """A convolution and a dim along which a step refuses split examples."""
        split = [dim for dim, degree in enumerate(degrees) if degree > 1]
        for kernel in self.kernels:
            parts = [
                size // degree
                for size, degree in zip(kernel.sizes, degrees, strict=True)
            ]
            dim = short_dim(parts, kernel.window, split)
            if kernel.place_bytes and dim is not None:
                return kernel, dim
        return None

    def largest_halo_bytes(self, degrees: Degrees) -> float:
        """Of one convolution: it is there while that runs."""
        return max((sum(one.halo_bytes(degrees)) for one in self.kernels), default=0.0)
