"""The seams between the groups of blocks of one pipeline.

Between two groups is a seam: a group takes the stream of the group before it, through
`enter` if it has one. Every rank computes this; if the seam lies on another rank, the
result is dropped and the stream of the payload counts (`crossing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import Stream
from meshpar.model.parameter import Params
from meshpar.parallel.blocks import (
    Residuals,
    ScopeArrays,
    restore_vjp,
    vjp_without,
    where,
)
from meshpar.parallel.pipeline.crossing import (
    Payload,
    Payloads,
    zero_arrays,
)
from meshpar.parallel.pipeline.rank_layers import (
    Fact,
    RankLayers,
)

Enter = Callable[[Params, Stream, ScopeArrays], Stream]
"""(ends' parameters, stream of the group before, what scopes are made of) -> stream."""


@dataclass(frozen=True, kw_only=True)
class GroupSeams:
    """The seams between the groups of one pipeline.

    Args:
        enters: `enter` of each group; None if its stream is that of the group before.
        weights: The ends' parameters for use.
        payloads: What passes between stages.
        layers: The layers of this rank.
    """

    enters: Sequence[Enter | None]
    weights: Params
    payloads: Payloads
    layers: RankLayers

    def entered(
        self,
        group: int,
        chunk: jax.Array,
        x: Stream,
        before: tuple,
        arrays: ScopeArrays,
    ) -> tuple[Stream, Residuals | None]:
        """Return the input of a group's first layer here, and residuals of `enter`.

        Args:
            group: Index of the group.
            chunk: Index among the rank's stages.
            x: The group's stream in the payload.
            before: The payload, and this rank's stream of the group before.
            arrays: What scopes are made of.
        """
        if group == 0:
            return x, None
        payload, y = before
        held = self.layers.holds(group - 1, chunk)
        previous = _where(held, y, self.payloads.stream(group - 1, payload))
        entered, residuals = previous, None
        enter = self.enters[group]
        if enter is not None:
            entered, residuals = vjp_without(
                lambda weights, y: enter(weights, y, arrays),
                (self.weights, previous),
                known=(self.weights, arrays),
            )
        begins = self.layers.begins(group, chunk)
        return _where(begins, entered, x), residuals

    def left(self, group: int, chunk: jax.Array, y: Stream) -> Payload:
        """Return the payload with a group's stream if its last layer is here."""
        return self.payloads.holding(group, _where(self.layers.ends(group, chunk), y))

    def gradient_out(
        self, group: int, chunk: jax.Array, of_payload: Payload, of_next: Any
    ) -> Stream:
        """Return the gradient of a group's last stream here."""
        ends = self.layers.ends(group, chunk)
        dy = _where(ends, self.payloads.stream(group, of_payload))
        if of_next is None:
            return dy
        return jax.tree.map(jnp.add, dy, of_next)

    def gradient_in(
        self,
        group: int,
        chunk: jax.Array,
        dx: Stream,
        of_payload: Payload,
        residuals: Residuals | None,
        arrays: ScopeArrays,
    ) -> tuple[Any, Payload, Any]:
        """Take a group's gradient back through its seam.

        Returns:
            Gradients of the stream of the group before on this rank; of the payload,
            this group's added; and of the ends' parameters, or None.
        """
        if group == 0:
            return None, self.payloads.added(of_payload, 0, dx), None
        begins = self.layers.begins(group, chunk)
        of_payload = self.payloads.added(of_payload, group, _where(_not(begins), dx))
        previous, more = _where(begins, dx), None
        if residuals is not None:
            vjp = restore_vjp(residuals, (self.weights, arrays))
            more, previous = _where(begins, vjp(previous))
        held = self.layers.holds(group - 1, chunk)
        of_payload = self.payloads.added(
            of_payload, group - 1, _where(_not(held), previous)
        )
        return _where(held, previous), of_payload, more


def _where(condition: Fact, tree: Any, other: Any = None) -> Any:
    """Return `where(...)`, without an operation if the condition is known."""
    if condition is True:
        return tree
    if condition is False:
        return zero_arrays(tree) if other is None else other
    return where(condition, tree, other)


def _not(condition: Fact) -> Fact:
    return not condition if isinstance(condition, bool) else ~condition
