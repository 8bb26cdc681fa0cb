"""Segment the grey matter of a whole brain scan with a 3-D U-Net.

    pip install 'meshpar[volumes,plots]'
    python -m recipes.segment_volume --png slices.png
    python -m recipes.segment_volume --layout context=8 --image t1.nii.gz \\
        --truth tissue.nii.gz --prediction found.nii.gz

Without files it reads the MNI152 template of nilearn (197 x 233 x 189 voxels of 1 mm),
takes means of 5 x 5 x 5 voxels (`--downsample`), and degrades it like a scan (`--bias`,
`--noise`). The volume is one example, never cut into patches: four virtual CPU devices
share it, a quarter of its space each. The frontal third of the scan does not count in
the loss; the recipe prints the Dice score there, next to that of the best band of
intensities, which is chosen on the rest of the scan. Each step varies unevenness, noise
and mirroring, because the network would memorise a scan that is always the same.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshpar import InputError, Layout, emulate
from meshpar.cli.parsing import check_picture, output_file, positive
from meshpar.errors import print_end
from meshpar.recipes.printed_rows import write_rows
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shared_options import RecipeParser, deprecated, metrics_file
from meshpar.recipes.volumes import (
    Scan,
    best_band,
    coarser,
    degraded,
    dice,
    draw,
    padded,
    padded_sizes,
    read_scan,
    template,
    write,
)

LOGGER = logging.getLogger("meshpar.recipes.segment_volume")

_NIFTI = (".nii", ".nii.gz")

HELD_OUT = 1 / 3
"""Share of the scan's second dim, at its end, that is held out."""

PIECES = 6
"""Channels of the input, among which an intensity is shared."""

_OF_TEMPLATE = 5, 0.4, 0.05
"""Voxels a side to take the mean of, bias and noise, of the template."""

_ANEW = 0.4, 0.05
"""The most bias and noise that a step adds."""

