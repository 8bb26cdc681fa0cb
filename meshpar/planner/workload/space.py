"""A model of volumes as the planner sees it: arrays of space, halos, and the rest."""

from __future__ import annotations

from dataclasses import dataclass


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
