"""A payload: what passes between stages, the streams that cross from one to the next.

Streams of the same shapes share a place; the ranks that read a place know which group's
stream it holds. All ranks send the same shapes, zeros where they have no such stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import Stream
from meshpar.parallel.pipeline.work import Payload


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """The payloads of one pipeline.

    Args:
        streams: Shapes of each group's stream.
        crossing: The groups whose stream leaves a rank, first to last.
    """

    streams: Sequence[Any]
    crossing: Sequence[int]

    @cached_property
    def slots(self) -> tuple[int | None, ...]:
        """Of each group, the place of its stream in a payload; None if in none."""
        kinds = [
            (
                jax.tree.structure(stream),
                tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(stream)),
            )
            for stream in self.streams
        ]
        places = list(dict.fromkeys(kinds[group] for group in self.crossing))
        return tuple(
            places.index(kind) if group in self.crossing else None
            for group, kind in enumerate(kinds)
        )

    def of(self, group: int, stream: Any) -> Payload:
        """A payload with a group's stream in its place, zeros elsewhere."""
        own = self.slots[group]
        if own is None:
            raise ValueError(f"the stream of group {group} never leaves a rank")
        return tuple(
            stream if slot == own else zeros_of(shape)
            for slot, shape in enumerate(self.shapes)
        )

    @property
    def shapes(self) -> Payload:
        """The shapes of every payload."""
        return self.places(self.streams)

    def places(self, values: Sequence[Any]) -> Payload:
        """For each place of a payload the value of the first group that has it."""
        num_places = 1 + max(slot for slot in self.slots if slot is not None)
        return tuple(values[self.slots.index(slot)] for slot in range(num_places))

    def stream(self, group: int, payload: Payload) -> Stream:
        """A group's stream of a payload, zeros where it is in none."""
        slot = self.slots[group]
        return zeros_of(self.streams[group]) if slot is None else payload[slot]

    def added(self, payload: Payload, group: int, stream: Stream) -> Payload:
        """A payload with a group's stream added to what stands in its place."""
        slot = self.slots[group]
        if slot is None:
            return payload
        parts = list(payload)
        parts[slot] = jax.tree.map(jnp.add, parts[slot], stream)
        return tuple(parts)


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
