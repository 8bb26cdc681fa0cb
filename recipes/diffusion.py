"""Train a Diffusion Transformer on small images, under any layout, and judge samples.

    python -m recipes.diffusion
    python -m recipes.diffusion --layout data=2,stage=2,microbatches=2
    python -m recipes.diffusion --data fashion-mnist/ --steps 3000

It trains on scikit-learn's digits (1,797 of 8 x 8, 16 patches each) on two virtual CPU
devices, in 94 s on 2 shared cores. It prints the loss, next to that of predicting the
mean (0.43 and 1.29), and how many samples a classifier of real digits recognises
(100 %). A picture shows samples of every class.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax

import meshpar
from meshpar.cli.parsing import positive
from meshpar.errors import install_extra, print_end
from meshpar.machine.emulate import num_cpu_devices
from meshpar.models.dit import DiTConfig, dit
from meshpar.models.dit_sampling import METHODS, sample
from meshpar.models.layers.noise_path import PATHS
from meshpar.models.layers.patches import to_patches
from meshpar.recipes.labelled_images import LabelledImages, labelled_images
from meshpar.recipes.run_log import on_console
from meshpar.recipes.shared_options import RecipeParser

if TYPE_CHECKING:
    from meshpar.train.data import HostBatch

_MOST_TOKENS = 64
"""Patches of an image, at most."""
_EACH_CLASS = 10
"""Samples of it that are judged."""
_CLASSIFIED = 5000
"""Real images that the classifier learns from, at most."""
_CLIPPED = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, samples and judges; 0 done, 2 on bad input."""
    args = _arguments(argv)
    try:
        with on_console():
            run(args)
    except ModuleNotFoundError as error:
        print(f"diffusion: {error}{_INSTALL}", file=sys.stderr)
        return 2
    except Exception as error:
        return print_end("diffusion", error)
    return 0


LOGGER = logging.getLogger("meshpar.recipes.diffusion")

_INSTALL = f"; {install_extra('images')}"


