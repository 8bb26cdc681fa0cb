"""Samples of a Diffusion Transformer: noise, taken back along its velocity.

The model runs as a training step lays it out, so any layout samples, its stages among
them; one call of it for each evaluation of the velocity.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from meshpar import InputError, TrainState, TrainStep
from meshpar.errors import nearest, whole_number
from meshpar.models.dit import DiTConfig
from meshpar.models.layers.patches import to_images

Velocity = Callable[[jax.Array, float], jax.Array]
"""(values, time) -> how fast they change with the time."""


def sample(
    config: DiTConfig,
    step: TrainStep,
    state: TrainState,
    labels: np.ndarray,
    *,
    num_steps: int = 50,
    method: str = "heun",
    guidance: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Images of given labels, the same under every layout.

    Example i starts from `normal(fold_in(key(seed), i))`. With classifier-free guidance

        velocity = without + guidance * (with label - without)

    and the model runs on twice the examples (Ho and Salimans 2022).

    Args:
        config: Of the step's model.
        step: A training step of the model, for its layout.
        state: The parameters to use.
        labels: (examples,); `config.classes` is no class.
        num_steps: From noise to image, of equal length.
        method: `euler`, one evaluation a step, or `heun`, two.
        guidance: 1 for none; more for samples that are more of their class.
        seed: Of the noise.

    Returns:
        (examples, height, width, channels), fp32.

    Raises:
        InputError: No such method or label, or examples that do not divide over the
            batch axes.
    """
    advance = METHODS.get(method)
    if advance is None:
        raise InputError(
            f"no method {method!r}; {nearest(method, METHODS)}",
            key="generation.unknown_method",
        )
    whole_number("num_steps", num_steps)
    labels = _checked(labels, config)
    step.check_batch(len(labels), "labels", 1)
    velocity = _velocity(config, step, state, labels, guidance)
    x = _noise(config, step, len(labels), seed)
    return to_images(integrate(velocity, x, num_steps, advance), config.patch)


def euler(velocity: Velocity, x: jax.Array, time: float, to: float) -> jax.Array:
    """One step along the velocity at its beginning: error O(step^2)."""
    return x + (to - time) * velocity(x, time)


def heun(velocity: Velocity, x: jax.Array, time: float, to: float) -> jax.Array:
    """One step along the mean of both ends' velocities: error O(step^3).

    Reference: Karras et al. 2022, algorithm 1.
    """
    before = velocity(x, time)
    after = velocity(x + (to - time) * before, to)
    return x + (to - time) / 2 * (before + after)


METHODS = {"euler": euler, "heun": heun}
"""Name -> (velocity, values, time, next time) -> values then."""


def integrate(
    velocity: Velocity,
    x: jax.Array,
    num_steps: int,
    advance: Callable[[Velocity, jax.Array, float, float], jax.Array],
) -> jax.Array:
    """Values at time 0 from those at time 1, in equal steps.

    Example:
        >>> float(integrate(lambda x, t: 2.0 * t, jnp.float32(1.0), 2, heun))
        0.0
    """
    times = np.linspace(1.0, 0.0, num_steps + 1)
    for time, to in zip(times[:-1], times[1:], strict=True):
        # One program in flight: several starve one another on virtual devices.
        x = jax.block_until_ready(advance(velocity, x, float(time), float(to)))
    return x


def _velocity(
    config: DiTConfig,
    step: TrainStep,
    state: TrainState,
    labels: np.ndarray,
    guidance: float,
) -> Velocity:
    """Return the patches' velocity, with and without labels in one batch."""
    pairs, rate = 1 if guidance == 1.0 else 2, config.path.rate
    none = np.full_like(labels, config.classes)
    given = _laid_out(step, np.stack([labels, none][:pairs], axis=1).reshape(-1))

    def velocity(x: jax.Array, time: float) -> jax.Array:
        batch = {
            "patches": _laid_out(step, jnp.repeat(x, pairs, axis=0)),
            "labels": given,
            "times": _laid_out(step, np.full(len(given), time, np.float32)),
        }
        found = rate * step.logits(state, batch)
        if pairs == 1:
            return found
        return found[1::2] + guidance * (found[::2] - found[1::2])

    return velocity


def _noise(config: DiTConfig, step: TrainStep, examples: int, seed: int) -> jax.Array:
    def drawn(example: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), example)
        return jax.random.normal(key, (config.tokens, config.values))

    numbers = np.arange(examples, dtype=np.uint32)
    return jax.jit(jax.vmap(drawn), out_shardings=step.batch_sharding)(numbers)


def _laid_out(step: TrainStep, array: np.ndarray | jax.Array) -> jax.Array:
    """The same on every process -> split over the batch axes."""
    return jax.device_put(array, step.batch_sharding)


def _checked(labels: np.ndarray, config: DiTConfig) -> np.ndarray:
    try:
        labels = np.asarray(labels)
    except ValueError as error:  # Rows of several lengths.
        raise InputError(
            f"labels are no row of whole numbers: {error}",
            key="generation.ragged_labels",
        ) from None
    if labels.ndim != 1 or not labels.size:
        raise InputError(
            f"labels have shape {labels.shape}; give at least one in a row",
            key="generation.labels_wrong_shape",
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"labels have dtype {labels.dtype}, but are whole numbers from 0 to "
            f"{config.classes}; convert them with .astype(numpy.int32)",
            key="generation.labels_not_whole",
        )
    if labels.min() < 0 or labels.max() > config.classes:
        raise InputError(
            f"labels are from {labels.min()} to {labels.max()}, but the model has "
            f"classes={config.classes}: 0 to {config.classes - 1}, and "
            f"{config.classes} for none",
            key="generation.labels_out_of_range",
        )
    return labels.astype(np.int32)
