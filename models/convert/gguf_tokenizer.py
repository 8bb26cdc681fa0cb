"""The tokenizer that a GGUF file holds, as one of `tokenizers`."""

from __future__ import annotations

from typing import Any

from meshpar import InputError
from meshpar.foreign_files import error_reason
from meshpar.models.convert.gguf_file import GGUFFile

_CONTROL = 3
"""The type of a token that stands for no text."""


def gguf_tokenizer(file: GGUFFile) -> Any:
    """A `tokenizers.Tokenizer` of byte pairs, as SmolLM2 has it.

    Raises:
        InputError: The file holds one of another kind, or a broken one.
    """
    kind = file.metadata("tokenizer.ggml.model"), file.metadata("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise InputError(
            f"{file.where!r} has a tokenizer {kind[0]!r}, pre {kind[1]!r}; known: "
            "'gpt2', pre 'smollm': take the tokenizer.json of the model",
            key="weights.unknown_tokenizer",
        )
    try:
        return _tokenizer(file)
    except InputError:
        raise
    except Exception as error:  # `tokenizers` raises no narrower one.
        raise InputError(
            f"{file.where!r} has a tokenizer that contradicts itself: "
            f"{error_reason(error)}; take the tokenizer.json of the model",
            key="weights.broken_tokenizer",
        ) from error


def _tokenizer(file: GGUFFile) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = file.metadata("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in file.metadata("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = file.metadata("tokenizer.ggml.token_type")
    control = [
        token for token, one in zip(tokens, types, strict=True) if one == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in control])
    return tokenizer
