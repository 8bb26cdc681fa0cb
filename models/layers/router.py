"""Routers of experts: scores in fp32, the best few of them, balanced or bounded.

A token's experts are a function of its own scores; where experts have a capacity, of
its example's too. So no layout and no microbatch changes them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshpar import InputError, Scope
from meshpar.model.block_run import Sums
from meshpar.models.field_types import check_field_types, check_least_zero, check_sizes


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts.

    Args:
        experts: Routed experts of a layer.
        top_k: Experts of a token.
        score: `softmax` over the experts, or a `sigmoid` of each (DeepSeek-AI 2024).
        normalised: Whether a token's weights are divided by their sum.
        scale: Times what its weights then are.
        groups: Experts are in so many groups, as many in each, and a token's are of
            its best `top_groups`, each judged by its best two (DeepSeek-AI 2024,
            section 2.1.2).
        top_groups: Groups that a token may choose from.
        capacity_factor: Assignments that an expert takes of an example, over its fair
            share `seq * top_k / experts`; 0 is no limit (dropless). Those beyond are
            dropped: second choices before first ones, later tokens before earlier
            (Lepikhin et al. 2020, section 2.2, with an example as the group).
        bias_rate: What an expert's bias goes up or down by after a step in which it
            had less or more than its share (Wang et al. 2024, algorithm 1); the bias
            counts for the choice alone. 0 is no bias.

    Raises:
        InputError: More choices than there are experts to choose from, groups that do
            not divide, or a value out of range.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity_factor: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "experts", "top_k", "groups", "top_groups")
        if self.score not in ("softmax", "sigmoid"):
            raise InputError(
                f"score={self.score!r}: must be one of softmax, sigmoid",
                key="model.unknown_score",
            )
        check_least_zero(self, capacity_factor="no limit", bias_rate="no bias")
        if self.experts % self.groups or self.top_groups > self.groups:
            raise InputError(
                f"experts={self.experts} in groups={self.groups}, "
                f"top_groups={self.top_groups} of them: groups must divide the "
                "experts, and top_groups be no more than them",
                key="model.invalid_expert_groups",
            )
        allowed = self.experts // self.groups * self.top_groups
        if self.top_k > allowed:
            raise InputError(
                f"top_k={self.top_k} of experts={self.experts}, {allowed} of which a "
                "token may choose from; lower top_k, or raise experts or top_groups",
                key="model.wrong_top_k",
            )

    def capacity(self, seq: int) -> int | None:
        """The most assignments that an expert takes of an example; None for no limit.

        Example:
            >>> RouterConfig(experts=8, top_k=2, capacity_factor=1.25).capacity(32)
            10
        """
        if self.capacity_factor == 0:
            return None
        fair = self.capacity_factor * seq * self.top_k / self.experts
        return min(math.ceil(fair), seq)


class Router(nnx.Module):
    """Chooses the experts of each token, and says how evenly.

    Its state: `bias` of each expert, where it has one, and `tokens`, the assignments
    that each expert had in the last step, dropped ones included.

    Args:
        embed: Size of a token.
        config: How tokens choose.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(
        self, embed: int, config: RouterConfig, *, init_std: float, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        draw = nnx.initializers.normal(init_std)
        # Every device needs the scores of all experts: no logical axis for them.
        self.scores = nnx.Param(
            draw(rngs.params(), (embed, config.experts), jnp.float32),
            out_sharding=("embed", None),
            in_full=True,
        )
        zeros = jnp.zeros((config.experts,), jnp.float32)
        self.bias = nnx.Variable(zeros) if config.bias_rate else None
        self.tokens = nnx.Variable(zeros)

    def __call__(self, x: jax.Array, scope: Scope) -> tuple[jax.Array, jax.Array, Sums]:
        """Tokens (batch, seq, embed) -> experts, weights, and sums.

        Tokens of a `segment_ids` below 0 are padding: they go to no expert, and count
        nowhere.

        Returns:
            int32 (batch, seq, top_k), `config.experts` where dropped; fp32 weights
            alike; and `load_balance`, `router_z`, `dropped` and `expert_tokens`.
        """
        config = self.config
        logits = jnp.einsum(
            "BTD,DE->BTE",
            x.astype(jnp.float32),
            self.scores[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        bias = None if self.bias is None else self.bias[...]
        scores, experts, weights = choose_experts(logits, config, bias)
        real = _real(scope, experts.shape[:2])
        experts = jnp.where(real[..., None], experts, config.experts)
        sums = _sums(logits, scores, experts, real, config, scope)
        within = _kept(experts, config, scope)
        lost = real[..., None] & ~within
        sums["dropped"] = jnp.sum(lost, dtype=jnp.float32)
        kept = real[..., None] & within
        experts = jnp.where(kept, experts, config.experts)
        return experts, jnp.where(kept, weights, 0.0) * config.scale, sums

    def update(self, sums: Sums) -> None:
        """State after a step, from `expert_tokens` of the global batch."""
        tokens = sums["expert_tokens"]
        self.tokens[...] = tokens
        if self.bias is not None:
            step = self.config.bias_rate * jnp.sign(jnp.mean(tokens) - tokens)
            self.bias[...] = self.bias[...] + step


def choose_experts(
    logits: jax.Array, config: RouterConfig, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return scores of all experts, the chosen experts of each token, and weights.

    Args:
        logits: fp32 (..., experts).
        config: How tokens choose.
        bias: (experts,), added to the scores for the choice alone.

    Returns:
        fp32 (..., experts); int32 (..., top_k); fp32 (..., top_k), not yet scaled.
    """
    scores = _scores(logits, config)
    experts = _chosen(lax.stop_gradient(scores), bias, config)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalised:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-20)
    return scores, experts, weights


def _scores(logits: jax.Array, config: RouterConfig) -> jax.Array:
    if config.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)


def _chosen(
    scores: jax.Array, bias: jax.Array | None, config: RouterConfig
) -> jax.Array:
    """The experts of each token, best first; of equal ones the first."""
    if bias is not None:
        scores = scores + bias
    if config.groups > 1:
        scores = mask_other_groups(scores, config)
    return lax.top_k(scores, config.top_k)[1].astype(jnp.int32)


def mask_other_groups(scores: jax.Array, config: RouterConfig) -> jax.Array:
    size = config.experts // config.groups
    grouped = scores.reshape(*scores.shape[:-1], config.groups, size)
    judged = lax.top_k(grouped, min(2, size))[0].sum(-1)
    best = lax.top_k(judged, config.top_groups)[1]
    allowed = (best[..., None] == jnp.arange(config.groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _real(scope: Scope, tokens: tuple[int, ...]) -> jax.Array:
    """(batch, seq), False for padding, if a batch says what that is."""
    segments = scope.batch.get("segment_ids")
    return jnp.ones(tokens, bool) if segments is None else segments >= 0


def _sums(
    logits: jax.Array,
    scores: jax.Array,
    experts: jax.Array,
    real: jax.Array,
    config: RouterConfig,
    scope: Scope,
) -> Sums:
    """Auxiliary losses over the tokens, and each expert's tokens.

    `load_balance` of an example is `n * experts * sum_e f_e P_e` with its n tokens,
    the share f of assignments and the mean share P of the scores, n where they are
    even (Fedus et al. 2022, equation 4, of each example as in DeepSeek-AI 2024,
    equation 17); `router_z` is the sum of `logsumexp(logits)^2` (Zoph et al. 2022,
    equation 5).
    """
    hits = experts[..., None] == jnp.arange(config.experts)
    tokens_BE = jnp.sum(hits, axis=(1, 2), dtype=jnp.float32)
    shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    shares_BE = jnp.sum(shares * real[..., None], axis=1)
    of_sequence_BE = scope.sequence_sum(lax.stop_gradient(tokens_BE))
    # A token has top_k assignments: their sum is top_k * n.
    assigned_B1 = jnp.maximum(of_sequence_BE.sum(-1, keepdims=True), 1.0)
    even = config.experts * of_sequence_BE / assigned_B1 * shares_BE
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return {
        "load_balance": jnp.sum(even),
        "router_z": jnp.sum(jnp.where(real, squares, 0.0)),
        "expert_tokens": tokens_BE.sum(axis=0),
    }


def _kept(experts: jax.Array, config: RouterConfig, scope: Scope) -> jax.Array:
    """Return True for each assignment within its expert's capacity, if any."""
    if config.capacity_factor == 0:
        return jnp.ones(experts.shape, bool)
    within = functools.partial(_within_capacity, config=config)
    return scope.over_sequence(within, experts)


def _within_capacity(experts: jax.Array, config: RouterConfig) -> jax.Array:
    """Return True for the first assignments of each example that fit its expert.

    First choices of all tokens come before all second ones.
    """
    capacity = config.capacity(experts.shape[1])

    def rank_in_example(experts_TK: jax.Array) -> jax.Array:
        flat = experts_TK.T.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        first = jnp.searchsorted(flat[order], flat)
        return (place - first < capacity).reshape(experts_TK.T.shape).T

    return jax.vmap(rank_in_example)(experts)