def run(args: argparse.Namespace) -> None:
    """Trains, samples and judges.

    Raises:
        InputError: The layout, or what it splits, cannot be.
    """
    began = time.perf_counter()
    layout = meshpar.Layout.parse(args.layout)
    layout.check_sizes()
    if args.emulate:
        needed = max(layout.num_devices, num_cpu_devices())
        meshpar.emulate(needed if args.emulate < 0 else args.emulate)
    for name in ("sklearn", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
    data = labelled_images(args.data, args.size)
    config = model_config(args, data)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, max(1, args.steps // 20), max(2, args.steps)
    )
    step = meshpar.make_train_step(
        dit(config),
        optax.adam(schedule),
        layout,
        max_grad_norm=_CLIPPED,
        devices=jax.devices()[: layout.num_devices],
    )
    state = train(step, step.init(args.seed), data, config, args)
    LOGGER.info(judged_loss(step, state, data, config, args.global_batch))
    labels = np.repeat(np.arange(len(data.names)), _EACH_CLASS)
    samples = np.asarray(
        sample(
            config,
            step,
            state,
            padded(labels, layout.batch_shards, config.classes),
            num_steps=args.sampling_steps,
            method=args.method,
            guidance=args.guidance,
            seed=args.seed,
        )
    )[: len(labels)]
    LOGGER.info(judged_samples(samples, labels, data))
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "samples.png"
    draw(samples.reshape(len(data.names), _EACH_CLASS, *samples.shape[1:]), picture)
    seconds = time.perf_counter() - began
    LOGGER.info(f"{picture}: rows of each class; {seconds:.0f} s in all")


def model_config(args: argparse.Namespace, data: LabelledImages) -> DiTConfig:
    """A model for images of that size."""
    size, channels = data.images.shape[2:]
    return DiTConfig(
        layers=args.layers,
        embed=args.embed,
        heads=args.heads,
        image=size,
        patch=patch_size(size),
        channels=channels,
        classes=len(data.names),
        prediction=args.prediction,
    )


def patch_size(size: int) -> int:
    """The smallest patch from 2 on that tiles an image and makes few tokens of it.

    Raises:
        InputError: It would be the whole image, one token, which has nothing to attend
            to; or more than a third of one of more than 8 pixels a side.

    Example:
        >>> patch_size(28), patch_size(32), patch_size(100)
        (4, 4, 20)
    """
    few = math.isqrt(_MOST_TOKENS)
    patch = next((one for one in range(2, size + 1) if _tiles(one, size, few)), size)
    if patch == size or (size > few and 3 * patch > size):
        other = -(-size // few) * few
        raise meshpar.InputError(
            f"images of {size} x {size}: the smallest patch that tiles one and makes "
            f"at most {_MOST_TOKENS} tokens has {patch} x {patch} pixels; give "
            f"--size {other}, or files of {other} x {other}",
            key="data.images_not_tileable",
        )
    return patch


def _tiles(patch: int, size: int, few: int) -> bool:
    return size % patch == 0 and size // patch <= few


def train(
    step: meshpar.TrainStep,
    state: meshpar.TrainState,
    data: LabelledImages,
    config: DiTConfig,
    args: argparse.Namespace,
) -> meshpar.TrainState:
    """The state after all steps; prints the loss of some."""
    total = 0.0
    every = max(1, args.steps // 10)
    for number, batch in zip(
        range(1, args.steps + 1), batches(data, config, args), strict=False
    ):
        state, metrics = step(state, batch)
        total += float(metrics["loss"])
        if number % every == 0:
            LOGGER.info(f"step {number}: loss {total / every:.4f}")
            total = 0.0
    return state


def batches(
    data: LabelledImages, config: DiTConfig, args: argparse.Namespace
) -> Iterator[HostBatch]:
    """Batches of images drawn at random."""
    rng = np.random.default_rng(args.seed)
    patches = np.asarray(to_patches(data.images, config.patch))
    while True:
        rows = rng.integers(len(patches), size=args.global_batch)
        yield {"patches": patches[rows], "labels": data.labels[rows]}


def judged_loss(
    step: meshpar.TrainStep,
    state: meshpar.TrainState,
    data: LabelledImages,
    config: DiTConfig,
    batch: int,
) -> str:
    """The loss of images held out, beside the least of a prediction from nothing."""
    patches = np.asarray(to_patches(data.other_images, config.patch))
    loss, weight = 0.0, 0.0
    for start in range(0, len(patches), batch):
        rows = np.arange(start, start + batch)
        weights = np.float32(rows < len(patches))
        rows = rows % len(patches)
        given = {"patches": patches[rows], "labels": data.other_labels[rows]}
        found = step.evaluate(state, {**given, "weights": weights})
        loss += float(found["loss_sum"])
        weight += float(found["weight_sum"])
    constant = mean_prediction_loss(data, config)
    return (
        f"loss {loss / weight:.4f} on images held out; {constant:.4f} is that of "
        "predicting the mean"
    )


def mean_prediction_loss(data: LabelledImages, config: DiTConfig) -> float:
    """The variance of the target, `a clean + b noise`, over times, noise and images.

        E[b^2] + E[a^2] E[clean^2] - E[a]^2 E[clean]^2

    with a and b functions of the time, and means of each pixel.
    """
    times = (np.arange(1000, dtype=np.float32) + 0.5) / 1000
    a, b = (
        np.asarray(slope(times))
        for slope in (config.path.clean_slope, config.path.noise_slope)
    )
    square, mean = np.mean(data.images**2, axis=0), np.mean(data.images, axis=0)
    each = np.mean(b**2) + np.mean(a**2) * square - np.mean(a) ** 2 * mean**2
    return float(np.mean(each))


def judged_samples(
    samples: np.ndarray, labels: np.ndarray, data: LabelledImages
) -> str:
    """How many samples, and real images, a classifier takes for their class."""
    if len(data.names) < 2:
        return "one class: nothing to tell apart"
    from sklearn.svm import SVC

    def flat(images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), -1)

    classifier = SVC().fit(flat(data.images[:_CLASSIFIED]), data.labels[:_CLASSIFIED])
    real = classifier.score(flat(data.other_images), data.other_labels)
    found = classifier.score(flat(samples), labels)
    return (
        f"a classifier takes {found:.1%} of the samples for what was asked for, "
        f"{real:.1%} of real images held out; chance is {1 / len(data.names):.1%}"
    )


def padded(labels: np.ndarray, shards: int, none: int) -> np.ndarray:
    """Labels, and of no class as many more as divide over the batch axes."""
    return np.pad(labels, (0, -len(labels) % shards), constant_values=none)


def draw(grid: np.ndarray, path: Path) -> None:
    """Writes (rows, columns, height, width, channels) as one picture."""
    from matplotlib.image import imsave

    rows, columns, height, width, channels = grid.shape
    framed = np.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-1)
    whole = framed.transpose(0, 2, 1, 3, 4).reshape(
        rows * (height + 2), columns * (width + 2), channels
    )
    colours = np.repeat(whole, 3 // channels, axis=-1)
    larger = max(1, 480 // len(whole))
    shown = np.kron(np.clip((colours + 1) / 2, 0, 1), np.ones((larger, larger, 1)))
    imsave(path, shown)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    shared = dict(layout="data=2", steps=1000, global_batch=128, seed=0)
    shared |= dict(learning_rate=3e-3, out=Path("runs/diffusion"))
    parser = RecipeParser("diffusion", __doc__, shared, {"--batch": "--global-batch"})
    add = parser.add_argument
    add("--data", help="folder of IDX files or images; scikit-learn's digits if absent")
    add(
        "--emulate",
        type=int,
        default=-1,
        help="virtual CPU devices; 0: real devices, -1: as many as needed",
    )
    add(
        "--size", type=positive, default=32, help="pixels per side of a folder's images"
    )
    add("--layers", type=positive, default=4, help="layers of the model")
    add("--embed", type=positive, default=64, help="width of the model")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--sampling-steps", type=positive, default=25, help="steps of sampling")
    add("--prediction", choices=PATHS, default="flow", help="kind of prediction")
    add("--method", choices=METHODS, default="heun", help="method of sampling")
    add("--guidance", type=float, default=2.0, help="guidance; 1: none")
    return parser.parse_options(argv)


if __name__ == "__main__":
    sys.exit(main())
