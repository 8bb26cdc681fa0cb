"""GGUF bytes from plain values, which may contradict one another."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

_ALIGNMENT = 32
_MOST_DEEP = 30


def document_of(path: Path) -> dict[str, Any]:
    """Return the values, tensors and bytes of data of a file, without the data."""
    import gguf

    reader = gguf.GGUFReader(path)
    values = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = [
        [
            one.name,
            [int(size) for size in one.shape],
            int(one.tensor_type),
            int(one.data_offset - reader.data_offset),
        ]
        for one in reader.tensors
    ]
    data_bytes = path.stat().st_size - int(reader.data_offset)
    return {"values": values, "tensors": tensors, "data_bytes": data_bytes}


def gguf_bytes(document: dict[str, Any]) -> bytes:
    """Return a file of that header and zeros; what has no type in GGUF is left out."""
    values = document["values"] if isinstance(document["values"], dict) else {}
    told = [(key, _typed(value)) for key, value in values.items()]
    pairs = [_text(str(key)) + typed for key, typed in told if typed is not None]
    tensors = document["tensors"] if isinstance(document["tensors"], list) else []
    infos = [_tensor(one) for one in tensors if isinstance(one, list)]
    found = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs))
    found += b"".join((*pairs, *infos))
    return found + bytes(-len(found) % _ALIGNMENT + document["data_bytes"])


def _tensor(said: list[Any]) -> bytes:
    name, dims, kind, offset = (*said, 0, 0, 0, 0)[:4]
    dims = dims if isinstance(dims, list) else [dims]
    found = _text(str(name)) + struct.pack("<I", len(dims))
    found += b"".join(struct.pack("<Q", _whole(size, 64)) for size in dims)
    return found + struct.pack("<IQ", _whole(kind, 32), _whole(offset, 64))


def _typed(value: Any) -> bytes | None:
    found = _value(value)
    return None if found is None else struct.pack("<I", found[0]) + found[1]


def _value(value: Any, deep: int = 0) -> tuple[int, bytes] | None:
    """Return the number of a value's type, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int) and 0 <= value < 1 << 32:
        return 4, struct.pack("<I", value)
    if isinstance(value, int):
        kind = 11 if value < 0 else 10
        return kind, struct.pack("<Q", _whole(value, 64))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, list) and deep < _MOST_DEEP:
        return 9, _list(value, deep + 1)
    return None


def _list(values: list[Any], deep: int) -> bytes:
    typed = [found for one in values if (found := _value(one, deep)) is not None]
    kind = typed[0][0] if typed else 4
    alike = [content for one, content in typed if one == kind]
    return struct.pack("<IQ", kind, len(alike)) + b"".join(alike)


def _text(value: str) -> bytes:
    content = value.encode(errors="surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _whole(value: Any, bits: int) -> int:
    return (int(value) if isinstance(value, int) else 0) % (1 << bits)
