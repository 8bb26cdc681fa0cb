"""One row of a family's table: a tensor of theirs, and where it stands in ours.

The same row reads and writes. A table is a tuple of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

Span = tuple[int, int]
"""First index and the one after the last."""
Reader = Callable[[str, tuple[slice, ...]], np.ndarray]
"""(name, a slice for each dim) -> those values of a tensor of theirs."""

_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True)
class Row:
    """How one tensor of theirs, or one a layer, lies in an array of ours.

    Args:
        theirs: Its name, with `{layer}` and `{expert}` for their numbers.
        ours: Path of the parameter, and where in a layer of it: `qkv[:, :, -1]`.
        how: Their dims -> ours, a letter each, several in brackets where one dim
            holds them: `(K H) D -> D K H`. As they are when absent. `expert` on the
            right alone is the number in the name.
        sizes: Of letters that share a dim of ours.
        order: Letter -> their index of each of our indices along it, by its size.
        plus: What ours is more than theirs.
        first_layer: Their number of our layer 0.
        stride: Layers of theirs from one of ours to the next.
        of_state: Whether it is of the model's state, and no parameter.
        optional: Whether a file may lack it.
    """

    theirs: str
    ours: str
    how: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    order: Mapping[str, Callable[[int], np.ndarray]] = field(default_factory=dict)
    plus: float = 0.0
    first_layer: int = 0
    stride: int = 1
    of_state: bool = False
    optional: bool = False

    @property
    def path(self) -> str:
        """Path of our parameter."""
        return self.ours.partition("[")[0]

    def numbered(self, first_layer: int, stride: int) -> Row:
        """The row, where their layers have other numbers than ours."""
        return replace(self, first_layer=first_layer, stride=stride)


@dataclass(frozen=True)
class Fitted:
    """A row at the sizes of our parameter.

    Args:
        row: The row.
        shape: Of one layer of our parameter.
    """

    row: Row
    shape: tuple[int, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Span of our array in every dim."""
        return tuple(
            (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
            for index in self._indices
        )

    @cached_property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of each of their tensors."""
        return tuple(self._size(group) for group in self._left)

    def names(self, layer: int) -> Iterator[str]:
        """The tensors of theirs that it reads in one layer of ours."""
        for expert in range(self._sizes.get("expert", 1)):
            yield self._name(layer, expert)

    def read(
        self, tensor: Reader, layer: int, wanted: Sequence[Span]
    ) -> tuple[tuple[slice, ...], np.ndarray] | None:
        """Return the part of one of our layers that the row gives.

        Args:
            tensor: Reads theirs.
            layer: Of ours.
            wanted: The part, dim by dim.

        Returns:
            Where it lies in that part, and its values; None where it is outside.
        """
        pairs = zip(wanted, self.spans, strict=True)
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
        if any(start >= stop for start, stop in common):
            return None
        cuts = [
            (start - first, stop - first)
            for (start, stop), (first, _), kept in zip(
                common, self.spans, self._is_kept, strict=True
            )
            if kept
        ]
        spans = {letter: (0, size) for letter, size in self._sizes.items()}
        after = []
        for group, cut in zip(self._right, cuts, strict=True):
            taken: Any = slice(*cut)  # What shares a dim is read whole.
            if len(group) == 1:
                spans[group[0]], taken = self._span(group[0], cut)
            after.append(taken)
        values = self._to_ours(self._theirs(tensor, layer, spans), spans)
        for dim, taken in enumerate(after):
            values = values[(slice(None),) * dim + (taken,)]
        if self.row.plus:
            values = values + np.float32(self.row.plus)
        sizes = [stop - start for start, stop in common]
        where = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(common, wanted, strict=True)
        )
        return where, values.reshape(sizes)

    def write(self, ours: np.ndarray, layer: int) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of theirs that one layer of ours holds, by name.

        Args:
            ours: One layer of our parameter, whole.
            layer: Its number.
        """
        values = ours[self._indices]
        if self.row.plus:
            values = values - np.float32(self.row.plus)
        for dim, group in enumerate(self._right):
            for order in map(self.row.order.get, group):
                if order is not None:
                    back = np.argsort(order(values.shape[dim]))
                    values = np.take(values, back, axis=dim)
        letters = [letter for group in self._right for letter in group]
        values = values.reshape([self._sizes[letter] for letter in letters])
        flat = [letter for group in self._left for letter in group]
        extra = [letter for letter in flat if letter not in letters]  # of size 1
        values = values.reshape(*values.shape, *(1 for _ in extra))
        letters += extra
        per_name = ["expert"] if "expert" in letters else []
        values = values.transpose([letters.index(one) for one in per_name + flat])
        for expert in range(self._sizes.get("expert", 1)):
            one = values[expert] if per_name else values
            theirs = np.ascontiguousarray(one.reshape(self.their_shape))
            yield self._name(layer, expert), theirs

    def _span(self, letter: str, cut: Span) -> tuple[Span, Any]:
        """Return the span of their dim for a part of ours, and its place there."""
        order = self.row.order.get(letter)
        if order is None:
            return cut, slice(None)
        indices = order(self._sizes[letter])[slice(*cut)]
        first, last = int(indices.min()), int(indices.max())
        return (first, last + 1), indices - first

    def _theirs(
        self, tensor: Reader, layer: int, spans: Mapping[str, Span]
    ) -> np.ndarray:
        """The letters of the left in their order, `expert` before them."""
        runs = [list(_runs(group, self._sizes, spans)) for group in self._left]
        flat = [letter for group in self._left for letter in group]
        shape = [spans[letter][1] - spans[letter][0] for letter in flat]
        read = [
            _read_runs(tensor, self._name(layer, expert), runs).reshape(shape)
            for expert in range(*spans.get("expert", (0, 1)))
        ]
        return np.stack(read) if "expert" in spans else read[0]

    def _to_ours(self, values: np.ndarray, spans: Mapping[str, Span]) -> np.ndarray:
        flat = ["expert"] if "expert" in spans else []
        flat += [letter for group in self._left for letter in group]
        right = [letter for group in self._right for letter in group]
        extra = [letter for letter in flat if letter not in right]  # of size 1
        values = values.transpose([flat.index(letter) for letter in right + extra])
        lengths = {letter: stop - start for letter, (start, stop) in spans.items()}
        return values.reshape(
            [math.prod(lengths[letter] for letter in group) for group in self._right]
        )

    def _name(self, layer: int, expert: int) -> str:
        number = self.row.first_layer + layer * self.row.stride
        return self.row.theirs.format(layer=number, expert=expert)

    def _size(self, group: Sequence[str]) -> int:
        return math.prod(self._sizes[letter] for letter in group)

    @cached_property
    def _indices(self) -> tuple[int | slice, ...]:
        text = self.row.ours.partition("[")[2].rstrip("]")
        parts = [part.strip() for part in text.split(",")] if text else []
        parts += [":"] * (len(self.shape) - len(parts))
        return tuple(
            _index(part, size) for part, size in zip(parts, self.shape, strict=True)
        )

    @cached_property
    def _is_kept(self) -> tuple[bool, ...]:
        return tuple(not isinstance(index, int) for index in self._indices)

    @cached_property
    def _sides(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        kept = sum(self._is_kept)
        same = " ".join(f"dim{at}" for at in range(kept))
        left, _, right = (self.row.how or f"{same} -> {same}").partition("->")
        return _groups(left), _groups(right)

    @property
    def _left(self) -> list[tuple[str, ...]]:
        return self._sides[0]

    @property
    def _right(self) -> list[tuple[str, ...]]:
        return self._sides[1]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Size of every letter; a number is its own size."""
        found = dict(self.row.sizes)
        for group in (*self._left, *self._right):
            numbers = {letter: letter.partition("@")[0] for letter in group}
            found |= {
                one: int(size) for one, size in numbers.items() if size.isdecimal()
            }
        spans = [
            span for span, kept in zip(self.spans, self._is_kept, strict=True) if kept
        ]
        for group, (start, stop) in zip(self._right, spans, strict=True):
            unknown = [letter for letter in group if letter not in found]
            known = math.prod(found[one] for one in group if one in found)
            for letter in unknown:
                found[letter] = (stop - start) // known
        return found


def _groups(side: str) -> list[tuple[str, ...]]:
    """The letters of every dim; each 1 is a letter of its own.

    Example:
        >>> _groups("(K H) 1 D")
        [('K', 'H'), ('1@1',), ('D',)]
    """
    found = _GROUP.findall(side)
    groups = [tuple(many.split()) if many else (one,) for many, one in found]
    return [
        (f"1@{at}",) if group == ("1",) else group for at, group in enumerate(groups)
    ]


def _index(text: str, size: int) -> int | slice:
    """An index or a slice as Python writes them, counted from the first.

    Example:
        >>> _index(":-2", 5), _index("-1", 5)
        (slice(0, 3, None), 4)
    """
    if ":" not in text:
        return range(size)[int(text)]
    start, _, stop = text.partition(":")
    first, last, _ = slice(
        int(start) if start else None, int(stop) if stop else None
    ).indices(size)
    return slice(first, last)


def _runs(
    group: Sequence[str], sizes: Mapping[str, int], spans: Mapping[str, Span]
) -> Iterator[Span]:
    """The parts of one dim of theirs, each without a gap, that hold what is wanted.

    Example:
        >>> list(_runs("PN", {"P": 2, "N": 4}, {"P": (0, 2), "N": (1, 3)}))
        [(1, 3), (5, 7)]
    """
    partial = [at for at, one in enumerate(group) if spans[one] != (0, sizes[one])]
    if not partial:
        yield 0, math.prod(sizes[one] for one in group)
        return
    last = partial[-1]
    length = math.prod(sizes[one] for one in group[last + 1 :])
    outer = [range(*spans[one]) for one in group[:last]]
    strides = [math.prod(sizes[one] for one in group[at + 1 :]) for at in range(last)]
    first, after = spans[group[last]]
    for places in np.ndindex(*map(len, outer)):
        start = sum(
            each[at] * stride
            for each, at, stride in zip(outer, places, strides, strict=True)
        )
        yield start + first * length, start + after * length


def _read_runs(
    tensor: Reader,
    name: str,
    runs: Sequence[Sequence[Span]],
    chosen: tuple[slice, ...] = (),
) -> np.ndarray:
    """The values at every combination of a run of each dim."""
    at = len(chosen)
    if at == len(runs):
        return tensor(name, chosen)
    parts = [_read_runs(tensor, name, runs, (*chosen, slice(*run))) for run in runs[at]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=at)