_RULES = {"depth": "context", "height": "tensor"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One scan as a batch of one example.

    Args:
        scan: As read.
        held_out: bool, of its shape: where nothing is learnt.
        sizes: It, padded so that levels halve it and devices share it evenly.
    """

    scan: Scan
    held_out: np.ndarray
    sizes: tuple[int, ...]

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """Intensities, truth, and where it counts.

        Those of the head, taken as what is brighter than the mean of all, have mean 3
        and deviation 1; what is dark has 0, as what is padded. Each is given in pieces,
        how much of it lies from 0 to 1, from 1 to 2 and so on, of which a linear layer
        makes bands.

        Raises:
            InputError: The head has one intensity.
        """
        image = self.scan.image
        head = image[image > image.mean()]
        if not head.size or head.min() == head.max():
            raise InputError(
                "all voxels above the mean of the image have one intensity; give a "
                "scan",
                key="data.head_of_one_intensity",
            )
        values = (image - head.mean()) / head.std() + 3
        pieces = [
            padded(np.clip(values - start, 0, 1), self.sizes) for start in range(PIECES)
        ]
        learnt = (~self.held_out).astype(np.float32)
        return {
            "images": np.stack(pieces, axis=-1)[None],
            "labels": padded(self.scan.truth, self.sizes)[None].astype(np.int32),
            "weights": padded(learnt, self.sizes)[None],
        }

    def anew(self, rng: np.random.Generator) -> Task:
        """The scan as another look at it might be: uneven, noisy, mirrored."""
        bias, noise = (most * rng.random() for most in _ANEW)
        scan = degraded(self.scan, bias, noise, int(rng.integers(2**32)))
        dims = [dim for dim in range(3) if rng.random() < 0.5]
        image, truth, held_out = (
            np.flip(values, dims) for values in (scan.image, scan.truth, self.held_out)
        )
        return replace(self, scan=Scan(image, truth, scan.affine), held_out=held_out)

    def dice(self, found: np.ndarray) -> float:
        """Dice score of the held-out voxels."""
        return dice(found & self.held_out, self.scan.truth & self.held_out)

    @property
    def threshold(self) -> np.ndarray:
        """The voxels of the best band of intensities of the part that is learnt."""
        image, learnt = self.scan.image, ~self.held_out
        low, high = best_band(image[learnt], self.scan.truth[learnt])
        return (image >= low) & (image < high)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; 0 done, 2 on bad input."""
    args = _parser().parse_options(argv)
    _move_prediction(args)
    try:
        layout = Layout.parse(args.layout)
        layout.check_sizes()
        if (args.image is None) != (args.truth is None):
            raise InputError(
                "give --image and --truth both, or neither",
                key="command.image_without_truth",
            )
        if args.png is not None:
            check_picture("--png", args.png, {".png": "matplotlib"})
        path = args.prediction
        if path is not None and not path.endswith(_NIFTI):
            raise InputError(
                f"--prediction {path!r}: end it in .nii or .nii.gz",
                key="command.unknown_suffix",
            )
        emulate(layout.num_devices)
        with on_console():
            run(args, layout)
    except Exception as error:
        return print_end("segment_volume", error)
    return 0


def run(args: argparse.Namespace, layout: Layout) -> None:
    """Trains, finds the tissue of the whole scan, and says how well.

    Raises:
        InputError: A file is no scan, or the layout does not suit it.
    """
    scan = load_scan(args)
    task = make_task(scan, args.patch * 2 ** (args.levels - 1), layout)
    baseline = task.dice(task.threshold)
    shape = " x ".join(map(str, task.scan.image.shape))
    LOGGER.info(
        f"{shape} voxels, padded to {' x '.join(map(str, task.sizes))}; {layout}\n"
        f"held out: Dice of the best band of intensities {baseline:.4f}"
    )
    rows, found = [], task.threshold
    for row, found in train(task, args, layout):  # noqa: B007
        rows.append(row)
        LOGGER.info(in_words(row))
    LOGGER.info(
        f"held out: Dice {task.dice(found):.4f} of the U-Net, {baseline:.4f} of the "
        f"best band; a whole volume takes {rows[-1]['inference_s']:.1f} s"
    )
    write_rows(rows, metrics_file(args))
    if args.png is not None:
        draw(task.scan, found, args.png)
    prediction = args.prediction or (args.out and str(args.out / "prediction.nii.gz"))
    if prediction is not None:
        write(found, task.scan.affine, prediction)


def load_scan(args: argparse.Namespace) -> Scan:
    """The user's own as it is, or the template as a scanner would give it."""
    own = args.image is not None
    scan = read_scan(args.image, args.truth) if own else template()
    factor, bias, noise = (
        default if given is None else given
        for given, default in zip(
            (args.downsample, args.bias, args.noise),
            (1, 0.0, 0.0) if own else _OF_TEMPLATE,
            strict=True,
        )
    )
    return degraded(coarser(scan, factor), bias, noise, args.seed)


def make_task(scan: Scan, shrinks: int, layout: Layout) -> Task:
    """The scan padded for a U-Net that shrinks it so under a layout."""
    degrees = layout.context, layout.tensor, 1
    sizes = tuple(
        padded_sizes((size,), shrinks * degree)[0]
        for size, degree in zip(scan.image.shape, degrees, strict=True)
    )
    held_out = np.zeros(scan.image.shape, bool)
    held_out[:, int(held_out.shape[1] * (1 - HELD_OUT)) :] = True
    return Task(scan=scan, held_out=held_out, sizes=sizes)


def train(
    task: Task, args: argparse.Namespace, layout: Layout
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """A row and the voxels found, after every tenth step and at the end."""
    import jax
    import optax

    from meshpar import default_rules, make_train_step
    from meshpar.models.unet3d import UNet3DConfig, unet3d

    depth, height, width = task.sizes
    config = UNet3DConfig(
        depth=depth,
        height=height,
        width=width,
        channels=PIECES,
        classes=2,
        levels=args.levels,
        base=args.base,
        patch=args.patch,
        groups=2,
    )
    rate = optax.cosine_onecycle_schedule(args.steps, args.learning_rate, pct_start=0.2)
    step = make_train_step(
        unet3d(config),
        optax.adam(rate),
        layout,
        rules=default_rules(layout).with_rules(**_RULES),
        devices=jax.devices()[: layout.num_devices],
        max_grad_norm=1.0,
    )
    state, rng = step.init(args.seed), np.random.default_rng(args.seed)
    images = {"images": step.place(task.batch)["images"]}
    jax.block_until_ready(step.logits(state, images))  # compiled before it is timed
    began = time.perf_counter()
    for number in range(1, args.steps + 1):
        seen = task.anew(rng) if args.anew else task
        state, metrics = step(state, step.place(seen.batch))
        loss = float(metrics["loss"])
        if number % args.validate_every and number != args.steps:
            continue
        seconds = time.perf_counter() - began
        asked = time.perf_counter()
        logits = jax.block_until_ready(step.logits(state, images))
        inference_s = time.perf_counter() - asked
        found = _within(np.argmax(np.asarray(logits[0]), axis=-1) == 1, task)
        score = task.dice(found)
        row = {"step": number, "loss": loss, "dice": score, "train_s": seconds}
        yield {**row, "inference_s": inference_s}, found


def _within(values: np.ndarray, task: Task) -> np.ndarray:
    return values[tuple(slice(size) for size in task.scan.image.shape)]


def in_words(row: dict[str, Any]) -> str:
    """A row in one line."""
    return (
        f"step {row['step']:4d}  loss {row['loss']:.4f}  held-out Dice "
        f"{row['dice']:.4f}  after {row['train_s']:.0f} s"
    )


def _parser() -> RecipeParser:
    shared = dict(layout="context=2,tensor=2", steps=160, learning_rate=0.01)
    shared |= dict(validate_every=10, seed=0)
    files = dict(out=None, log_json=None, png=None)
    renamed = {"--every": "--validate-every", "--rate": "--learning-rate"}
    parser = RecipeParser("segment_volume", __doc__, {**shared, **files}, renamed)
    add = parser.add_argument
    add("--image", metavar="FILE", help="NIfTI volume; the template if absent")
    add("--truth", metavar="FILE", help="NIfTI map of its tissue")
    add("--levels", type=positive, default=3, help="levels of the U-Net")
    add("--base", type=positive, default=8, help="channels of the finest level")
    add("--patch", type=positive, default=1, help="voxels per side of a patch")
    add("--downsample", type=positive, metavar="N", help="means of N^3 voxels")
    add("--bias", type=float, metavar="SHARE", help="range of the uneven factor")
    add("--noise", type=float, metavar="SHARE", help="noise over the brightest voxel")
    add(
        "--anew",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="vary unevenness, noise and mirroring in every step",
    )
    add(
        "--prediction",
        type=output_file,
        metavar="FILE",
        help="write the predicted voxels as NIfTI (default: OUT/prediction.nii.gz, if "
        "there is --out)",
    )
    return parser


def _move_prediction(args: argparse.Namespace) -> None:
    """Take a NIfTI file in `--out`, its old meaning, for `--prediction`."""
    if args.out is not None and str(args.out).endswith(_NIFTI):
        deprecated("--out FILE.nii.gz", "--prediction FILE.nii.gz")
        args.prediction, args.out = str(args.out), None


if __name__ == "__main__":
    sys.exit(main())
