"""The segmentation recipe: what it reads, what it compares with, what it refuses."""

import importlib.util
import itertools

import numpy as np
import pytest

from meshpar import Layout
from recipes import segment_volume
from recipes.volumes import (
    Scan,
    best_band,
    coarser,
    degraded,
    dice,
    padded,
    padded_sizes,
    read_scan,
    template,
)
from tests.refusals import names


def scan(shape=(9, 12, 10), seed=0):
    """A ball of intensity about 2 in a noise about 1."""
    places = np.indices(shape) - np.reshape(shape, (3, 1, 1, 1)) / 2
    truth = np.sqrt((places**2).sum(axis=0)) < min(shape) / 3
    noise = np.random.default_rng(seed).normal(0, 0.2, shape)
    return Scan((1 + truth + noise).astype(np.float32), truth, np.eye(4))


def test_the_best_band_is_the_best_of_all_pairs_of_intensities():
    one = scan()
    low, high = best_band(one.image, one.truth)
    found = dice((one.image >= low) & (one.image < high), one.truth)
    edges = np.linspace(one.image.min(), one.image.max(), 40)
    others = [
        dice((one.image >= start) & (one.image < end), one.truth)
        for start in edges
        for end in edges[edges > start]
    ]
    assert found >= max(others) - 0.01
    assert found > 0.9


def test_a_band_that_nothing_is_above_has_the_brightest_voxel():
    image = np.float32([0, 0, 1, 2])
    truth = np.array([False, False, True, True])
    low, high = best_band(image, truth)
    assert 0 < low <= 1 and high == np.inf
    low, high = best_band(image, np.array([False, False, True, False]))
    assert 0 < low <= 1 < high <= 2


def test_a_degraded_scan_is_uneven_and_noisy_as_asked_and_its_truth_stays(refuses):
    one = Scan(np.full((24, 20, 22), 100, np.float32), scan().truth, np.eye(4))
    one.image[0] = 0  # nothing there
    assert degraded(one, 0, 0) is one
    uneven = degraded(one, 0.4, 0).image
    assert not uneven[0].any()
    assert uneven[1:].min() == pytest.approx(80) and uneven.max() == pytest.approx(120)
    assert np.abs(np.diff(uneven[1:], axis=1)).max() < 12  # smooth
    noisy = degraded(one, 0, 0.05)
    assert noisy.image[1:].std() == pytest.approx(5, rel=0.05)
    # Of a magnitude where nothing is, Rayleigh's mean.
    assert noisy.image[0].mean() == pytest.approx(5 * np.sqrt(np.pi / 2), rel=0.1)
    assert noisy.truth is one.truth and noisy.image.dtype == np.float32
    again, other = degraded(one, 0, 0.05), degraded(one, 0, 0.05, seed=1)
    np.testing.assert_array_equal(noisy.image, again.image)
    assert (noisy.image != other.image).any()
    for bias in (2, -1):
        with refuses("value.out_of_range", f"bias {bias}", 0, 2):
            degraded(one, bias, 0)
    with refuses("value.negative", "noise -0.1", 0):
        degraded(one, 0, -0.1)


@pytest.mark.parametrize("image", [np.zeros((8, 8, 8)), scan((8, 8, 8)).truth])
def test_an_image_of_one_intensity_is_no_scan(refuses, image):
    one = Scan(image.astype(np.float32), scan((8, 8, 8)).truth, np.eye(4))
    task = segment_volume.make_task(one, 1, Layout.parse("data=1"))
    with refuses("data.head_of_one_intensity"):
        _ = task.batch
    if not image.any():
        with refuses("data.one_intensity"):
            degraded(one, 0.4, 0)


def test_dice_of_nothing_found_is_none_and_of_two_empty_sets_all():
    truth = np.array([True, False])
    assert dice(np.zeros(2, bool), truth) == 0
    assert dice(np.zeros(2, bool), np.zeros(2, bool)) == 1


def test_a_padded_scan_has_its_voxels_first_and_nothing_behind_them():
    one = scan()
    sizes = padded_sizes(one.image.shape, 4)
    assert sizes == (12, 12, 12)
    whole = padded(one.image, sizes)
    np.testing.assert_array_equal(whole[:9, :12, :10], one.image)
    assert not whole[9:].any() and not whole[:, :, 10:].any()


def test_a_coarser_scan_has_the_means_of_cubes():
    one = coarser(scan(), 3)
    assert one.image.shape == (3, 4, 3)
    assert one.image[1, 2, 1] == pytest.approx(
        scan().image[3:6, 6:9, 3:6].mean(), rel=1e-6
    )
    assert one.affine[0, 0] == 3


