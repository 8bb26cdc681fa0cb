"""Cache of tokenized texts, as files of tokens in a folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.documents import documents
from meshpar.data.megatron import MegatronWriter, read_megatron
from meshpar.data.token_files import TokenFile, file_size
from meshpar.data.tokenizer import ByteTokenizer, FileTokenizer
from meshpar.errors import DataError, Skipped, renamed

_TEXTS_AT_ONCE = 512  # for the tokenizer's threads
_CHARACTERS_AT_ONCE = 1 << 22
_VERSION = 2
"""Version of how texts become tokens; pairs of another version are not used. Those of
version 1 may be cut or padded, as a tokenizer.json may ask."""
_TOLD_S = 1.0
"""Least time to tokenize a file that is reported."""
_GETS_ON_S = 10.0
"""Time between calls of `gets_on`."""


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Tokens of text files, kept in a folder as Megatron's pairs of files.

    A pair belongs to one content of a file, one tokenizer and one policy.

    Args:
        folder: Folder of the pairs; made if it is missing.
        tokenizer: Tokenizer of all texts.
        on_bad_line: "stop" or "skip".
        told: Takes a line about a file that took long, or lines that were skipped.
        gets_on: Called every ten seconds while a long file is tokenized.
    """

    folder: Path
    tokenizer: ByteTokenizer | FileTokenizer
    on_bad_line: str = "stop"
    told: Callable[[str], None] = field(default=print)
    gets_on: Callable[[], Any] = field(default=lambda: None)

    def tokenized(self, path: Path, format: str, field: str) -> TokenFile:
        """Return the tokens of a file of texts, each document with an end token.

        Raises:
            DataError: The file is missing, broken or without a document.
        """
        kept = self.kept_as(path, format, field)
        if not kept.with_suffix(".idx").exists():
            self._tokenize(path, format, field, kept)
        return read_megatron(kept)

    tokens_of = renamed("TokenCache.tokens_of", tokenized)

    def kept_as(self, path: Path, format: str, field: str) -> Path:
        """Return the path of the .bin for the tokens of a file."""
        # The time of the last change of any kind, which nobody can set back.
        size, changed = file_size(path), path.stat().st_ctime_ns
        file = [str(path.resolve()), size, changed, format, field]
        how = [self.tokenizer.identity, self.tokenizer.eos, self.on_bad_line, _VERSION]
        key = hashlib.sha256(json.dumps(file + how).encode()).hexdigest()[:16]
        return self.folder / f"{path.name.partition('.')[0]}-{key}.bin"

    def _tokenize(self, path: Path, format: str, field: str, kept: Path) -> None:
        start, skipped = time.perf_counter(), Skipped(policy=self.on_bad_line)
        said = start
        texts = documents(path, format, field, skipped)
        # The smallest type of the format that holds every token.
        sizes = ((1 << 8, "<u1"), (1 << 16, "<u2"), (1 << 31, "<i4"))
        dtype = next(text for most, text in sizes if self.tokenizer.vocab <= most)
        end = np.array([self.tokenizer.eos], np.int32)
        num_documents = num_tokens = 0
        with MegatronWriter(kept, np.dtype(dtype), path) as writer:
            for batch in _batches(texts):
                for tokens in self.tokenizer.encode(batch):
                    writer.add(np.concatenate([tokens, end]))
                    num_documents += 1
                    num_tokens += len(tokens) + 1
                if time.perf_counter() - said > _GETS_ON_S:
                    self.gets_on()
                    said = time.perf_counter()
            if not num_documents:
                raise DataError(
                    f"{str(path)!r} holds no document; leave it out",
                    key="data.no_documents",
                )
        seconds = time.perf_counter() - start
        if seconds > _TOLD_S:
            self.told(
                f"tokenized {path}: {num_documents:,} documents, {num_tokens:,} tokens "
                f"in {seconds:.0f} s"
            )
        if skipped.count:
            self.told(f"skipped {skipped.count:,} lines, the first: {skipped.first}")


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts: many short ones, or few with a long one at the end."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _TEXTS_AT_ONCE or characters > _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
