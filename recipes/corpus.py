"""Training and validation data of a run, from its options."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from meshpar import InputError
from meshpar.data.batches import PackedRows, StreamRows, check_row, mixed, packed
from meshpar.data.sources import OF_TOKENS, DataSource
from meshpar.data.token_files import TokenFile, TokenStream
from meshpar.data.tokenizer import ByteTokenizer, FileTokenizer, TokenNumbers
from meshpar.distributed import Processes
from meshpar.errors import DataError, printable
from meshpar.recipes.config import RunConfig
from meshpar.recipes.corpus_files import Files, not_data, source_files
from meshpar.recipes.model import model_sizes
from meshpar.recipes.texts import BYTE_VOCAB, HELD_OUT_SHARE, Texts, read_tokens
from meshpar.recipes.tokenizer import byte_notes, load_tokenizer, refuse_bytes
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
        formats: Of the files, as `meshpar.data.sources` names them.
        stop_tokens: Tokens that end a document; none where nothing says which.
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
    formats: Sequence[str] = ("text",)
    stop_tokens: Sequence[int] = ()

    def order(self, seed: int) -> grain.MapDataset:
        """The endless order of rows to train on."""
        return mixed(self.train, seed=seed, weights=self.weights)


def load_corpus(
    config: RunConfig,
    processes: Processes,
    told: Callable[[str], None],
    on_file: Callable[[], None] = lambda: None,
) -> Corpus:
    """Return the data of a run: those of `data`, or of `text`.

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
        made = _data_corpus(config, source_files(config, processes, told, on_file))
    else:
        refuse_bytes(config)
        made = _text_corpus(read_tokens(config.text, config.seq), config)
    found = processes.gather(made.fingerprint)
    for process, other in enumerate(found):
        if other != found[0]:
            raise InputError(
                f"process {process} reads other data ({other}) than process 0 "
                f"({found[0]}): give all hosts the same files",
                key="processes.different_data",
            )
    return made


def _text_corpus(texts: Texts, config: RunConfig) -> Corpus:
    lengths = len(texts.train), len(texts.validation)
    return Corpus(
        train=[TokenWindows(texts.train, config.seq)],
        validation=TokenWindows(texts.validation, config.seq),
        fingerprint=texts.fingerprint,
        tokenizer=ByteTokenizer(),
        vocab=BYTE_VOCAB,
        lines=[
            "text: {:,} bytes to train on, {:,} held out".format(*lengths),
            *byte_notes(config),
        ],
        counted=(texts.train, texts.validation),
        prompt=texts.validation[:32],
    )


def _data_corpus(config: RunConfig, files: Files) -> Corpus:
    vocab, number = model_sizes(config)["vocab"], len(config.data)
    streams = [
        TokenStream.from_files(found, vocab) for found in _merged(files[:number])
    ]
    others = [TokenStream.from_files(found, vocab) for found in _merged(files[number:])]
    for stream in (*streams, *others):
        check_row(stream, config.seq)
        stream.check_vocab()
    train = streams
    if not others:
        pairs = [stream.split(_num_held_out(stream, config.seq)) for stream in streams]
        train, others = [one for one, _ in pairs], [one for _, one in pairs]
    rows, told = zip(*(_rows(stream, config) for stream in train), strict=True)
    held_out = [_rows(stream, config)[0] for stream in others]
    for stream, one in zip(train, rows, strict=True):
        _check_targets("to train on", [stream], [one])
    _check_targets("to validate on", others, held_out)
    weights = [source.weight for source, _ in files[: len(streams)]]
    validation = grain.MapDataset.concatenate(
        [grain.MapDataset.source(one) for one in held_out]
    )
    read_by = _read_by(config, vocab)
    notes = [] if isinstance(read_by["tokenizer"], TokenNumbers) else byte_notes(config)
    return Corpus(
        train=rows,
        weights=weights if len(streams) > 1 else None,
        # So that a look at its beginning sees of every source.
        validation=validation.shuffle(seed=0) if len(others) > 1 else validation,
        fingerprint=_fingerprint(config, streams, files),
        **read_by,
        lines=[
            *_lines(files, train, others),
            _end_token_line(read_by),
            *filter(None, told),
            *notes,
        ],
        counted=_counted(train[0], others[0]) if len(streams) == 1 else None,
        prompt=others[0].read(others[0].start, others[0].start + min(32, config.seq)),
    )


def _read_by(config: RunConfig, vocab: int) -> dict[str, Any]:
    """The tokenizer, the vocabulary that is in use, and the formats of the files."""
    formats = {
        format
        for text in config.data
        for _, format in DataSource.parse(text).files(not_data(config))
    }
    known: Any = load_tokenizer(config)
    if formats & OF_TOKENS and not config.tokenizer:
        known = TokenNumbers()
    if not formats & OF_TOKENS:
        vocab = known.vocab
    return {
        "tokenizer": known,
        "vocab": vocab,
        "formats": sorted(formats),
        "stop_tokens": _stop_tokens(config, known),
    }


def _stop_tokens(
    config: RunConfig, known: ByteTokenizer | FileTokenizer | TokenNumbers
) -> list[int]:
    """The token that ends a document; none where files of tokens do not say."""
    if not isinstance(known, TokenNumbers):
        return [known.eos]
    return [int(config.eos)] if config.eos and config.eos.isdecimal() else []


def _end_token_line(read_by: Mapping[str, Any]) -> str:
    """Describe the token that ends a document."""
    known, ends = read_by["tokenizer"], read_by["stop_tokens"]
    if not ends:
        return "documents: no end token is known; give --eos NUMBER"
    text = "" if isinstance(known, TokenNumbers) else f" ({printable(known.eos_text)})"
    return f"documents: token {ends[0]}{text} ends each one, no token begins it"


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


def _check_targets(
    use: str, streams: Sequence[TokenStream], rows: Sequence[Rows]
) -> None:
    """Refuses packed rows of documents that are an end and nothing else.

    Raises:
        DataError: No token has a successor, so that there is no loss.
    """
    packings = [one.packing for one in rows if isinstance(one, PackedRows)]
    if len(packings) < len(rows) or any(one.num_targets for one in packings):
        return
    names = ", ".join(str(file.path) for one in streams for file in one.files[:3])
    num_documents = sum(stream.num_documents for stream in streams)
    raise DataError(
        f"the {sum(map(len, rows)):,} packed rows {use} of {names} have 0 tokens with "
        f"a successor: their {num_documents:,} documents are empty but for the end; "
        "give others, or name some in --validation-data",
        key="data.no_targets",
    )


def _fingerprint(
    config: RunConfig, streams: Sequence[TokenStream], files: Files
) -> str:
    parts = [stream.fingerprint for stream in streams]
    number = len(config.data)
    for of_one_kind in (files[:number], files[number:]):
        parts += _shares([source.weight for source, _ in of_one_kind])
    parts += [load_tokenizer(config).identity, str(config.pack)]
    parts += [str(bool(config.validation_data))]
    total = sum(stream.num_tokens for stream in streams)
    return f"{total} tokens, crc32 {zlib.crc32('|'.join(parts).encode()):08x}"


def _shares(weights: Sequence[Fraction | None]) -> list[str]:
    """Return each source's share of a mixture; the weights need not add up to 1."""
    total = sum(filter(None, weights))
    return [str(None if one is None else one / total) for one in weights]


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
