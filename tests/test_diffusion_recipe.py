"""The diffusion recipe reads images, judges by what it says, and tells errors."""

import gzip
import struct
from argparse import Namespace

import numpy as np
import pytest

from meshpar.models.dit import DiTConfig
from meshpar.recipes.diffusion import (
    draw,
    main,
    mean_prediction_loss,
    padded,
    patch_size,
    run,
)
from meshpar.recipes.labelled_images import LabelledImages, labelled_images

TINY = [
    *("--steps", "2", "--global-batch", "8", "--embed", "16", "--layers", "2"),
    *("--sampling-steps", "1", "--method", "euler"),
]


def write_idx(path, values, packed):
    text = b"\0\0\x08" + bytes([values.ndim])
    text += struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(text) if packed else text)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_packed_or_not(tmp_path, packed):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 6, 6), np.uint8)
    end = ".gz" if packed else ""
    write_idx(tmp_path / f"train-images-idx3-ubyte{end}", pixels, packed)
    labels = np.arange(24, dtype=np.uint8) % 3
    write_idx(tmp_path / f"train-labels-idx1-ubyte{end}", labels, packed)
    found = labelled_images(str(tmp_path), 32)
    assert found.images.shape == (20, 6, 6, 1) and found.names == ("0", "1", "2")
    assert len(found.other_images) == len(found.other_labels) == 4
    every = np.concatenate([found.images, found.other_images])[..., 0]
    np.testing.assert_allclose(
        np.sort(every.ravel()), np.sort(pixels.ravel() / 127.5 - 1), atol=1e-6
    )


def test_a_folder_has_the_images_of_each_label(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        for number in range(8):
            one = image.new("RGB", (5 + number, 7), colour)
            one.save(tmp_path / label / f"{number}.png")
    found = labelled_images(str(tmp_path), 4)
    assert found.names == ("blue", "red") and found.images.shape[1:] == (4, 4, 3)
    reds = found.images[found.labels == 1]
    assert (reds == np.float32([1, -1, -1])).all()


def test_an_image_that_is_broken_is_named_and_hidden_folders_are_left_out(
    tmp_path, refuses
):
    image = pytest.importorskip("PIL.Image")
    for name in ("a", ".cache"):
        (tmp_path / name).mkdir()
    for number in range(12):
        image.new("RGB", (4, 4)).save(tmp_path / "a" / f"{number}.png")
    assert labelled_images(str(tmp_path), 4).names == ("a",)
    (tmp_path / "a" / "x.png").write_bytes(b"no picture")
    with refuses("data.unreadable_file", "x.png", words=False):  # Pillow's.
        labelled_images(str(tmp_path), 4)


def test_the_digits_are_read_without_a_folder():
    pytest.importorskip("sklearn")
    found = labelled_images(None, 32)
    assert len(found.images) + len(found.other_images) == 1797
    assert found.images.shape[1:] == (8, 8, 1)
    assert found.images.min() == -1 and found.images.max() == 1


@pytest.mark.parametrize(
    "make, refusal",
    [
        (lambda folder: folder / "none", ("data.no_folder", "none")),
        (lambda folder: folder, ("data.too_few_images", "0 images")),
    ],
)
def test_data_that_is_not_there_is_refused(make, refusal, tmp_path, refuses):
    with refuses(*refusal):
        labelled_images(str(make(tmp_path)), 8)


def test_an_idx_file_that_is_cut_off_is_refused(tmp_path, refuses):
    for name in ("images-idx3", "labels-idx1"):
        path = tmp_path / f"train-{name}-ubyte"
        path.write_bytes(b"\0\0\x08\1" + struct.pack(">I", 9) + bytes(3))
    with refuses("data.truncated_file", "3 values", (9,)):
        labelled_images(str(tmp_path), 8)


def test_the_patch_tiles_an_image_of_any_size_or_the_size_is_named(refuses):
    sizes = {8: 2, 28: 4, 32: 4, 36: 6, 64: 8, 96: 12, 100: 20, 4: 2, 9: 3}
    assert {size: patch_size(size) for size in sizes} == sizes
    with refuses("data.images_not_tileable", "26 x 26", "13 x 13", "--size 32"):
        patch_size(26)
    with refuses("data.images_not_tileable", "97 x 97", "--size 104"):
        patch_size(97)
    for whole in (1, 2, 3, 5, 7):
        with refuses("data.images_not_tileable", f"{whole} x {whole}", "--size 8"):
            patch_size(whole)


@pytest.mark.parametrize("prediction", ["flow", "v"])
def test_the_baseline_is_the_loss_of_the_mean_target(prediction):
    rng = np.random.default_rng(0)
    images = rng.normal(0.5, 0.3, (64, 4, 4, 1)).astype(np.float32)
    data = LabelledImages(
        images=images,
        labels=np.zeros(64, np.int32),
        other_images=images,
        other_labels=np.zeros(64, np.int32),
        names=("0",),
    )
    shape = dict(layers=1, embed=8, heads=2, image=4, patch=2, channels=1, classes=1)
    config = DiTConfig(**shape, prediction=prediction)
    times = rng.uniform(size=(20_000, 1, 1, 1)).astype(np.float32)
    clean = images[rng.integers(64, size=20_000)]
    noise = rng.normal(size=clean.shape).astype(np.float32)
    targets = np.asarray(config.path.target(clean, noise, times))
    drawn = np.mean(np.var(targets, axis=0))
    assert mean_prediction_loss(data, config) == pytest.approx(drawn, rel=0.02)


def test_labels_are_padded_with_no_class():
    assert padded(np.array([3, 1, 2]), 2, 5).tolist() == [3, 1, 2, 5]
    assert padded(np.array([3, 1]), 2, 5).tolist() == [3, 1]


def test_a_picture_has_every_sample_in_its_place(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    grid = np.full((2, 3, 4, 4, 1), -1.0)
    grid[1, 2] = 1
    draw(grid, tmp_path / "grid.png")
    found = image.imread(tmp_path / "grid.png")[..., 0]
    rows, columns = np.nonzero(found > 0.5)
    assert rows.min() > len(found) / 2 and columns.min() > 2 * found.shape[1] / 3


@pytest.mark.slow
def test_it_trains_samples_and_judges(tmp_path, capsys):
    assert main([*TINY, "--layout", "data=1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "is that of predicting the mean" in printed and "chance is 10.0%" in printed
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_a_layout_without_sizes_is_refused(capsys, refuses):
    with refuses("layout.open_size", "data=-1"):
        run(Namespace(layout="data=-1"))
    assert main(["--layout", "data=-1"]) == 2
    assert "data=-1" in capsys.readouterr().err


def test_what_cannot_be_is_told_in_one_line(capsys):
    assert main(["--layout", "data=3,contxt=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("diffusion: ") and "contxt" in error
    assert len(error.splitlines()) == 1
