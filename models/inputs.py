"""Inputs of the families of models here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshpar.model.inputs import Input, Inputs

LANGUAGE = {
    "tokens": Input(("batch", "seq"), "int"),
    "targets": Input(("batch", "seq"), "int", counted_by="weights"),
    "weights": Input(("batch", "seq"), "float", is_weight=True),
    "positions": Input(("batch", "seq"), "int", optional=True, below=2**31),
    "segment_ids": Input(("batch", "seq"), "int", optional=True),
}
"""A language model's: each token, the one that follows it, how much that counts, its
position where it is not its place in the row, and the number of its document where a
row has several: a token sees none of another, and none of a number below 0."""


def language_inputs(vocab: int, max_seq: int | None = None) -> Inputs:
    """A language model's inputs, their tokens below the size of its vocabulary.

    A target outside it, such as -100, is left out by a weight of 0.

    Args:
        vocab: Tokens that the model knows.
        max_seq: Positions that it knows; any when absent.

    Example:
        >>> language_inputs(64)["tokens"].below
        64
    """
    inputs = all_below(vocab, LANGUAGE, ("tokens", "targets"))
    return inputs if max_seq is None else all_below(max_seq, inputs, ("positions",))


def all_below(vocab: int, inputs: Inputs, names: Sequence[str]) -> Inputs:
    """`inputs`, those of `names` with whole numbers below `vocab`."""
    bounded = {name: replace(inputs[name], below=vocab) for name in names}
    return {**inputs, **bounded}
