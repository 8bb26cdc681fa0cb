"""The next token of each example, drawn where the logits lie.

`sample_tokens` draws from a training step's own logits instead, without a cache.

With the vocabulary split over devices, what they exchange is a few scalars an example:
maxima, sums, and counts. The largest perturbed logit is a draw from the softmax (Gumbel
1954), and the thresholds of top-k and top-p are found bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.errors import InputError, whole_number

if TYPE_CHECKING:
    from meshpar.train.state import TrainState
    from meshpar.train.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen; filters apply in the order of the arguments.

    Args:
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Keep this many of the likeliest tokens; 0 keeps all.
        top_p: Keep the fewest likeliest tokens whose probabilities add up to this
            (Holtzman et al. 2020); 1 keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest (Nguyen et al.
            2024); 0 keeps all.
        seed: All draws are a function of it and of the token's place alone.

    Raises:
        InputError: A number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InputError(
                    f"{name}={value!r}: must be a number", key="value.not_number"
                )
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature={self.temperature}: must be at least 0, which takes the "
                "likeliest token, and finite",
                key="generation.temperature_out_of_range",
            )
        for name, least in (("top_k", 0), ("seed", 0)):
            whole_number(name, getattr(self, name), least=least)
        if self.seed >= 2**32:
            raise InputError(
                f"seed={self.seed}: must be below {2**32}",
                key="value.seed_out_of_range",
            )
        if not 0 < self.top_p <= 1:
            raise InputError(
                f"top_p={self.top_p}: must be above 0 and at most 1",
                key="generation.top_p_out_of_range",
            )
        if not 0 <= self.min_p <= 1:
            raise InputError(
                f"min_p={self.min_p}: must be from 0 to 1",
                key="generation.min_p_out_of_range",
            )

    @property
    def truncates(self) -> bool:
        """True if unlikely tokens are left out."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


class Draws(NamedTuple):
    """`Sampling` of every example, each (batch,)."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any

    @classmethod
    def from_rows(cls, rows: Sequence[Sampling]) -> Draws:
        """Return the arrays of some examples' choices."""
        most = np.iinfo(np.int32).max  # More than any vocabulary.
        limits = np.finfo(np.float32)
        heats = [min(row.temperature, float(limits.max)) for row in rows]
        # 0 for what fp32 on a device rounds to it.
        heats = [heat if heat >= limits.tiny else 0.0 for heat in heats]
        return cls(
            np.array(heats, np.float32),
            np.array([min(row.top_k, most) for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float32),
            np.array([row.min_p for row in rows], np.float32),
            np.array([row.seed for row in rows], np.uint32),
        )


def drawn(
    logits: jax.Array,
    draws: Draws,
    positions: jax.Array,
    *,
    random: bool = True,
    truncated: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Draw the next token of each example; return it with its log-probability.

    Args:
        logits: fp32 (batch, vocab).
        draws: How each is chosen.
        positions: (batch,), the place of the new token in its sequence.
        random: True if an example may have a temperature above 0.
        truncated: True if an example may leave out unlikely tokens.

    Returns:
        int32 (batch,), the size of the vocabulary where logits are NaN; and fp32
        (batch,), of the model's own distribution, whatever the temperature.
    """
    scores = logits
    if random:
        cool = draws.temperature <= 0
        heat = jnp.where(cool, 1.0, draws.temperature)[:, None]
        # Less the highest, so that the likeliest stay finite however cool it is.
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat
        if truncated:
            scaled = jnp.where(_kept(scaled, draws), scaled, -jnp.inf)
        noise = jax.vmap(_noise, (0, 0, None))(draws.seed, positions, logits.shape[1])
        scores = jnp.where(cool[:, None], logits, scaled + noise)
    # Not argmax, for which GSPMD gathers the vocabulary.
    highest = jnp.max(scores, axis=-1, keepdims=True)
    at = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    tokens = jnp.min(jnp.where(scores == highest, at, scores.shape[-1]), axis=-1)
    return tokens, log_probability(logits, tokens)


def log_probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probability of each token under the softmax of its logits.

    Args:
        logits: (..., vocab).
        tokens: (...) int32.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - highest
    at = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    own = jnp.sum(jnp.where(at == tokens[..., None], shifted, 0), axis=-1)
    return own - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))


def _noise(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)


def _kept(scaled: jax.Array, draws: Draws) -> jax.Array:
    """Return (batch, vocab): True for tokens that may be drawn."""
    # uint32 in the order of the fp32 values.
    bits, sign = lax.bitcast_convert_type(scaled, jnp.uint32), jnp.uint32(1 << 31)
    order = jnp.where(bits & sign, ~bits, bits | sign)
    vocab = scaled.shape[1]
    wanted = jnp.where(draws.top_k > 0, jnp.minimum(draws.top_k, vocab), vocab)
    kept = order >= _threshold(order, jnp.ones_like(scaled), wanted.astype(jnp.float32))
    highest = jnp.max(scaled, axis=1, keepdims=True)
    weights = jnp.where(kept, jnp.exp(scaled - highest), 0)
    share = draws.top_p * jnp.sum(weights, axis=1)
    some = draws.top_p[:, None] < 1
    kept &= (order >= _threshold(order, weights, share)) | ~some
    least = jnp.where(draws.min_p > 0, jnp.log(draws.min_p), -jnp.inf)[:, None]
    # A share that fp32 rounds to nothing still keeps the likeliest.
    return kept & (scaled - highest >= least) | ~(scaled < highest)


def _threshold(order: jax.Array, weights: jax.Array, least: jax.Array) -> jax.Array:
    """Return (batch, 1): the largest t with `least` of the weights at and above it."""

    def body(step: jax.Array, found: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        tried = found | bit
        above = jnp.sum(jnp.where(order >= tried[:, None], weights, 0), axis=1)
        return jnp.where(above >= least, tried, found)

    start = jnp.zeros(order.shape[:1], jnp.uint32)
    return lax.fori_loop(0, 32, body, start)[:, None]


def sample_tokens(
    step: TrainStep,
    state: TrainState,
    prompt: np.ndarray,
    *,
    num_tokens: int,
    seq: int,
    vocab: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> np.ndarray:
    """`prompt` and `num_tokens` more tokens, each drawn from `softmax(logits / t)`.

    Each token costs one forward pass over the last `seq` tokens: for a look at what a
    model has learned, not for serving.

    Args:
        step: The compiled step, for its layout.
        state: The parameters to use.
        prompt: (at least 1,) tokens.
        num_tokens: How many to draw.
        seq: Tokens that the model sees at once.
        vocab: Only tokens below it are drawn.
        temperature: Lower is more certain.
        seed: Of the draws.
    """
    generator = np.random.default_rng(seed)
    tokens = [int(token) for token in prompt]
    num_rows = len(step.rows_here(step.layout.batch_shards))
    for _ in range(num_tokens):
        recent = tokens[-seq:]
        window = np.zeros((num_rows, seq), np.int32)
        window[:, : len(recent)] = recent
        # All rows are alike, so that each process can read those of its own devices.
        here = step.logits(state, window).addressable_shards[0].data
        logits = np.asarray(here[0, len(recent) - 1, :vocab])
        scaled = (logits - logits.max()).astype(np.float64) / temperature
        weights = np.exp(scaled)
        tokens.append(int(generator.choice(vocab, p=weights / weights.sum())))
    return np.array(tokens)
