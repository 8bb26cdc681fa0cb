"""Models of volumes: kernels, halos and memory of a step on one example, as traced.

Numbers are of one example whose space one device has; sizes and windows say how they
divide over devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.rules.spatial import short_dim


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Halos of one convolution, on one device.

    Args:
        sent_bytes: Bytes sent to its neighbours, along all split dims together.
    """

    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpaceWorkload:
    """Arrays of a step on volumes at its fullest moment, one device for all of space.

    Args:
        volume_bytes: Bytes of arrays that grow with the examples of a device.
        other_bytes: Bytes of all others: gradients, and parameters as they are used.
        exchanges: Halos of each convolution, forward and backward.
    """

    volume_bytes: int
    other_bytes: int
    exchanges: tuple[Exchange, ...] = ()

    @classmethod
    def from_peaks(
        cls, once: int, twice: int, exchanges: tuple[Exchange, ...] = ()
    ) -> SpaceWorkload:
        """Return it from the peak bytes of a batch, and of one twice as large.

        Example:
            >>> SpaceWorkload.from_peaks(12, 20)
            SpaceWorkload(volume_bytes=8, other_bytes=4, exchanges=())
        """
        return cls(
            volume_bytes=twice - once,
            other_bytes=max(0, 2 * once - twice),
            exchanges=exchanges,
        )

    @property
    def halo_bytes(self) -> int:
        """Bytes that one device sends to its neighbours in a step."""
        return sum(one.sent_bytes for one in self.exchanges)

    def activation_bytes(self, degree: int) -> float:
        """Return the bytes of arrays of volumes whose space `degree` devices share.

        Example:
            >>> SpaceWorkload(volume_bytes=800, other_bytes=10).activation_bytes(8)
            100.0
        """
        return self.volume_bytes / degree

    @property
    def received_bytes(self) -> int:
        """Bytes of the largest halo of a convolution."""
        return max((one.sent_bytes for one in self.exchanges), default=0)

    def temporary_bytes(self, degree: int) -> float:
        """Return the most bytes at once besides what is kept between steps."""
        return self.activation_bytes(degree) + self.received_bytes + self.other_bytes


SPACE = ("depth", "height", "width")
Degrees = tuple[int, int, int]
"""Devices that share each dim of space."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A convolution or a matmul of a step, forward or backward.

    Args:
        flops: Two for each multiply and add.
        num_bytes: Bytes of its operands and its result.
        sizes: Places that it reads, along each dim of space.
        reach: Places beyond the edges of a part that it reads, both sides together; 0
            for a matmul.
        window: Places of its window, along each dim; 1 for a matmul.
        place_bytes: Bytes of one place; 0 if it is no convolution of volumes.
    """

    flops: float
    num_bytes: float
    sizes: tuple[int, int, int] = (1, 1, 1)
    reach: tuple[int, int, int] = (0, 0, 0)
    window: tuple[int, int, int] = (1, 1, 1)
    place_bytes: int = 0

    def halo_bytes(self, degrees: Degrees) -> tuple[float, float, float]:
        """Return the bytes one device sends along each dim, to both sides together.

        Dims are exchanged one after another, a later one with the halos of earlier:

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
        local = [
            size / degree for size, degree in zip(self.sizes, degrees, strict=True)
        ]
        sent = [0.0, 0.0, 0.0]
        for dim, places in enumerate(self.reach):
            if degrees[dim] > 1 and places:
                sent[dim] = places * math.prod(local) / local[dim] * self.place_bytes
                local[dim] += places
        return sent[0], sent[1], sent[2]


@dataclass(frozen=True, kw_only=True)
class VolumeWorkload:
    """A step on one volume, one device for all of space, as a trace has it.

    Args:
        name: Name in reports.
        precision: Precision of its blocks.
        num_parameters: Number of parameters.
        kernels: Convolutions and matmuls, forward and backward.
        summed_bytes: Bytes that sums over space read: norms and the loss.
        num_sums: Number of sums of each example, which the next operation waits for;
            sums over examples too are gradients of norms and biases.
        at_once: Arrays at its fullest moment, without halos.
        on_tpus: The same, as XLA:TPU lays arrays out.
        batch_bytes: Bytes of an example's arrays.
        least_sizes: Size along each dim of space that devices must divide: the
            greatest common divisor of all levels'.
        recomputed_flops: FLOPs of the kernels that the backward recomputes.
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
        """FLOPs of one example, forward and backward, without recomputation."""
        return sum(kernel.flops for kernel in self.kernels) - self.recomputed_flops

    @property
    def passed_bytes(self) -> float:
        """Bytes read and written besides the kernels.

        Sums read their operand; arrays of the fullest moment are written and read once.
        """
        return self.summed_bytes + 2 * self.at_once.volume_bytes

    def short_part(self, degrees: Degrees) -> tuple[Kernel, int] | None:
        """Return a convolution and a dim along which a step refuses split examples."""
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
        """Return the bytes of the largest halo of a convolution."""
        return max((sum(one.halo_bytes(degrees)) for one in self.kernels), default=0.0)
