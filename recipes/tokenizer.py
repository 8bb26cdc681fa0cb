"""The tokenizer of a run, and the vocabulary that its model needs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from meshpar.data.tokenizer import ByteTokenizer, FileTokenizer, read_tokenizer
from meshpar.errors import DataError
from meshpar.recipes.config import RunConfig
from meshpar.recipes.texts import BYTE_VOCAB

_MULTIPLE = 128
"""Vocabularies are divided over mesh axes; GPT-2's 50,257 by none of them."""
_OF_WEIGHTS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(config: RunConfig) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a run, read once.

    Raises:
        DataError: The file cannot be had.
    """
    return _read(config.tokenizer, config.eos)


def vocab_needed(config: RunConfig) -> int:
    """Tokens that the model of a run has to know, as far as options tell.

    Files of tokens are looked into when they are opened.
    """
    if config.tokenizer is not None:
        return load_tokenizer(config).vocab
    return 1 if config.data else BYTE_VOCAB


def default_vocab(config: RunConfig) -> int | None:
    """The vocabulary of a model that nobody gave one; None is the preset's own."""
    if config.tokenizer is None:
        return None
    return -(-load_tokenizer(config).vocab // _MULTIPLE) * _MULTIPLE


def refuse_bytes(config: RunConfig) -> None:
    """Refuses bytes for weights that come with a tokenizer.

    A run that goes on is as it was begun.

    Raises:
        DataError: Texts would be other tokens than those that the weights know.
    """
    if config.from_weights is None or config.tokenizer or config.resume is True:
        return
    files = [config.from_weights / name for name in _OF_WEIGHTS]
    found = [str(file) for file in files if file.is_file()]
    if found:
        file = files[0] if files[0].is_file() else f"{files[0].name}, made of it first"
        raise DataError(
            f"the weights of --from know the tokens of {found[0]!r}, but without "
            "--tokenizer texts are read as bytes, other tokens; give --data PATH "
            f"--tokenizer {file}",
            key="data.bytes_for_weights",
        )


def byte_notes(config: RunConfig) -> list[str]:
    """A line where weights of a GGUF file, which has a tokenizer, learn bytes."""
    weights = config.from_weights
    if weights is None or config.tokenizer or weights.suffix != ".gguf":
        return []
    return [
        f"note: texts are read as bytes, not by the tokenizer in {weights}: its tokens "
        "mean other things to these weights; give --data and --tokenizer to keep them"
    ]


@lru_cache(maxsize=4)
def _read(path: Path | None, eos: str | None) -> ByteTokenizer | FileTokenizer:
    # Without a tokenizer `eos` is the number of a token in files of tokens.
    return read_tokenizer(path, eos)
