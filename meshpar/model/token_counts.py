"""What of a trace depends on how many tokens are at hand, found by tracing it twice.

A mean over the tokens at hand divides by their number: a constant of the trace, like
any other. Beside the trace of the same function with fewer tokens at hand of the same
sequence it is the one that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from meshpar.model.token_flow import Flow, shape_of

_SAME_VALUE = {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type"),
    *("copy", "slice", "stop_gradient", "sharding_constraint"),
}
_ALSO_ZERO = {"add", "add_any", "sub", "neg", "reduce_sum", "concatenate", "select_n"}
"""Operations that give zeros where all they are given are zeros."""


class Twins:
    """The operations of a program beside those of the same with fewer tokens.

    Where the two are not the same, operation for operation, the rest has no twins.
    """

    def __init__(self, jaxpr: Jaxpr, other: Jaxpr | None) -> None:
        self._twins: dict[int, JaxprEqn] = {}
        if other is not None:
            self._pair(jaxpr, other)

    def without_tokens(
        self, equation: JaxprEqn, given: list[Flow], found: list[Flow]
    ) -> list[Flow]:
        """Flows of an operation's results, none of whose arguments has tokens."""
        twin = self._twins.get(id(equation))
        counted = any(flow.counted for flow in given)
        if twin is not None:
            counted |= _other_constants(equation, twin)
            counted |= _sums_places(equation, twin)
        value = _value(equation.primitive.name, given)
        return [
            Flow(uniform=flow.uniform, value=value, counted=counted) for flow in found
        ]

    def counts(self, equation: JaxprEqn, given: list[Flow]) -> bool:
        """Whether something beside tokens depends on how many are at hand."""
        twin = self._twins.get(id(equation))
        differs = twin is not None and _other_constants(equation, twin)
        return differs or any(flow.counted for flow in given)

    def _pair(self, jaxpr: Jaxpr, other: Jaxpr) -> None:
        for one, twin in zip(jaxpr.eqns, other.eqns, strict=False):
            if one.primitive is not twin.primitive:
                return
            self._twins[id(one)] = twin
            for inner, its in zip(_programs(one), _programs(twin), strict=False):
                self._pair(inner, its)


def _value(name: str, given: list[Flow]) -> Any:
    """What all values of a result are, where that is known."""
    zeros = [flow.zero for flow in given]
    if name in _SAME_VALUE:
        return given[0].value
    if name == "not" and isinstance(given[0].value, bool):
        return not given[0].value
    gone = name in ("mul", "and") and any(zeros)
    return 0 if gone or (name in _ALSO_ZERO and all(zeros)) else None


def _other_constants(equation: JaxprEqn, twin: JaxprEqn) -> bool:
    return any(
        isinstance(one, Literal)
        and isinstance(other, Literal)
        and not np.array_equal(one.val, other.val, equal_nan=True)
        for one, other in zip(equation.invars, twin.invars, strict=False)
    )


def _sums_places(equation: JaxprEqn, twin: JaxprEqn) -> bool:
    """Whether it makes as much of more places."""
    pairs = [
        [
            shape_of(one) == shape_of(other)
            for one, other in zip(mine, its, strict=False)
        ]
        for mine, its in (
            (equation.invars, twin.invars),
            (equation.outvars, twin.outvars),
        )
    ]
    return not all(pairs[0]) and all(pairs[1])


def _programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an operation runs, such as a loop's body."""
    for value in equation.params.values():
        several: Any = value if isinstance(value, tuple | list) else (value,)
        for one in several:
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one
