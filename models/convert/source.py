"""Where tensors are read from: their names and shapes, and any part of one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np


class Source(Protocol):
    """A folder or a file of tensors.

    Attributes:
        where: Its path, for messages.
        bytes_read: Of the values that were asked for so far, as they are stored.
    """

    where: str
    bytes_read: int

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of one tensor, a slice for each dim."""
