"""Sinusoids: a number as cosines and sines of it, from short to long waves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_PERIOD = 10_000.0


def sinusoids(values: jax.Array, size: int) -> jax.Array:
    """(n,) -> fp32 (n, size): cosines, then sines (Vaswani et al. 2017, 3.5)."""
    # In double precision, once: an error of 1e-7 is one of 1e-4 at an angle of 1000.
    frequencies = np.float32(_PERIOD ** -(np.arange(size // 2) / (size // 2)))
    angles = values.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
