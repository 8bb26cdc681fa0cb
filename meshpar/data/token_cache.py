"""Texts tokenized once, and kept as files of tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.errors import DataError
from meshpar.data.jsonl import jsonl_documents
from meshpar.data.megatron import MegatronWriter, read_megatron
from meshpar.data.parquet import parquet_documents
from meshpar.data.skipped import Skipped
from meshpar.data.text import text_documents
from meshpar.data.token_file import TokenFile, file_size
from meshpar.data.tokenizer import ByteTokenizer, FileTokenizer

_TEXTS_AT_ONCE = 512  # for the tokenizer's threads
_CHARACTERS_AT_ONCE = 1 << 22
_VERSION = 2
"""Of how texts become tokens; pairs of another one are not taken. Those of version 1
may be cut or padded, as a tokenizer.json may ask."""
_TOLD_S = 1.0
"""A file that takes less to tokenize is not told of."""
_GETS_ON_S = 10.0
"""Between calls that say that a long file gets on."""


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Tokens of text files, in a folder, as Megatron's pairs of files.

    A pair is of one file as it was, one tokenizer and one policy; where one of them is
    another, another pair is made.

    Args:
        folder: Where the pairs are; made where it is missing.
        tokenizer: Of all texts.
        on_bad_line: "stop" or "skip".
        told: Takes a line on what took long, or was left out.
        gets_on: Called now and then while a long file is tokenized.
    """

    folder: Path
    tokenizer: ByteTokenizer | FileTokenizer
    on_bad_line: str = "stop"
    told: Callable[[str], None] = field(default=print)
    gets_on: Callable[[], Any] = field(default=lambda: None)

    def tokens_of(self, path: Path, format: str, field: str) -> TokenFile:
        """The tokens of a file of texts, each document with an end; made once.

        Raises:
            DataError: The file is missing, broken or without a document.
        """
        kept = self.kept_as(path, format, field)
        if not kept.with_suffix(".idx").exists():
            self._tokenize(path, format, field, kept)
        return read_megatron(kept)

    def kept_as(self, path: Path, format: str, field: str) -> Path:
        """The .bin that holds, or will hold, the tokens of a file."""
        # The time of the last change of any kind, which nobody can set back.
        size, changed = file_size(path), path.stat().st_ctime_ns
        of = [str(path.resolve()), size, changed, format, field]
        by = [self.tokenizer.identity, self.tokenizer.eos, self.on_bad_line, _VERSION]
        key = hashlib.sha256(json.dumps(of + by).encode()).hexdigest()[:16]
        return self.folder / f"{path.name.partition('.')[0]}-{key}.bin"

    def _tokenize(self, path: Path, format: str, field: str, kept: Path) -> None:
        start, skipped = time.perf_counter(), Skipped(policy=self.on_bad_line)
        said = start
        texts = _documents(path, format, field, skipped)
        end = np.array([self.tokenizer.eos], np.int32)
        num_documents = num_tokens = 0
        with MegatronWriter(kept, _dtype(self.tokenizer.vocab), path) as writer:
            for several in _several(texts):
                for tokens in self.tokenizer.encode(several):
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


def _several(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts: many short ones, or few with a long one at the end."""
    found: list[str] = []
    characters = 0
    for text in texts:
        found.append(text)
        characters += len(text)
        if len(found) == _TEXTS_AT_ONCE or characters > _CHARACTERS_AT_ONCE:
            yield found
            found, characters = [], 0
    if found:
        yield found


def _documents(path: Path, format: str, field: str, skipped: Skipped) -> Iterator[str]:
    if format == "text":
        return text_documents(path)
    if format == "jsonl":
        return jsonl_documents(path, field, skipped)
    return parquet_documents(path, field, skipped)


def _dtype(vocab: int) -> np.dtype:
    """The smallest type of the format that holds every token."""
    sizes = ((1 << 8, "<u1"), (1 << 16, "<u2"), (1 << 31, "<i4"))
    return np.dtype(next(dtype for most, dtype in sizes if vocab <= most))
