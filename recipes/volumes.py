"""Volumes for segmentation: MNI152, NIfTI files, padding, Dice and pictures."""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra

_TEMPLATE = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
_BINS = 256


@dataclass(frozen=True)
class Scan:
    """A volume and what its voxels are.

    Args:
        image: float32 (depth, height, width).
        truth: bool, alike: whether a voxel is of the sought tissue.
        affine: (4, 4), from voxels to millimetres.
    """

    image: np.ndarray
    truth: np.ndarray
    affine: np.ndarray


def template() -> Scan:
    """T1 image and grey matter of MNI152 (Fonov et al. 2011), 197 x 233 x 189 at 1 mm.

    Read from the files that an installed nilearn carries; nothing is downloaded.

    Raises:
        InputError: nilearn or nibabel is not installed.
    """
    found = importlib.util.find_spec("nilearn")
    if found is None or found.origin is None:
        raise InputError(
            "the MNI152 template comes with nilearn, which is not installed: "
            f"{install_extra('volumes')}, or give --image and --truth",
            key="data.missing_package",
        )
    data = Path(found.origin).parent / "datasets" / "data"
    return read_scan(data / _TEMPLATE.format("t1"), data / _TEMPLATE.format("gm"))


def read_scan(image: str | Path, truth: str | Path) -> Scan:
    """Two NIfTI files of one shape; truth is what exceeds half of its largest value.

    Raises:
        InputError: nibabel is not installed, a file is no volume, or shapes differ.
    """
    values, affine = _read(image)
    labels, _ = _read(truth)
    if labels.shape != values.shape:
        raise InputError(
            f"{truth} has shape {labels.shape}, but {image} has {values.shape}; give "
            "two files of one space",
            key="data.different_shapes",
        )
    if not labels.max() > 0:
        raise InputError(
            f"{truth} marks no voxel: its largest value is {labels.max()}",
            key="data.no_marked_voxel",
        )
    return Scan(values, labels > 0.5 * labels.max(), affine)


