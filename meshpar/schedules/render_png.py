"""A timeline as a PNG picture, written with numpy and zlib alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from meshpar.schedules.render_boxes import ROW_HEIGHT, boxes, picture_size, row_y
from meshpar.schedules.simulate import Timeline

_WHITE, _BLACK = 255, 0
_RANK_X = 8

# Rows of 3 pixels from the top, as 5 octal digits.
_GLYPHS = (
    *("75557", "26227", "71747", "71717", "55711"),
    *("74717", "74757", "71122", "75757", "75717"),
)


def png(timeline: Timeline) -> bytes:
    """The picture: a row a rank, a box an action, its microbatch written on it."""
    width, height = picture_size(timeline)
    pixels = np.full((height, width, 3), _WHITE, np.uint8)
    for rank in range(len(timeline.events)):
        _write_number(pixels, rank, _RANK_X, row_y(rank) + ROW_HEIGHT // 2)
    for box in boxes(timeline):
        left, right = round(box.x), round(box.x + box.width)
        top = round(box.y)
        pixels[top : top + box.height, left : max(left + 1, right - 1)] = box.color
        number = box.action.microbatch
        text_width = _number_width(number)
        if text_width + 2 <= box.width:
            x = round(box.x + (box.width - text_width) / 2)
            _write_number(pixels, number, x, top + box.height // 2)
    return _encode(pixels)


def _write_number(pixels: np.ndarray, number: int, x: int, middle_y: int) -> None:
    """Writes digits of 6 x 10 pixels whose middle is at `middle_y`."""
    for digit in str(number):
        rows = [
            [bit == "1" for bit in f"{int(row):03b}"] for row in _GLYPHS[int(digit)]
        ]
        glyph = np.kron(np.array(rows), np.ones((2, 2), bool))
        height, width = glyph.shape
        top = middle_y - height // 2
        pixels[top : top + height, x : x + width][glyph] = _BLACK
        x += width + 2


def _number_width(number: int) -> int:
    return 8 * len(str(number)) - 2


def _encode(pixels: np.ndarray) -> bytes:
    """The file's bytes: 8-bit RGB, no filter (W3C, PNG third edition, 2025)."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, content)
        for kind, content in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(rows.tobytes())),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
    )
