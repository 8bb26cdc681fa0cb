"""Classes of dims that an operation makes equal, and how a reshape cuts and joins them.

Two dims of one class are split alike: GSPMD moves data where they are not. A dim that a
reshape cuts has *parts*, such as (heads, head_dim), and is found again where a later
reshape joins the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class DimClasses:
    """A union of dims by number; `find` gives the number that stands for a class.

    Example:
        >>> dims = DimClasses()
        >>> wide, other = dims.new(12), dims.new(12)
        >>> heads, each = dims.reshaped([wide], [3, 4])
        >>> dims.join(wide, other)
        >>> dims.reshaped([heads, each], [12]) == [dims.find(other)]
        True
        >>> dims.parts(other) == (heads, each)
        True
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}
        self._wholes: dict[tuple[int, ...], int] | None = {}

    def new(self, size: int) -> int:
        """Return the number of a dim of a class of its own."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        return self._parent[-1]

    def size(self, dim: int) -> int:
        """Return the size of a dim."""
        return self._size[self.find(dim)]

    def find(self, dim: int) -> int:
        """Return the number that stands for a dim's class."""
        while self._parent[dim] != dim:
            self._parent[dim] = self._parent[self._parent[dim]]
            dim = self._parent[dim]
        return dim

    def join(self, dim: int, other: int) -> None:
        """Make two classes one, and their parts if they are cut alike."""
        dim, other = self.find(dim), self.find(other)
        if dim == other or self._size[dim] != self._size[other]:
            return
        self._parent[other] = dim
        self._wholes = None
        parts, others = self._parts.get(dim), self._parts.pop(other, None)
        if parts is None and others is not None:
            self._parts[dim] = others
        elif parts is not None and others is not None:
            sizes = [tuple(map(self.size, some)) for some in (parts, others)]
            if sizes[0] == sizes[1]:
                for one, two in zip(parts, others, strict=True):
                    self.join(one, two)

    def parts(self, dim: int) -> tuple[int, ...]:
        """Return the smallest parts that a dim is cut into, outermost first.

        A dim that no reshape cuts is its own only part.
        """
        dim = self.find(dim)
        inner = self._parts.get(dim)
        if inner is None:
            return (dim,)
        return tuple(part for one in inner for part in self.parts(one))

    def reshaped(self, olds: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the dims that a reshape makes of some dims.

        Args:
            olds: Dims, outermost first.
            sizes: Sizes of the new dims, with the same product.
        """
        left = [part for old in olds for part in self.parts(old)]
        found = []
        for size in sizes:
            taken: list[int] = []
            while left and math.prod(map(self.size, taken)) < size:
                needed = size // math.prod(map(self.size, taken))
                taken.append(left.pop(0))
                if self.size(taken[-1]) > needed:
                    if self.size(taken[-1]) % needed:
                        return [self.new(size) for size in sizes]
                    cut = self.find(taken[-1])
                    inner = self.new(needed), self.new(self._size[cut] // needed)
                    self._parts[cut], self._wholes = inner, None
                    taken[-1] = inner[0]
                    left.insert(0, inner[1])
            if math.prod(map(self.size, taken)) != size:
                return [self.new(size) for size in sizes]
            found.append(self._whole(tuple(taken)))
        return found

    def _whole(self, parts: tuple[int, ...]) -> int:
        """Return the dim that is cut into some parts, a new one if there is none."""
        parts = tuple(map(self.find, parts))
        if len(parts) == 1:
            return parts[0]
        if self._wholes is None:
            self._wholes = {self.parts(dim): dim for dim in self._parts}
        whole = self._wholes.get(parts)
        if whole is None:
            whole = self.new(math.prod(map(self.size, parts)))
            self._parts[whole] = parts
            self._wholes[parts] = whole
        return self.find(whole)
