"""The texts to train on, and the texts to validate on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.train.data import DataError, byte_tokens, read_texts

SHAKESPEARE = Path(__file__).parent / "data" / "shakespeare"
BYTE_VOCAB = 256
HELD_OUT = ("macbeth", "tempest")  # plays for validation
HELD_OUT_SHARE = 0.1  # of a single text, its end


@dataclass(frozen=True)
class Texts:
    """Tokens to train on and tokens to validate on."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Length and checksum of what is trained on, by which a resumed run knows it.

        Example:
            >>> Texts(byte_tokens("to be"), byte_tokens("or not")).fingerprint
            '5 bytes, crc32 fb6b8c55'
        """
        return f"{len(self.train)} bytes, crc32 {zlib.crc32(self.train.tobytes()):08x}"


def read_tokens(paths: Sequence[Path], seq: int) -> Texts:
    """Byte tokens of files and folders, one after another, each with its own held out.

    So each text counts by its length. Of a folder whole plays are held out, or its last
    text; of a single text its end.

    Args:
        paths: Files, and folders of .txt files; Shakespeare's plays when empty.
        seq: Tokens of a window.

    Raises:
        DataError: One is no text, or they are too short for a window of `seq` tokens.
    """
    parts = [split_texts(read_texts(path)) for path in paths or (SHAKESPEARE,)]
    train, validation = ("\n".join(texts) for texts in zip(*parts, strict=True))
    split = Texts(byte_tokens(train), byte_tokens(validation))
    for use, tokens in (("to train on", split.train), ("held out", split.validation)):
        if len(tokens) < seq + 1:
            names = ", ".join(map(str, list(paths)[:3])) or "Shakespeare's plays"
            raise DataError(
                f"{len(tokens)} bytes of {names} {use} are too few for one window of "
                f"{seq} and its successor; give more text or a smaller --seq",
                key="data.too_few_tokens",
            )
    return split


def split_texts(texts: dict[str, str]) -> tuple[str, str]:
    """Return training and held-out texts: files of a folder, or one's end."""
    if len(texts) == 1:
        (text,) = texts.values()
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        return text[:cut], text[cut:]
    held_out = [name for name in texts if name in HELD_OUT] or [list(texts)[-1]]
    train = "\n".join(text for name, text in texts.items() if name not in held_out)
    return train, "\n".join(texts[name] for name in held_out)
