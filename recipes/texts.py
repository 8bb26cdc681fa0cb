"""The text to train on, and the text to validate on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.train.data import TokenWindows, byte_tokens, read_texts

SHAKESPEARE = Path(__file__).parent / "data" / "shakespeare"
BYTE_VOCAB = 256
HELD_OUT = ("macbeth", "tempest")  # plays for validation
HELD_OUT_SHARE = 0.1  # of a single text, its end


@dataclass(frozen=True)
class Texts:
    """Tokens to train on and tokens to validate on."""

    train: np.ndarray
    validation: np.ndarray


def read_tokens(path: Path, seq: int) -> Texts:
    """Byte tokens; whole plays are held out, or the end of a single text.

    Raises:
        DataError: It is no text, or too short for a window of `seq` tokens.
    """
    texts = read_texts(path)
    held_out = [name for name in texts if name in HELD_OUT]
    if len(texts) > 1:
        held_out = held_out or [list(texts)[-1]]
        train = "\n".join(text for name, text in texts.items() if name not in held_out)
        validation = "\n".join(texts[name] for name in held_out)
    else:
        (text,) = texts.values()
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        train, validation = text[:cut], text[cut:]
    split = Texts(byte_tokens(train), byte_tokens(validation))
    for tokens in (split.train, split.validation):
        TokenWindows(tokens, seq)
    return split
