"""Which inputs of a model a request fills: its own tokens, and those it is about.

A model of one stream goes on with `tokens`. One whose decoder reads what an encoder has
made of another text writes `target_tokens` about `source_tokens`, of which
`source_mask` says which are there (Sutskever et al. 2014; Raffel et al. 2020).
"""

from __future__ import annotations

import jax

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.inputs import Batch
from meshpar.parallel.paged_cache import Source

TOKENS, TARGET = "tokens", "target_tokens"
SOURCE, SEEN = "source_tokens", "source_mask"

DECODER_START = 0
"""The token that a decoder begins with, T5's: its padding."""


def decoder_at(model: Model) -> int:
    """Index of the group whose blocks read what those before have made of a source.

    0 where all blocks are of one stream.

    Raises:
        InputError: Streams meet in another way than a decoder reads an encoder.
    """
    found = [at for at, group in enumerate(model.groups) if group.enter is not None]
    if not found:
        return 0
    known = model.known_inputs
    if len(found) > 1 or not {SOURCE, TARGET} <= known.keys():
        name = model.groups[found[-1]].name
        raise InputError(
            f"block group {name!r} makes its stream from another's; generation knows "
            f"one group that does, with inputs {SOURCE!r} and {TARGET!r}, but the "
            f"model's are {', '.join(map(repr, known))}",
            key="generation.unsupported_streams",
        )
    return found[0]


def reads_source(model: Model) -> bool:
    """Whether a request has a source beside its own tokens."""
    return decoder_at(model) > 0


def tokens_below(model: Model, *, of_source: bool = False) -> int | None:
    """The number of tokens that there are; None where the model does not say."""
    name = SOURCE if of_source else TARGET if reads_source(model) else TOKENS
    known = model.known_inputs.get(name)
    return None if known is None else known.below


def batch_of_tokens(model: Model, tokens: jax.Array, positions: jax.Array) -> Batch:
    """What the functions of new tokens see."""
    name = TARGET if reads_source(model) else TOKENS
    return Batch({name: tokens, "positions": positions})


def batch_of_source(source: Source) -> Batch:
    """What the encoder's functions see."""
    return Batch({SOURCE: source.tokens, SEEN: source.positions >= 0})
