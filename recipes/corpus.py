"""What a run trains and validates on, from its options."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import grain
import numpy as np

from meshpar import InputError
from meshpar.data.errors import DataError
from meshpar.data.megatron import read_megatron
from meshpar.data.mixture import mixed
from meshpar.data.nanogpt import read_nanogpt
from meshpar.data.packing import packed
from meshpar.data.row_sources import PackedRows, StreamRows, check_row
from meshpar.data.sources import OF_TOKENS, DataSource, check_weights
from meshpar.data.token_cache import TokenCache
from meshpar.data.token_file import TokenFile
from meshpar.data.token_stream import TokenStream
from meshpar.data.tokenizer import ByteTokenizer, FileTokenizer, TokenNumbers
from meshpar.distributed import Processes
from meshpar.recipes.config import RunConfig
from meshpar.recipes.model import sizes_of
from meshpar.recipes.texts import BYTE_VOCAB, HELD_OUT_SHARE, Texts, read_tokens
from meshpar.recipes.tokenizer import tokenizer_of
from meshpar.train.data import TokenWindows

_MOST_HELD_OUT = 1 << 20  # tokens of a source
_COUNTED = 1 << 22
"""Tokens that the baselines count."""

Rows = Any
"""Rows by number, with a length."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Rows to train on, rows to validate on.

    Args:
        train: Of each source of a mixture, or of the only one.
        weights: Of each source; None of the only one.
        validation: In order.
        fingerprint: By which a resumed run knows its data.
        tokenizer: Which text a token is.
        vocab: Every token is below it.
        lines: What is told of it when a run begins.
        counted: Tokens to train and to validate on, for the baselines of a single
            source.
        prompt: What a sample begins with.
    """

    train: Sequence[Rows]
    weights: Sequence[Fraction] | None = None
    validation: Rows
    fingerprint: str
    tokenizer: ByteTokenizer | FileTokenizer | TokenNumbers
    vocab: int
    lines: Sequence[str]
    counted: tuple[np.ndarray, np.ndarray] | None
    prompt: np.ndarray

    def order(self, seed: int) -> grain.MapDataset:
        """The endless order of rows to train on."""
        return mixed(self.train, seed=seed, weights=self.weights)


def corpus_of(
    config: RunConfig,
    processes: Processes,
    told: Callable[[str], None],
    on_file: Callable[[], None] = lambda: None,
) -> Corpus:
    """What a run trains on: `data`, or `text`.

    Of several processes the first tokenizes for all, into a folder that all share.

    Args:
        config: The run's, its folder decided.
        processes: Which have to find the same.
        told: Takes lines on what takes long.
        on_file: Called, on all processes, before a file is opened or tokenized.

    Raises:
        InputError: Data are missing or broken, or other ones on another process.
    """
    if config.data:
        made = _of_data(config, _files_of_all(config, processes, told, on_file))
    else:
        made = _of_texts(read_tokens(config.text, config.seq), config)
    found = processes.gather(made.fingerprint)
    for process, other in enumerate(found):
        if other != found[0]:
            raise InputError(
                f"process {process} reads other data ({other}) than process 0 "
                f"({found[0]}): give all hosts the same files"
            )
    return made


def _of_texts(texts: Texts, config: RunConfig) -> Corpus:
    lengths = len(texts.train), len(texts.validation)
    return Corpus(
        train=[TokenWindows(texts.train, config.seq)],
        validation=TokenWindows(texts.validation, config.seq),
        fingerprint=texts.fingerprint,
        tokenizer=ByteTokenizer(),
        vocab=BYTE_VOCAB,
        lines=["text: {:,} bytes to train on, {:,} held out".format(*lengths)],
        counted=(texts.train, texts.validation),
        prompt=texts.validation[:32],
    )


Files = list[tuple[DataSource, list[TokenFile]]]
"""The files of each source."""


def _files_of_all(
    config: RunConfig,
    processes: Processes,
    told: Callable[[str], None],
    on_file: Callable[[], None],
) -> Files:
    """The files of tokens, those of texts made by the first process."""
    wrong, files = None, None

    def is_at_a_file() -> bool:
        """The others wait for as long as the first gets on."""
        on_file()
        return bool(processes.gather(True)[0])

    if processes.is_first:
        try:
            files = _files(config, told, is_at_a_file)
        except DataError as error:
            wrong = str(error)
        processes.gather(False)
    else:
        while is_at_a_file():
            pass
    wrong = processes.gather(wrong)[0]
    if wrong is not None:
        raise DataError(wrong)
    return _files(config, told, on_file) if files is None else files


def _files(
    config: RunConfig, told: Callable[[str], None], on_file: Callable[[], Any]
) -> Files:
    cache = TokenCache(
        folder=config.data_cache or config.folder / "tokens",
        tokenizer=tokenizer_of(config),
        on_bad_line=config.on_bad_line,
        told=told,
    )
    sources = [DataSource.parse(text) for text in config.data]
    check_weights(sources)
    held_out = [DataSource.parse(text) for text in config.validation_data]
    files: Files = []
    for source in [*sources, *held_out]:
        opened = []
        for one in source.files(_no_data(config)):
            on_file()
            opened.append(_opened(*one, source, cache, config))
        files.append((source, opened))
    return files


def _no_data(config: RunConfig) -> list[Path]:
    """What a folder of data may hold that is none of them."""
    paths = config.folder, config.data_cache, config.tokenizer
    return [path for path in paths if path is not None]


def _opened(
    path: Path, format: str, source: DataSource, cache: TokenCache, config: RunConfig
) -> TokenFile:
    if format == "megatron":
        return read_megatron(path)
    if format == "nanogpt":
        return read_nanogpt(path, _end_of_document(path, config))
    vocab = sizes_of(config)["vocab"]
    if cache.tokenizer.vocab > vocab:
        raise DataError(
            f"{str(path)!r} is read as {cache.tokenizer.name}, of which there are "
            f"{cache.tokenizer.vocab}, but the model has a vocabulary of {vocab}; give "
            f"a model that has {cache.tokenizer.vocab} or more"
        )
    return cache.tokens_of(path, format, source.field)


def _end_of_document(path: Path, config: RunConfig) -> int | None:
    """What documents of a flat file are cut at, where they are to be packed."""
    if not config.pack:
        return None
    if config.tokenizer is not None:
        return tokenizer_of(config).eos
    if config.eos is None or not config.eos.isdecimal():
        raise DataError(
            f"{str(path)!r} does not say where its documents end, as --pack needs; "
            "give the number of the token that ends them, such as --eos 50256"
        )
    return int(config.eos)


def _of_data(config: RunConfig, files: Files) -> Corpus:
    vocab, number = sizes_of(config)["vocab"], len(config.data)
    streams = [TokenStream.of(found, vocab) for found in _merged(files[:number])]
    others = [TokenStream.of(found, vocab) for found in _merged(files[number:])]
    for stream in (*streams, *others):
        check_row(stream, config.seq)
        stream.check_vocab()
    train = streams
    if not others:
        pairs = [stream.split(_num_held_out(stream, config.seq)) for stream in streams]
        train, others = [one for one, _ in pairs], [one for _, one in pairs]
    rows, told = zip(*(_rows(stream, config) for stream in train), strict=True)
    weights = [source.weight for source, _ in files[: len(streams)]]
    validation = grain.MapDataset.concatenate(
        [grain.MapDataset.source(_rows(one, config)[0]) for one in others]
    )
    return Corpus(
        train=rows,
        weights=weights if len(streams) > 1 else None,
        # So that a look at its beginning sees of every source.
        validation=validation.shuffle(seed=0) if len(others) > 1 else validation,
        fingerprint=_fingerprint(config, streams, files),
        **_read_by(config, vocab),
        lines=[*_lines(files, train, others), *filter(None, told)],
        counted=_counted(train[0], others[0]) if len(streams) == 1 else None,
        prompt=others[0].read(others[0].start, others[0].start + min(32, config.seq)),
    )


def _read_by(config: RunConfig, vocab: int) -> dict[str, Any]:
    """The tokenizer, and the vocabulary that is in use."""
    formats = {
        format
        for text in config.data
        for _, format in DataSource.parse(text).files(_no_data(config))
    }
    if formats & OF_TOKENS:
        known = tokenizer_of(config) if config.tokenizer else TokenNumbers()
        return {"tokenizer": known, "vocab": vocab}
    return {"tokenizer": tokenizer_of(config), "vocab": tokenizer_of(config).vocab}


def _merged(files: Files) -> list[list[TokenFile]]:
    """The files of each source of a mixture; of all together without weights."""
    if any(source.weight is not None for source, _ in files):
        return [found for _, found in files]
    return [[one for _, found in files for one in found]] if files else []


def _num_held_out(stream: TokenStream, seq: int) -> int:
    share = int(stream.num_tokens * HELD_OUT_SHARE)
    return min(max(share, seq + 1), _MOST_HELD_OUT + seq)


def _rows(stream: TokenStream, config: RunConfig) -> tuple[Rows, str | None]:
    """The rows of one source, and what is to be told of them."""
    if not config.pack:
        return StreamRows(stream, config.seq), None
    packing = packed(stream.bounds, config.seq)
    if not packing.num_rows:
        check_row(stream, config.seq)
    return PackedRows(stream, packing), (
        f"packed: {stream.num_documents:,} documents in {packing.num_rows:,} rows, "
        f"{packing.filled:.1%} filled; {packing.num_cut:,} were longer than "
        f"{config.seq} tokens and are cut"
    )


def _fingerprint(
    config: RunConfig, streams: Sequence[TokenStream], files: Files
) -> str:
    parts = [stream.fingerprint for stream in streams]
    parts += [str(source.weight) for source, _ in files]
    parts += [tokenizer_of(config).name, str(config.pack)]
    parts += [str(bool(config.validation_data))]
    total = sum(stream.num_tokens for stream in streams)
    return f"{total} tokens, crc32 {zlib.crc32('|'.join(parts).encode()):08x}"


def _lines(
    files: Files, train: Sequence[TokenStream], validation: Sequence[TokenStream]
) -> list[str]:
    total, held_out = (
        sum(stream.num_tokens for stream in streams) for streams in (train, validation)
    )
    lines = [f"data: {total:,} tokens to train on, {held_out:,} to validate"]
    if len(train) > 1:
        weights = [source.weight or 0 for source, _ in files[: len(train)]]
        lines += [
            f"  {float(weight / sum(weights)):.1%} of the rows from {source.path}: "
            f"{stream.num_tokens:,} tokens"
            for (source, _), weight, stream in zip(files, weights, train, strict=False)
        ]
    return lines


def _counted(
    train: TokenStream, validation: TokenStream
) -> tuple[np.ndarray, np.ndarray]:
    first, second = (
        one.read(one.start, one.start + min(one.num_tokens, _COUNTED))
        for one in (train, validation)
    )
    return first, second
