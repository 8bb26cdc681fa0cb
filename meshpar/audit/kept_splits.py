"""How arrays lie as GSPMD keeps them: split along dims that are padded, cut or joined.

Elsewhere in the audit such a dim counts as whole, as does what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshpar.trace.operations import Operation, Value
from meshpar.trace.splits import RULES, Split, elementwise
from meshpar.trace.walk import array_shape

_WHOLE: frozenset[str] = frozenset()
_CUTS = ("pad", "slice", "dynamic_slice")


class KeptSplits:
    """Splits of the values of a traced function; None of what is not known.

    Args:
        traced: Its operations, in their order.
    """

    def __init__(self, traced: Iterable[Operation]):
        self._traced = list(traced)  # they keep the values, so that no id comes twice
        self._found: dict[int, Split | None] = {}
        for operation in self._traced:
            for value in operation.results:
                self.of(value)

    def of(self, value: Value) -> Split | None:
        """How one of them lies."""
        if id(value) not in self._found:
            self._found[id(value)] = self._follow(value)
        return self._found[id(value)]

    def _follow(self, value: Value) -> Split | None:
        maker = value.maker
        if maker is None or not value.operands:
            return value.split
        name = maker.primitive.name
        if name == "sharding_constraint":
            return value.split
        given = tuple(self.of(operand) for operand in value.operands)
        if name in _CUTS:
            return given[0]
        if name == "concatenate":
            return _joined(given)
        if name == "dot_general" and _is_guess(maker, given):
            return None
        return RULES.get(name, elementwise)(maker, given)


def _joined(given: tuple[Split | None, ...]) -> Split | None:
    known = [split for split in given if split is not None]
    return tuple(_WHOLE.union(*axes) for axes in zip(*known, strict=True)) or None


def _is_guess(maker: Any, given: tuple[Split | None, ...]) -> bool:
    """Whether an operand of as many dims as a matmul's result is not known."""
    num_dims = len(array_shape(maker.outvars[0]))
    return any(
        split is None and len(array_shape(atom)) == num_dims
        for split, atom in zip(given, maker.invars, strict=True)
    )


def unpadded(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array before its sides were padded, or joined to what it has.

    Args:
        value: It.
        shape: Its own.
    """
    while value.operands and value.maker is not None:
        if value.maker.primitive.name not in ("pad", "concatenate"):
            break
        shapes = [array_shape(atom) for atom in value.maker.invars]
        largest = max(
            (at for at, other in enumerate(shapes) if len(other) == len(shape)),
            key=lambda at: shapes[at],
        )
        value, shape = value.operands[largest], shapes[largest]
    return shape