def _read(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        import nibabel
    except ModuleNotFoundError:
        raise InputError(
            f"reading {path} needs nibabel: {install_extra('volumes')}",
            key="data.missing_package",
        ) from None
    try:
        found = nibabel.load(path)
        values = np.asarray(found.dataobj, np.float32)
    except (OSError, nibabel.filebasedimages.ImageFileError) as error:
        raise InputError(f"{path}: {error}", key="data.unreadable_file") from error
    if values.ndim != 3:
        raise InputError(
            f"{path} has {values.ndim} dims; give a volume of 3",
            key="data.not_a_volume",
        )
    return values, np.asarray(found.affine)


def degraded(scan: Scan, bias: float, noise: float, seed: int = 0) -> Scan:
    """Return the volume with a scanner's bias field and noise; the labels stay.

        |image * (1 + bias / 2 * field) + noise * largest * (a + b i)|

    with a field of degree 2 in the places, from -1 to 1 in what is not empty, and a, b
    standard normal in each voxel: noise of a magnitude image is Rician. An image that
    has negative intensities is none, as one of a CT: a alone is added to it. Levels are
    those of BrainWeb (Cocosco et al. 1997), which has a bias of up to 0.4 and noise of
    up to 0.09 of the brightest tissue.

    Args:
        scan: As it is.
        bias: Range of the factor; 0 for none.
        noise: Deviation, as a share of the largest intensity; 0 for none.
        seed: Of the field and the noise.

    Raises:
        InputError: A share below 0, a bias of 2 or more, whose factor reaches 0, or an
            image of one intensity.
    """
    if not 0 <= bias < 2:
        raise InputError(
            f"bias {bias}: give 0 to below 2, the range of a factor",
            key="value.out_of_range",
        )
    if noise < 0:
        raise InputError(
            f"noise {noise}: give a share of the largest intensity, 0 on",
            key="value.negative",
        )
    if not bias and not noise:
        return scan
    rng = np.random.default_rng(seed)
    factor = 1 + bias / 2 * _uneven(scan.image, rng)
    image = scan.image * factor
    if noise:
        deviation = np.float32(noise * scan.image.max())
        real, imaginary = (
            deviation * rng.standard_normal(image.shape, np.float32) for _ in range(2)
        )
        is_magnitude = scan.image.min() >= 0
        image = image + real
        image = np.hypot(image, imaginary) if is_magnitude else image
    return replace(scan, image=image.astype(np.float32))


def _uneven(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A polynomial of degree 2 in the places, drawn; -1 to 1 where not empty."""
    sides = [np.linspace(-1, 1, size, dtype=np.float32) for size in image.shape]
    places = np.meshgrid(*sides, indexing="ij", sparse=True)
    pairs = itertools.combinations_with_replacement(places, 2)
    terms = [*places, *(one * other for one, other in pairs)]
    field = np.zeros(image.shape, np.float32)
    for weight, term in zip(rng.standard_normal(len(terms)), terms, strict=True):
        field += np.float32(weight) * term
    shown = image > image.min()
    if not shown.any():
        raise InputError(
            "the image has one intensity; give a scan", key="data.one_intensity"
        )
    low, high = field[shown].min(), field[shown].max()
    return np.clip(2 * (field - low) / (high - low) - 1, -1, 1)


def coarser(scan: Scan, factor: int) -> Scan:
    """Means of cubes of `factor` voxels a side; what does not fill one is cut off."""
    if factor == 1:
        return scan
    if factor > min(scan.image.shape):
        raise InputError(
            f"cubes of {factor} voxels a side do not fit in {scan.image.shape}; take "
            f"{min(scan.image.shape)} at most",
            key="data.too_coarse",
        )

    def means(values: np.ndarray) -> np.ndarray:
        sizes = [size // factor for size in values.shape]
        cut = values[tuple(slice(size * factor) for size in sizes)]
        cubes = cut.reshape([n for size in sizes for n in (size, factor)])
        return cubes.mean(axis=(1, 3, 5), dtype=np.float32)

    truth = means(scan.truth.astype(np.float32)) > 0.5
    scaled = scan.affine @ np.diag([factor] * 3 + [1.0])
    return Scan(means(scan.image), truth, scaled)


def padded_sizes(sizes: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Each size rounded up to a multiple.

    Example:
        >>> padded_sizes((197, 233, 189), 8)
        (200, 240, 192)
    """
    return tuple(-(-size // multiple) * multiple for size in sizes)


def padded(values: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Zeros behind the last voxel of each dim, up to `sizes`."""
    missing = zip(values.shape, sizes, strict=True)
    return np.pad(values, [(0, size - here) for here, size in missing])


def dice(found: np.ndarray, truth: np.ndarray) -> float:
    """Twice what two sets of voxels share, over the sum of their sizes (Dice 1945).

    Example:
        >>> dice(np.array([1, 1, 0], bool), np.array([1, 0, 0], bool))
        0.6666666666666666
    """
    sizes = int(found.sum()) + int(truth.sum())
    return 2 * int((found & truth).sum()) / sizes if sizes else 1.0


def best_band(image: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The intensities from which to which a threshold has the best Dice.

    Of all pairs of 256 steps of intensity.

    Args:
        image: Intensities of voxels.
        truth: Whether each is of the sought tissue.

    Returns:
        The least intensity in the band and the least above it, infinite where nothing
        is above.
    """
    if not image.size:
        raise InputError(
            "no voxel to choose a band of intensities on: larger scans do",
            key="data.no_voxels",
        )
    edges = np.linspace(float(image.min()), float(image.max()), _BINS + 1)
    inside, outside = (
        np.concatenate([[0], np.cumsum(np.histogram(image[mask], edges)[0])])
        for mask in (truth, ~truth)
    )
    hits = inside[None, :] - inside[:, None]
    wrong = outside[None, :] - outside[:, None]
    scores = 2 * hits / np.maximum(hits + wrong + inside[-1], 1)
    low, high = np.unravel_index(np.argmax(np.triu(scores)), scores.shape)
    # The last step of a histogram has the brightest voxel in it.
    return float(edges[low]), float(edges[high]) if high < _BINS else math.inf


def draw(scan: Scan, found: np.ndarray, png: str) -> None:
    """Input, truth and prediction, three slices each through the middle."""
    from matplotlib.figure import Figure

    right, wrong = found & scan.truth, found & ~scan.truth
    marks = right + 2 * wrong + 3 * (scan.truth & ~found)
    shown = {
        "input": (scan.image, "gray"),
        "truth": (scan.truth, "gray"),
        "found": (found, "gray"),
        "too much (red), missed (blue)": (_coloured(marks), None),
    }
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(3, len(shown))
    for column, (name, (values, colours)) in enumerate(shown.items()):
        panels[0, column].set_title(name, fontsize=10)
        for dim, panel in enumerate(panels[:, column]):
            middle = values.shape[dim] // 2
            slices = np.take(values, middle, axis=dim)
            panel.imshow(np.swapaxes(slices, 0, 1), cmap=colours, origin="lower")
            panel.set_axis_off()
    figure.savefig(png, dpi=80)


def _coloured(marks: np.ndarray) -> np.ndarray:
    """0 nothing, 1 right, 2 too much, 3 missed -> red, green, blue."""
    colours = np.array([[0, 0, 0], [0.8, 0.8, 0.8], [1, 0.2, 0.2], [0.2, 0.4, 1]])
    return colours[marks]


def write(found: np.ndarray, affine: np.ndarray, path: str) -> None:
    """The voxels found, as a NIfTI file in the scan's space."""
    import nibabel

    nibabel.save(nibabel.Nifti1Image(found.astype(np.uint8), affine), path)
