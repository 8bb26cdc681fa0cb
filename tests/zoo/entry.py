"""One model of the zoo: under meshpar's contract, and plain."""

import dataclasses
from collections.abc import Callable

from tests.zoo.plain import mean_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A small model twice, and what it is tried with.

    Args:
        model: Layers -> `meshpar.Model`.
        ends: `nnx.Rngs` -> the plain module of embedding and head.
        groups: Layers -> name -> (what builds a plain block, how many).
        batch: -> arrays by name, 8 examples.
        loss: (whole, batch, step) -> the plain loss.
        rules: Logical axes of its own -> mesh axes.
        tensor: Largest degree of tensor parallelism that its sizes allow.
        microbatches: Whether its loss is a mean over examples of any part of a batch.
    """

    model: Callable
    ends: Callable
    groups: Callable
    batch: Callable
    loss: Callable = mean_loss
    rules: dict = dataclasses.field(default_factory=dict)
    tensor: int = 8
    microbatches: bool = True


def one_group(block):
    """`groups` of an entry whose layers are alike: each `block(rngs, layers)`."""
    return lambda layers: {"blocks": (lambda rngs: block(rngs, layers), layers)}
