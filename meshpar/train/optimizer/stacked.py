"""Check that an optimizer made for stacked arrays treats each value by itself.

One that closes over an array with a dim of layers, such as a mask of pruned weights,
cannot be traced on one layer's shapes. On the stacked arrays it may do anything to each
value; sums over all values of all parameters are the same either way too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from meshpar.trace.primitives import ELEMENTWISE
from meshpar.train.optimizer.flow import (
    REDUCTIONS,
    NotByLayer,
    Slot,
    Traced,
    Value,
    check_owner,
    run,
    single_owner,
)


def stacked_refusal(trace: Traced, params: Any, stacked: Collection[str]) -> str | None:
    """Return the reason why an optimizer cannot be run on stacked arrays, or None.

    Args:
        trace: Its trace on them.
        params: Their shapes.
        stacked: Paths of the parameters that have layers.
    """

    def values(slots: Sequence[Slot], shapes: Any) -> list[Value]:
        pairs = zip(slots, jax.tree.leaves(shapes), strict=True)
        return [Value(slot.owner, leaf.shape) for slot, leaf in pairs]

    owners = frozenset(stacked)
    of_params = values(trace.params, params)
    of_state = values(trace.state, trace.state_shapes)
    update = [*of_params, *of_state, *of_params, Value(None, ())]
    try:
        for program, inputs, slots in (
            (trace.init, of_params, trace.state),
            (trace.update, update, (*trace.params, *trace.state)),
        ):
            results = run(program, inputs, _Shapes(owners))
            for slot, value in zip(slots, results, strict=True):
                check_owner(slot, value, owners)
                if isinstance(value.content, str):
                    raise NotByLayer(
                        f"{slot.path} is a sum over all layers of {value.owner}"
                    )
    except NotByLayer as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class _Shapes:
    """The domain of shapes, or of the primitive that all values were reduced by."""

    stacked: frozenset[str]

    def constant(self, value: Any) -> tuple[int, ...]:
        return ()

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[Any]:
        name, num_results = equation.primitive.name, len(equation.outvars)
        owned = [one for one in operands if one.owner in self.stacked]
        if not owned:
            return [()] * num_results
        owner, shape = owned[0].owner, owned[0].content
        if any(isinstance(one.content, str) for one in owned):
            raise NotByLayer(f"it takes a mean or a norm of {owner} over all layers")
        if name in ELEMENTWISE:
            return [max((one.content for one in owned), key=len)] * num_results
        if name in REDUCTIONS and len(equation.params["axes"]) == len(shape):
            return [REDUCTIONS[name]]
        raise NotByLayer(f"it does not treat each value of {owner} by itself ({name})")

    def total(self, name: str, terms: Sequence[Value]) -> tuple[int, ...]:
        for term in terms:
            if term.owner in self.stacked and term.content != name:
                raise NotByLayer(f"it adds up {term.owner} with other parameters")
        return ()

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        results = []
        by_branch = [run(branch, inputs, self) for branch in branches]
        for options in zip(*by_branch, strict=True):
            owner = single_owner("cond", options)
            contents = {one.content for one in options if one.owner == owner}
            if owner in self.stacked and len(contents) > 1:
                raise NotByLayer(f"it chooses between arrays and sums of {owner}")
            results.append(Value(owner, contents.pop()))
        return results
