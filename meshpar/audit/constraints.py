"""Arrays that a traced function constrains to a layout, and the lines that make them.

GSPMD names a collective that serves a sharding constraint after the operation before
it. To tell it from one that nobody asked for, both must agree: the source line of that
operation, and the shape of what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import NamedSharding

from meshpar.audit.traced import source_of, split_of

Constrained = tuple[str, tuple[int, ...]]
"""Line of what makes an array; sizes of a device's part, sorted, none of 1."""


def constrained_arrays(jaxpr: ClosedJaxpr) -> frozenset[Constrained]:
    """Every array that a sharding constraint, or a jit's `out_shardings`, lays out."""
    return frozenset(_visit(jaxpr.jaxpr, frozenset(), ""))


def sizes_of(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of an array's dims whatever their order, those of 1 left out."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def _visit(jaxpr: Jaxpr, manual: frozenset[str], caller: str) -> Iterator[Constrained]:
    lines = _lines(jaxpr, caller)
    for equation in jaxpr.eqns:
        source = source_of(equation) or caller
        if equation.primitive.name == "sharding_constraint":
            [array], sharding = equation.invars, equation.params["sharding"]
            yield from _laid_out(lines.get(array, source), array, sharding, manual)
        params = equation.params
        newly = params.get("newly_manual_axes", params.get("manual_axes", ()))
        shardings = params.get("out_shardings", ())
        for inner in _inner(equation):
            yield from _visit(inner, manual | frozenset(newly), source)
            inner_lines = _lines(inner, source)
            for array, sharding in zip(inner.outvars, shardings, strict=False):
                line = inner_lines.get(array, source)
                yield from _laid_out(line, array, sharding, manual)


def _lines(jaxpr: Jaxpr, caller: str) -> dict[Any, str]:
    return {
        array: source_of(equation) or caller
        for equation in jaxpr.eqns
        for array in equation.outvars
    }


def _inner(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def _laid_out(
    line: str, array: Any, sharding: Any, manual: frozenset[str]
) -> Iterator[Constrained]:
    if not isinstance(sharding, NamedSharding):
        return
    sizes = dict(sharding.mesh.shape)
    split = split_of(sharding, len(array.aval.shape))
    yield (
        line,
        sizes_of(
            tuple(
                -(-dim // math.prod(sizes[axis] for axis in axes - manual))
                for dim, axes in zip(array.aval.shape, split, strict=True)
            )
        ),
    )
