"""Where tensors are read from: their names and shapes, and any part of one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Source(Protocol):
    """A folder or a file of tensors."""

    @property
    def where(self) -> str:
        """Path of the files, for messages."""

    @property
    def bytes_read(self) -> int:
        """Stored bytes of the values read so far."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of one tensor, a slice for each dim."""


@dataclass(frozen=True)
class Prefixed:
    """A source whose names leave a prefix out.

    Args:
        source: It.
        prefix: What they leave out.
    """

    source: Source
    prefix: str

    @property
    def where(self) -> str:
        """Path of the files."""
        return self.source.where

    @property
    def bytes_read(self) -> int:
        """Stored bytes of the values read so far, as the source counts."""
        return self.source.bytes_read

    @property
    def names(self) -> Collection[str]:
        """With the prefix."""
        return {f"{self.prefix}{name}" for name in self.source.names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.source.shape(name.removeprefix(self.prefix))

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of one tensor."""
        return self.source.read(name.removeprefix(self.prefix), part)


@dataclass(frozen=True)
class Without:
    """A source without some of its tensors.

    Args:
        source: It.
        left_out: Their names.
    """

    source: Source
    left_out: frozenset[str]

    @property
    def where(self) -> str:
        """Path of the files."""
        return self.source.where

    @property
    def bytes_read(self) -> int:
        """Stored bytes of the values read so far, as the source counts."""
        return self.source.bytes_read

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors that are left."""
        return set(self.source.names) - self.left_out

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.source.shape(name)

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of one tensor."""
        return self.source.read(name, part)


def with_prefix(source: Source, prefix: str) -> Source:
    """The source, its names with a prefix that all of them may leave out."""
    if not prefix or any(name.startswith(prefix) for name in source.names):
        return source
    return Prefixed(source, prefix)
