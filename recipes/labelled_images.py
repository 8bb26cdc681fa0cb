"""Labelled images of a recipe: scikit-learn's digits, IDX files, or a folder of images.

Pixels are from -1 to 1, as (images, height, width, channels).
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.errors import InputError

_HELD_OUT = 6
"""One of so many images is kept for judging."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_IDX = ("images-idx3-ubyte", "labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Images to train on, and others to judge by.

    Args:
        images: (images, size, size, channels).
        labels: (images,), from 0 on.
        other_images, other_labels: Those held out.
        names: Of each label.
    """

    images: np.ndarray
    labels: np.ndarray
    other_images: np.ndarray
    other_labels: np.ndarray
    names: tuple[str, ...]


def labelled_images(data: str | None, size: int) -> LabelledImages:
    """The images of `--data`, in an order that no label decides.

    Args:
        data: A folder of IDX files (MNIST's, Fashion-MNIST's, packed or not), or of
            images, those of each label in a folder of its name; None for the digits.
        size: Height and width that a folder's images are brought to.

    Raises:
        InputError: There are none, or they cannot be read.
    """
    if data is None:
        images, labels, names = _digits()
    else:
        folder = Path(data)
        if not folder.is_dir():
            raise InputError(
                f"--data {data!r} is no folder; name one, or leave it out",
                key="data.no_folder",
            )
        found = [_idx_file(folder, f"train-{name}") for name in _IDX]
        images, labels, names = (
            _read_idx(*found) if all(found) else _read_folder(folder, size)
        )
    if images.shape[1] != images.shape[2]:
        raise InputError(
            f"images are {images.shape[1:3]}; give square ones",
            key="data.images_not_square",
        )
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = order[::_HELD_OUT], np.delete(order, np.s_[::_HELD_OUT])
    return LabelledImages(
        images=images[kept],
        labels=labels[kept],
        other_images=images[held],
        other_labels=labels[held],
        names=names,
    )


def _digits() -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """8 x 8, 1,797 of them (Alpaydin and Kaynak 1998)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.float32(found.images)[..., None] / 8 - 1  # 16 is white
    return images, np.int32(found.target), tuple(map(str, range(10)))


def _idx_file(folder: Path, name: str) -> Path | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.is_file()), None)


def _read_idx(
    images: Path | None, labels: Path | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    pixels, numbers = _idx(images), _idx(labels)
    if pixels.ndim != 3 or len(pixels) != len(numbers):
        raise InputError(
            f"{images} has {pixels.shape} pixels and {labels} {numbers.shape} labels; "
            "give as many of both",
            key="data.images_without_labels",
        )
    scaled = np.float32(pixels)[..., None] / 127.5 - 1
    names = tuple(map(str, range(int(numbers.max()) + 1)))
    return scaled, np.int32(numbers), names


def _idx(path: Path | None) -> np.ndarray:
    """Bytes of an IDX file (LeCun et al. 1998): a type, sizes, then values."""
    if path is None:
        raise InputError("no IDX file", key="data.no_idx_file")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        text = file.read()
    if len(text) < 4 or text[:3] != b"\0\0\x08":
        raise InputError(
            f"{path} is no IDX file of bytes; give MNIST's own", key="data.not_idx_file"
        )
    num_dims = text[3]
    sizes = struct.unpack(f">{num_dims}I", text[4 : 4 + 4 * num_dims])
    values = np.frombuffer(text, np.uint8, offset=4 + 4 * num_dims)
    if values.size != np.prod(sizes):
        raise InputError(
            f"{path} has {values.size} values for the sizes {sizes}; it is cut off",
            key="data.truncated_file",
        )
    return values.reshape(sizes)


def _read_folder(
    folder: Path, size: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Images below folders named as their labels, in colour."""
    from PIL import Image

    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )
    found: list[tuple[np.ndarray, int]] = []
    for label, name in enumerate(names or ["."]):
        for path in sorted((folder / name).iterdir()):
            if path.suffix.lower() in _SUFFIXES:
                try:
                    with Image.open(path) as image:
                        pixels = np.asarray(image.convert("RGB").resize((size, size)))
                except OSError as error:
                    raise InputError(
                        f"{path} cannot be read: {error}", key="data.unreadable_file"
                    ) from error
                found.append((np.float32(pixels) / 127.5 - 1, label))
    if len(found) < 2 * _HELD_OUT:
        raise InputError(
            f"{folder} has {len(found)} images ({', '.join(_SUFFIXES)}) and no IDX "
            f"files such as train-{_IDX[0]}.gz; give at least {2 * _HELD_OUT}",
            key="data.too_few_images",
        )
    images, labels = zip(*found, strict=True)
    return np.stack(images), np.int32(labels), tuple(names or ["all"])