def test_the_held_out_part_does_not_count_in_the_loss_and_padding_neither():
    task = segment_volume.make_task(scan(), 2, Layout(context=2, tensor=2))
    batch = task.batch
    assert task.sizes == (12, 12, 10)
    assert batch["images"].shape == (1, 12, 12, 10, segment_volume.PIECES)
    pieces = batch["images"][0, :9, :, :].sum(axis=-1)
    head = scan().image > scan().image.mean()
    assert 2.5 < pieces[:, :12][head].mean() < 3.5  # of mean 3, but for what is beyond
    assert batch["weights"].sum() == 9 * 8 * 10
    assert not batch["weights"][:, :, 8:].any() and not batch["weights"][:, 9:].any()


def test_another_look_at_a_scan_has_its_image_truth_and_part_mirrored_together():
    image = np.random.default_rng(1).uniform(1, 2, (6, 9, 5)).astype(np.float32)
    task = segment_volume.make_task(Scan(image, image > 1.5, np.eye(4)), 1, Layout())
    rng = np.random.default_rng(0)
    every = [dims for n in range(4) for dims in itertools.combinations(range(3), n)]
    found = set()
    for _ in range(16):
        look = task.anew(rng)
        fits = [
            dims
            for dims in every
            if (np.flip(look.scan.truth, dims) == task.scan.truth).all()
        ]
        assert len(fits) == 1
        found.update(fits)
        seen, held_out = (
            np.flip(values, fits[0]) for values in (look.scan.image, look.held_out)
        )
        assert (held_out == task.held_out).all()
        assert (seen != image).all()  # uneven, noisy
        assert np.corrcoef(seen.ravel(), image.ravel())[0, 1] > 0.7
    assert len(found) >= 4


def test_noise_of_an_image_with_negative_intensities_keeps_them():
    image = np.random.default_rng(1).uniform(-1000, 1000, (9, 8, 7)).astype(np.float32)
    noisy = degraded(Scan(image, image > 0, np.eye(4)), 0, 0.02).image
    assert (noisy - image).std() == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize(
    "words, values",
    [
        (["--layout", "context=-1"], ["context=-1"]),
        (["--image", "a.nii"], ["--image", "--truth"]),
        (["--png", "slices.txt"], ["slices.txt", "png"]),
    ],
)
def test_bad_options_are_one_line_and_status_2(capsys, snapshot, words, values):
    assert segment_volume.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("segment_volume: ") and error.count("\n") == 1
    assert all(names(error, value) for value in values), error
    assert error.rstrip("\n") == snapshot


def test_a_missing_template_names_the_extra(refuses, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses("data.missing_package", "'meshpar[volumes]'"):
        template()


def test_files_of_different_spaces_are_refused(refuses, tmp_path):
    """Without words, as nibabel is no package of the tests."""
    nibabel = pytest.importorskip("nibabel")
    paths = []
    for name, shape in (("image", (4, 4, 4)), ("truth", (4, 4, 5)), ("flat", (4, 4))):
        paths.append(tmp_path / f"{name}.nii.gz")
        nibabel.save(
            nibabel.Nifti1Image(np.ones(shape, np.float32), np.eye(4)), paths[-1]
        )
    with refuses("data.different_shapes", "(4, 4, 5)", "(4, 4, 4)", words=False):
        read_scan(*paths[:2])
    with refuses("data.not_a_volume", "flat.nii.gz", 2, 3, words=False):
        read_scan(paths[2], paths[2])
    with refuses("data.unreadable_file", "absent.nii.gz", words=False):
        read_scan(tmp_path / "absent.nii.gz", paths[1])


@pytest.mark.slow
def test_the_recipe_learns_a_scan_of_ones_own_and_writes_what_it_found(
    tmp_path, capsys
):
    nibabel = pytest.importorskip("nibabel")
    one = scan((22, 24, 20))
    for name, values in (("image", one.image), ("truth", one.truth)):
        image = nibabel.Nifti1Image(values.astype(np.float32), one.affine)
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
    out, png = tmp_path / "found.nii.gz", tmp_path / "slices.png"
    files = [
        "--image",
        f"{tmp_path}/image.nii.gz",
        "--truth",
        f"{tmp_path}/truth.nii.gz",
    ]
    made = ["--prediction", str(out), "--png", str(png)]
    # The documented layout takes 4 devices; here are 8.
    options = ["--steps", "40", "--levels", "2", "--layout", "context=4,tensor=2"]
    assert segment_volume.main([*files, *made, *options]) == 0
    assert "a whole volume takes" in capsys.readouterr().out
    found = np.asarray(nibabel.load(out).dataobj) > 0
    assert dice(found, one.truth) > 0.9
    assert png.stat().st_size > 1000
