"""Optimizers that mix the rows of a matrix, found in their trace.

Muon, Shampoo and their like multiply or decompose each matrix of a gradient. Devices
that hold shards of it must gather them first. What `on_matrices` computes is not meant:
there each matrix has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.model.contract import Model
from meshpar.model.parameter import is_parameter
from meshpar.parallel.matrices import OnMatrices
from meshpar.trace.walk import array_shape, equations, programs_in
from meshpar.train.optimizer.flow import NotByLayer, Value, run, single_owner, traced
from meshpar.train.optimizer_state import full_dtype

_MIXES = frozenset(
    """
    cholesky conv_general_dilated dot_general eig eigh geqrf hessenberg
    householder_product lu qr schur svd symmetric_product triangular_solve tridiagonal
    """.split()  # noqa: SIM905, a table
)
"""Primitives of which each result depends on a whole row or column of an operand."""


def mixed_parameters(
    optimizer: optax.GradientTransformation, model: Model
) -> dict[str, str]:
    """Return path -> primitive of each parameter whose rows an optimizer mixes.

    Nothing is computed; {} if the trace of one layer cannot be read.
    """
    shapes = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, full_dtype(one.dtype)),
        model.parameters,
        is_leaf=is_parameter,
    )
    found = _Mixed()
    try:
        trace = traced(optimizer, shapes)
        owners = [slot.owner for slot in trace.params]
        states = [slot.owner for slot in trace.state]
        inputs = [Value(owner, None) for owner in (*owners, *states, *owners, None)]
        run(trace.update, inputs, found)
    except NotByLayer:
        pass
    except Exception:  # whatever it raises: `make_train_step` says it
        return {}
    return found.primitives


@dataclass(frozen=True)
class _Mixed:
    """The domain without contents: it notes what mixes the rows of a parameter."""

    primitives: dict[str, str] = field(default_factory=dict)

    def constant(self, value: Any) -> None:
        return None

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[None]:
        inside = (one for part in programs_in(equation) for one in equations(part))
        names = [
            one.primitive.name
            for one in (equation, *inside)
            if one.primitive.name in _MIXES
            and any(len(array_shape(atom)) > 1 for atom in one.invars)
        ]
        for operand in operands:
            if names and operand.owner is not None:
                self.primitives.setdefault(operand.owner, names[0])
        return [None] * len(equation.outvars)

    def total(self, name: str, terms: Sequence[Value]) -> None:
        return None

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        by_branch = [run(branch, inputs, self) for branch in branches]
        owners = (single_owner("cond", one) for one in zip(*by_branch, strict=True))
        return [Value(owner, None) for owner in owners]

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[None]:
        return [None] * len(arrays)
