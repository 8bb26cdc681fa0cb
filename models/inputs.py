"""Inputs of the families of models here."""

from __future__ import annotations

from meshpar.model.inputs import Input

LANGUAGE = {
    "tokens": Input(("batch", "seq"), "int"),
    "targets": Input(("batch", "seq"), "int"),
    "weights": Input(("batch", "seq"), "float", is_weight=True),
    "positions": Input(("batch", "seq"), "int", optional=True),
}
"""A language model's: each token, the one that follows it, how much that counts, and
its position where it is not its place in the row."""
