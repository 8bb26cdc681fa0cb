"""Whether an optimizer made for the stacked arrays treats each value by itself.

One that closes over an array with a dim of layers, such as a mask of pruned weights,
cannot be traced on one layer's shapes. On the stacked arrays it may do to each value
what it likes; sums over all values of all parameters are the same either way too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.trace.primitives import ELEMENTWISE
from meshpar.train.optimizer.flow import (
    REDUCTIONS,
    Choice,
    NotByLayer,
    Value,
    run,
)
from meshpar.train.optimizer.program import Operation, Program
from meshpar.train.optimizer.traced import Slot, Traced, check_owner


def refusal_of_stacked(
    trace: Traced, params: Any, stacked: Collection[str]
) -> str | None:
    """Why an optimizer cannot be run on stacked arrays; None if it can.

    Args:
        trace: Its trace on them.
        params: Their shapes.
        stacked: Paths of the parameters that have layers.
    """
    domain = _Shapes(frozenset(stacked))
    of_params = _values(trace.params, params)
    of_state = _values(trace.state, trace.state_shapes)
    loss = Value(None, ())
    update = (*of_params, *of_state, *of_params, loss)
    try:
        _check(trace.init, of_params, trace.state, domain)
        _check(trace.update, update, (*trace.params, *trace.state), domain)
    except NotByLayer as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class _Shapes:
    """The domain of shapes, or of the primitive that all values were reduced by.

    Args:
        stacked: Paths of the parameters that have layers.
    """

    stacked: frozenset[str]

    def constant(self, value: Any) -> tuple[int, ...]:
        return ()

    def apply(self, operation: Operation, operands: Sequence[Value]) -> list[Any]:
        owned = [one for one in operands if one.owner in self.stacked]
        num_results = len(operation.outputs)
        if not owned:
            return [()] * num_results
        owner, shape = owned[0].owner, owned[0].content
        if any(isinstance(one.content, str) for one in owned):
            raise NotByLayer(f"it takes a mean or a norm of {owner} over all layers")
        if operation.name in ELEMENTWISE:
            return [max((one.content for one in owned), key=len)] * num_results
        if operation.name in REDUCTIONS and len(operation.params["axes"]) == len(shape):
            return [REDUCTIONS[operation.name]]
        raise NotByLayer(
            f"it does not treat each value of {owner} by itself ({operation.name})"
        )

    def total(self, name: str, terms: Sequence[Value]) -> tuple[int, ...]:
        for term in terms:
            if term.owner in self.stacked and term.content != name:
                raise NotByLayer(f"it adds up {term.owner} with other parameters")
        return ()

    def choose(self, choice: Choice) -> list[Any]:
        results = []
        for owner, values in choice.results(self):
            contents = {one.content for one in values if one.owner == owner}
            if owner in self.stacked and len(contents) > 1:
                raise NotByLayer(f"it chooses between arrays and sums of {owner}")
            results.append(contents.pop())
        return results


def _values(slots: Sequence[Slot], shapes: Any) -> list[Value]:
    leaves = jax.tree.leaves(shapes)
    return [
        Value(slot.owner, leaf.shape) for slot, leaf in zip(slots, leaves, strict=True)
    ]


def _check(
    program: Program,
    inputs: Sequence[Value],
    outputs: Sequence[Slot],
    domain: _Shapes,
) -> None:
    for slot, value in zip(outputs, run(program, inputs, domain), strict=True):
        check_owner(slot, value, domain.stacked)
        if isinstance(value.content, str):
            raise NotByLayer(f"{slot.path} is a sum over all layers of {value.owner}")
