"""What happens between two groups of blocks, on the rank that has both and on others.

A group takes the stream of the group before it, through `enter` where it has one. Every
rank computes this; where the seam lies on another rank the result is left out, and the
stream of the payload counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import Stream
from meshpar.model.parameter import Params
from meshpar.parallel.blocks import Known, Residuals, restore_vjp, vjp_without, where
from meshpar.parallel.pipeline.payloads import Payloads, zeros_of
from meshpar.parallel.pipeline.rank_layers import Fact, RankLayers
from meshpar.parallel.pipeline.work import Payload

Enter = Callable[[Params, Stream, Known], Stream]
"""(ends' parameters, stream of the group before, what scopes are made of) -> stream."""


@dataclass(frozen=True, kw_only=True)
class GroupSeams:
    """The seams between the groups of one pipeline.

    Args:
        enters: Of each group but the first, what makes its stream; None where it is
            that of the group before.
        weights: The ends' parameters for use.
        payloads: What passes between stages.
        layers: Which layers this rank has.
    """

    enters: Sequence[Enter | None]
    weights: Params
    payloads: Payloads
    layers: RankLayers

    def entered(
        self, group: int, chunk: jax.Array, x: Stream, before: tuple, known: Known
    ) -> tuple[Stream, Residuals | None]:
        """A group's stream as its first layer here takes it; residuals of `enter`.

        Args:
            group: Which.
            chunk: Of which of the rank's stages.
            x: Its stream in the payload.
            before: The payload, and the stream of the group before as it is here.
            known: What scopes are made of.
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
                lambda weights, y: enter(weights, y, known),
                (self.weights, previous),
                known=(self.weights, known),
            )
        begins = self.layers.begins(group, chunk)
        return _where(begins, entered, x), residuals

    def left(self, group: int, chunk: jax.Array, y: Stream) -> Payload:
        """The payload with a group's stream, where its last layer is here."""
        return self.payloads.of(group, _where(self.layers.ends(group, chunk), y))

    def gradient_out(
        self, group: int, chunk: jax.Array, of_payload: Payload, of_next: Any
    ) -> Stream:
        """Gradient of a group's last stream here."""
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
        found: Payload,
        residuals: Residuals | None,
        known: Known,
    ) -> tuple[Any, Payload, Any]:
        """What a group's gradient becomes before it.

        Returns:
            Gradient of the stream of the group before here, of the payload with what
            this group adds, and of the ends' parameters or None.
        """
        if group == 0:
            return None, self.payloads.added(found, 0, dx), None
        begins = self.layers.begins(group, chunk)
        found = self.payloads.added(found, group, _where(_not(begins), dx))
        previous, more = _where(begins, dx), None
        if residuals is not None:
            vjp = restore_vjp(residuals, (self.weights, known))
            more, previous = _where(begins, vjp(previous))
        held = self.layers.holds(group - 1, chunk)
        found = self.payloads.added(found, group - 1, _where(_not(held), previous))
        return _where(held, previous), found, more


def _where(condition: Fact, tree: Any, other: Any = None) -> Any:
    """`where`, nothing done where the condition is known."""
    if condition is True:
        return tree
    if condition is False:
        return zeros_of(tree) if other is None else other
    return where(condition, tree, other)


def _not(condition: Fact) -> Fact:
    return not condition if isinstance(condition, bool) else ~condition
