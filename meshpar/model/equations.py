"""The equations of a traced program, those of the programs inside it among them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation, an outer one before those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda node: isinstance(node, ClosedJaxpr | Jaxpr),
        ):
            if isinstance(inner, ClosedJaxpr):
                yield from equations(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                yield from equations(inner)
