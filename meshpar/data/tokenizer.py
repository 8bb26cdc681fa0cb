"""Text into tokens and back, by bytes or a tokenizer.json, and a cache of tokens."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.documents import documents
from meshpar.data.megatron import MegatronWriter, read_megatron
from meshpar.data.token_files import TokenFile, file_size
from meshpar.errors import DataError, Skipped, install_extra, renamed
from meshpar.foreign_files import OverdueError, is_panic, read_bytes, read_json, within

_ENDS_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>"),
    *("<|im_end|>", "[SEP]"),
)
"""End tokens of well-known tokenizers, tried in order."""


_LEAST_S, _CHARACTERS_PER_S = 8.0, 20_000
"""Time limit of a tokenizer: seconds in any case, and characters in one more second.
Usual ones read a million characters a second."""

_MOST_BYTES = 1 << 28
"""Size limit of a tokenizer.json: 256 MiB; the largest known ones have 33 MB."""


class ByteTokenizer:
    """The UTF-8 bytes of a text; a NUL ends a document."""

    vocab = 256
    eos = 0
    eos_text = "NUL"
    name = identity = "bytes"
    unit = "byte"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without an end.

        Raises:
            DataError: A text has characters that UTF-8 lacks, such as half of a pair.
        """
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 are replaced."""
        return bytes(np.asarray(tokens).astype(np.uint8)).decode(errors="replace")


class TokenNumbers:
    """Decoder of files of tokens that come without a tokenizer."""

    name = "token numbers"
    unit = "token"

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the numbers of tokens as text."""
        return " ".join(str(int(token)) for token in tokens)


class FileTokenizer:
    """A tokenizer.json, as Hugging Face's `tokenizers` writes it.

    Args:
        path: The file.
        eos: Text or number of the token that ends a document; None for that of a
            tokenizer_config.json in its folder, or a well-known one.

    Raises:
        DataError: The package is not installed, the file is no tokenizer, or it has no
            such token.
    """

    unit = "token"

    def __init__(self, path: Path, eos: str | None = None) -> None:
        self._path = path
        content = _content(path)
        self.identity = f"crc32 {zlib.crc32(content):08x}"
        self.name = f"{path.name} {self.identity}"
        self._tokenizer = _parse(path, content)
        self.eos = self._end(eos)

    @cached_property
    def vocab(self) -> int:
        """Highest number of a token, plus one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a document."""
        return str(self._tokenizer.id_to_token(self.eos))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without special tokens."""
        try:
            encodings = self._tokenizer.encode_batch(
                list(texts), add_special_tokens=False
            )
        except TypeError:
            for text in texts:
                _utf8(text)
            raise
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in tokens]))

    def _end(self, eos: str | None) -> int:
        asked = (eos,) if eos else (*_configured_end(self._path), *_ENDS_OF_TEXT)
        if eos and eos.isdecimal():
            asked = ()
            if int(eos) < self.vocab:
                return int(eos)
        for text in asked:
            if (token := self._tokenizer.token_to_id(text)) is not None:
                return int(token)
        if eos:
            raise DataError(
                f"{str(self._path)!r} has no token {eos!r}; give --eos the text or the "
                f"number of one below {self.vocab}",
                key="data.unknown_end_token",
            )
        raise DataError(
            f"{str(self._path)!r} has none of {', '.join(_ENDS_OF_TEXT)}; name the "
            "token that ends a document: --eos TOKEN",
            key="data.no_end_token",
        )


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{text[:40]!r} is no text: character {error.start} is "
            f"\\u{ord(text[error.start]):04x}, which UTF-8 has not; give UTF-8 text",
            key="data.unpaired_surrogate",
        ) from error


def read_tokenizer(
    path: Path | None, eos: str | None = None
) -> ByteTokenizer | FileTokenizer:
    """Return the tokenizer of a file, or of bytes without a file.

    Raises:
        DataError: The file is no tokenizer.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path, eos)


def whole_texts_tokenizer(path: Path) -> Any:
    """Return a tokenizer.json as a `tokenizers` object that never cuts or pads texts.

    Its `encode` adds the special tokens that the file asks for.

    Raises:
        DataError: As `FileTokenizer`.
    """
    return _parse(path, _content(path))


def _content(path: Path) -> bytes:
    return read_bytes(
        path,
        key="data.unreadable_tokenizer",
        most=_MOST_BYTES,
        kind=DataError,
        way_out="; name a tokenizer.json",
    )


def _parse(path: Path, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise DataError(
            f"{str(path)!r} needs the package tokenizers: "
            f"{install_extra('tokenizers')}",
            key="data.missing_package",
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except BaseException as error:  # The package raises no narrower one, and panics.
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"{str(path)!r} is no tokenizer.json: {reason}; name the file that "
            "tokenizers' save() writes",
            key="data.not_tokenizer",
        ) from error
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(
            f"{str(path)!r} has a vocabulary of 0 tokens; train the tokenizer, and "
            "name the file that its save() writes then",
            key="data.empty_tokenizer",
        )
    # Files keep what a model was trained or served with; here texts are read whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _Timed(path, tokenizer)


class _Timed:
    """A tokenizer of the package `tokenizers` with a time limit for each call."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._path, self._tokenizer = path, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        # A text alone would be encoded without letting any other thread run.
        return self.encode_batch([text], **options)[0]

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        encode = self._tokenizer.encode_batch
        return self._timed(texts, lambda: encode(texts, **options))

    def _timed(self, texts: list[str], encode: Callable[[], Any]) -> Any:
        size = sum(map(len, texts))
        seconds = _LEAST_S + size / _CHARACTERS_PER_S
        try:
            return within(seconds, encode)
        except OverdueError:
            problem = f"took more than {seconds:.0f} s for {size:,} characters"
        except BaseException as error:
            reason = " ".join(str(error).split())
            if type(error) is Exception:  # The package raises no narrower one.
                raise DataError(
                    f"{str(self._path)!r} cannot encode a text: {reason}; take another "
                    "tokenizer",
                    key="data.tokenizer_fails",
                ) from error
            if not is_panic(error):
                raise
            problem = f"gave up on a text: {reason}"
        raise DataError(
            f"{str(self._path)!r}: its regular expressions {problem}; take another "
            "tokenizer",
            key="data.tokenizer_without_end",
        )


def _configured_end(path: Path) -> list[str]:
    """Return the end token that a tokenizer_config.json in the folder names."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return []
    found = read_json(
        beside,
        key="data.unreadable_tokenizer_config",
        kind=DataError,
        way_out="; it may name the token that ends a document: mend it, or name the "
        "token: --eos TOKEN",
    )
    token = found.get("eos_token") if isinstance(found, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return [token] if isinstance(token, str) else []


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
