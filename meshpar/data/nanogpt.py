"""Flat files of tokens, NAME.bin alone: nanoGPT's, and llm.c's with a header.

nanoGPT (`data/openwebtext/prepare.py`) writes uint16 and nothing else, a document's
last token being the end of text. llm.c (`dev/data/data_common.py`), and with it
modded-nanogpt, begins with 256 int32: 20240520, 1 and the number of uint16 tokens, or
20240801, 7 and the number of uint32 tokens; a document's *first* token is the end of
text there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from meshpar.data.errors import DataError
from meshpar.data.token_file import TokenFile, file_size

_HEADER_BYTES = 256 * 4
_WITH_HEADER = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_SCANNED_AT_ONCE = 1 << 24  # tokens
_LOOKED_AT, _FEWEST = 1 << 18, 8
"""Bytes that tell the size of a token, and how many pairs of two bytes say anything."""
_MOST_HIGH = 15
"""The upper half of a token of four bytes, of vocabularies below a million."""
_OTHERS = {
    b"\x93NUMPY": "NumPy's .npy",
    b"PK\x03\x04": "a zip archive, such as .npz,",
    b"PAR1": "Parquet",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def read_nanogpt(path: Path, eos: int | None = None) -> TokenFile:
    """Return the tokens of a flat file, as one document.

    Args:
        path: NAME.bin.
        eos: Cuts documents at this token; the whole file is read for it once.

    Raises:
        DataError: There is no such file, it is cut off or empty, or looks like one of
            another format, such as tokens of four bytes without a header.
    """
    file_bytes = file_size(path)
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(12), np.dtype("<i4"), min(file_bytes, 12) // 4)
    magic = int(head[0]) if len(head) == 3 else 0
    has_header = magic in _WITH_HEADER and file_bytes >= _HEADER_BYTES
    if has_header:
        dtype, num_tokens = _headed(path, magic, head[1:], file_bytes)
    else:
        _check_two_bytes(path)
        dtype, num_tokens = np.dtype("<u2"), file_bytes // 2
        if file_bytes % 2:
            raise DataError(
                f"{str(path)!r} has {file_bytes} bytes, which are no whole number of "
                "uint16 tokens: it is cut off, or of another format; copy it again",
                key="data.partial_token",
            )
    if not num_tokens:
        raise DataError(
            f"{str(path)!r} holds no token; leave it out", key="data.no_tokens"
        )
    whole = TokenFile(
        path=path,
        dtype=dtype,
        start_byte=_HEADER_BYTES if has_header else 0,
        bounds=np.array([0, num_tokens]),
        file_bytes=file_bytes,
    )
    if eos is None:
        return whole
    return replace(whole, bounds=_documents(whole, eos, begins=has_header))


def _check_two_bytes(path: Path) -> None:
    """Refuse a file without a header whose first tokens are not of two bytes each."""
    with open(path, "rb") as file:
        head = file.read(_LOOKED_AT)
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise DataError(
                f"{str(path)!r} begins as {name} does, and is no flat file of uint16 "
                "tokens: write its tokens with .astype(numpy.uint16).tofile",
                key="data.other_format",
            )
    pairs = np.frombuffer(head, "<u2", len(head) // 4 * 2).reshape(-1, 2)
    if len(pairs) < _FEWEST or pairs[:, 1].max() > _MOST_HIGH:
        return
    if pairs[:, 0].max() > _MOST_HIGH:
        raise DataError(
            f"{str(path)!r} has numbers up to {pairs[:, 1].max()} in every other "
            "place, as tokens of 4 bytes would have, but without a header tokens are "
            "read as uint16: write them so, or with llm.c's header for uint32",
            key="data.tokens_of_four_bytes",
        )


def _headed(
    path: Path, magic: int, rest: np.ndarray, file_bytes: int
) -> tuple[np.dtype, int]:
    version, num_tokens = map(int, rest)
    known, text = _WITH_HEADER[magic]
    if version != known:
        raise DataError(
            f"{str(path)!r}: version {version} of a header {magic}; only {known} is "
            "known",
            key="data.unknown_version",
        )
    if num_tokens < 0:
        raise DataError(
            f"{str(path)!r}: its header speaks of {num_tokens} tokens, which must be 1 "
            "or more; write the file anew",
            key="data.negative_token_count",
        )
    dtype = np.dtype(text)
    needed = _HEADER_BYTES + num_tokens * dtype.itemsize
    if file_bytes < needed:
        raise DataError(
            f"{str(path)!r} has {file_bytes} bytes, but its header speaks of "
            f"{num_tokens} tokens, {needed} bytes: it is cut off; copy it again",
            key="data.cut_off_tokens",
        )
    return dtype, num_tokens


def _documents(file: TokenFile, eos: int, *, begins: bool) -> np.ndarray:
    """Bounds of documents that begin, or end, with the token `eos`."""
    found = []
    for start in range(0, file.num_tokens, _SCANNED_AT_ONCE):
        tokens = file.read(start, min(start + _SCANNED_AT_ONCE, file.num_tokens))
        found.append(np.flatnonzero(tokens == eos) + start)
    cuts = np.concatenate(found) + (0 if begins else 1)
    return np.unique(np.concatenate([[0], cuts, [file.num_tokens]]))
