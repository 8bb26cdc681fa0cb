"""Rotary position embedding (Su et al. 2021), with two scalings for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from meshpar import InputError
from meshpar.models.field_types import check_field_types, check_sizes
from meshpar.parallel.tensor import AnyArray


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequencies stretched for long contexts (Llama team 2024, released configs).

    Wavelengths above `original_seq / low_factor` are stretched by `factor`, those below
    `original_seq / high_factor` kept, and those between interpolated.

    Raises:
        InputError: A value that is no number, or out of its range.
    """

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_seq: int = 8192

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "original_seq")
        if self.high_factor <= self.low_factor:
            raise InputError(
                f"high_factor={self.high_factor}: must be above "
                f"low_factor={self.low_factor}",
                key="model.rope_factors_reversed",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a Hugging Face `config.json`."""
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_factor,
            "high_freq_factor": self.high_factor,
            "original_max_position_embeddings": self.original_seq,
        }


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): frequencies stretched, and scores sharpened.

    Pairs of dims that turn more than `beta_fast` times in `original_seq` positions are
    kept, those that turn less than `beta_slow` times stretched by `factor`, and those
    between interpolated.

    Args:
        factor: What the context is longer by.
        original_seq: Positions of the training before.
        beta_fast, beta_slow: Turns.
        amplitude: Of the rotated parts of queries and keys.
        score_factor: What all scores are multiplied by.

    Raises:
        InputError: A value that is no number, or out of its range.
    """

    factor: float
    original_seq: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    score_factor: float = 1.0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "original_seq")
        for name in ("beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise InputError(
                    f"{name}={getattr(self, name)}: must be above 0",
                    key="value.not_positive",
                )

    def stretched(
        self, frequencies: Float[np.ndarray, " pairs"], theta: float
    ) -> Float[np.ndarray, " pairs"]:
        """The frequencies of longer contexts; bounds are whole pairs, as theirs.

        Raises:
            InputError: `theta` is at most 1.
        """
        size = 2 * len(frequencies)
        if theta <= 1:
            raise InputError(
                f"rope_theta={theta}: must be above 1 with YaRN, which divides by its "
                "logarithm",
                key="value.out_of_range",
            )

        def turned_pair(turns: float) -> float:
            wavelength = self.original_seq / (turns * 2 * math.pi)
            return size * math.log(wavelength) / (2 * math.log(theta))

        low = max(math.floor(turned_pair(self.beta_fast)), 0)
        high = min(math.ceil(turned_pair(self.beta_slow)), size - 1)
        ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
        kept = 1 - np.clip(ramp, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


_MOST_HEAD_DIM = 1 << 14
"""The largest known have 512; each pair of dims has a frequency in the program."""


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None = None
) -> Float[np.ndarray, " {head_dim}//2"]:
    """Radians per position of each pair of dims, (head_dim / 2,).

    Raises:
        InputError: A head is larger than any model's.
    """
    if head_dim > _MOST_HEAD_DIM:
        raise InputError(
            f"heads of {head_dim} values: must be at most {_MOST_HEAD_DIM}; give more "
            "heads",
            key="model.head_too_large",
        )
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        return scaling.stretched(frequencies, theta)
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_seq / wavelengths
    kept = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rope(
    x: Float[AnyArray, "batch seq heads head_dim"],
    positions: Num[AnyArray, "#batch seq"],
    frequencies: Float[np.ndarray, " head_dim//2"],
) -> Float[AnyArray, "batch seq heads head_dim"]:
    """Rotates dims (i, i + head_dim/2) of every head by position x frequency.

    Args:
        x: (batch, seq, heads, head_dim).
        positions: (batch or 1, seq).
        frequencies: (head_dim / 2,), `rope_frequencies`.
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(
        frequencies, jnp.float32
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
