"""Noise paths: how a clean value becomes noise as the time goes from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class NoisePath:
    """`noisy(t) = clean_share(t) * clean + noise_share(t) * noise`.

    What a model predicts is how fast it changes, the velocity

        target = (d noisy / dt) / rate

    so that whoever samples goes from t = 1 to 0 by `rate * prediction`.

    Args:
        clean_share, noise_share: Of a time.
        clean_slope, noise_slope: Their derivatives by the time, over `rate`.
        rate: What these are divided by.

    Example:
        >>> path = PATHS["flow"]
        >>> float(path.noisy(jnp.float32(2), jnp.float32(6), jnp.float32(0.25)))
        3.0
        >>> float(path.target(jnp.float32(2), jnp.float32(6), jnp.float32(0.25)))
        4.0
    """

    clean_share: Callable[[jax.Array], jax.Array]
    noise_share: Callable[[jax.Array], jax.Array]
    clean_slope: Callable[[jax.Array], jax.Array]
    noise_slope: Callable[[jax.Array], jax.Array]
    rate: float = 1.0

    def noisy(self, clean: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        """The value at a time; `times` has dims to broadcast over the others."""
        return self.clean_share(times) * clean + self.noise_share(times) * noise

    def target(self, clean: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        """Return the value that a model predicts there."""
        return self.clean_slope(times) * clean + self.noise_slope(times) * noise


_QUARTER = math.pi / 2

PATHS = {
    "flow": NoisePath(
        clean_share=lambda times: 1 - times,
        noise_share=lambda times: times,
        clean_slope=lambda times: -jnp.ones_like(times),
        noise_slope=jnp.ones_like,
    ),
    "v": NoisePath(
        clean_share=lambda times: jnp.cos(_QUARTER * times),
        noise_share=lambda times: jnp.sin(_QUARTER * times),
        clean_slope=lambda times: -jnp.sin(_QUARTER * times),
        noise_slope=lambda times: jnp.cos(_QUARTER * times),
        rate=_QUARTER,
    ),
}
"""`flow`: straight lines (Lipman et al. 2023; Liu et al. 2023). `v`: quarter circles,
whose velocity is the v of Salimans and Ho 2022, appendix D."""
