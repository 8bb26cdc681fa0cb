"""What blocks keep of the tokens gone by, so that the next one need not see them again.

Attention is the one place where a token meets others. While a model generates, its
scope has a cache: attention gives it the new tokens' queries, keys and values, and it
answers for all tokens so far. So a model is written once, for training and generation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.rules.rules import LogicalAxes

SOURCE_KEYS, SOURCE_VALUES = "source_keys", "source_values"
"""What is kept of the tokens of a source."""


@dataclass(frozen=True, kw_only=True)
class CachedArray:
    """What one layer keeps of each token under one name.

    Args:
        name: Unique in the layer, such as `keys`.
        shape: Of one token, such as (kv_heads, head_dim).
        dtype: Of its values.
        logical_axes: A name, or None, for each dim of `shape`.
        window: Tokens after which it may be forgotten; None for never.
        of_source: Whether those tokens are the source's, that a decoder reads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes
    window: int | None = None
    of_source: bool = False


class TokenCache(Protocol):
    """What a scope has while its model generates."""

    @property
    def max_seq(self) -> int:
        """Tokens that a sequence may have."""

    @property
    def positions(self) -> jax.Array:
        """(batch, new tokens) int32, the place of each in its sequence; -1 for none."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        scope: Any,
        *,
        window: int | None,
        scale: float,
        value_size: int | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of the new tokens to all of their sequences so far.

        Args:
            q: (batch, new tokens, heads, head_dim).
            k: (batch, new tokens, kv_heads, head_dim).
            v: As `k`, of another head_dim perhaps; None where values are the first
                `value_size` of the keys.
            scope: Where the function runs.
            window: A query sees keys less than so many places before it.
            scale: Scores are multiplied by it.
            value_size: Size of a value where `v` is None.
            bias: (max_seq, heads), added to the scores of keys so many places before.

        Returns:
            (batch, new tokens, heads, size of a value).
        """

    def attend_to_source(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scope: Any, *, scale: float
    ) -> jax.Array:
        """Attention of the new tokens to all of the source, which is read once.

        Args:
            q: (batch, new tokens, heads, head_dim).
            k: (batch, source tokens, heads, head_dim), none once they are kept.
            v: As `k`.
            scope: Where the function runs.
            scale: Scores are multiplied by it.

        Returns:
            (batch, new tokens, heads, head_dim).
        """


@dataclass
class DeclaredCache:
    """A cache that only notes what is kept: for tracing a block's function.

    Args:
        max_seq: Tokens that a sequence may have.
        positions: As the protocol's.
        head_shards: Parts that heads are split into.
        arrays: Filled with what a layer keeps, in the order in which it asks.
    """

    max_seq: int
    positions: jax.Array
    head_shards: int = 1
    arrays: list[CachedArray] = field(default_factory=list)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        scope: Any,
        *,
        window: int | None,
        scale: float,
        value_size: int | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Zeros of the result's shape."""
        given = {"keys": k} if v is None else {"keys": k, "values": v}
        self._note(given, window)
        size = value_size if v is None else v.shape[-1]
        return jnp.broadcast_to(q[..., :1], (*q.shape[:-1], size)) * 0

    def attend_to_source(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scope: Any, *, scale: float
    ) -> jax.Array:
        """Zeros of the result's shape."""
        self._note({SOURCE_KEYS: k, SOURCE_VALUES: v}, None, of_source=True)
        return q * 0

    def _note(
        self,
        given: dict[str, jax.Array],
        window: int | None,
        *,
        of_source: bool = False,
    ) -> None:
        first = next(iter(given))
        asked = sum(one.name.startswith(first) for one in self.arrays)
        for name, array in given.items():
            heads = kept_heads(array.shape[2], self.head_shards)
            one = CachedArray(
                name=array_name(name, asked),
                shape=(heads, array.shape[-1]),
                dtype=array.dtype,
                logical_axes=cached_axes(heads),
                window=window,
                of_source=of_source,
            )
            self.arrays.append(one)


def array_name(name: str, asked: int) -> str:
    """Of what a layer's attention keeps, where it had asked so often before.

    Example:
        >>> array_name("keys", 0), array_name("keys", 1)
        ('keys', 'keys.1')
    """
    return f"{name}.{asked}" if asked else name


def kept_heads(kv_heads: int, head_shards: int) -> int:
    """Heads of keys that are kept: copies, where devices outnumber them.

    So that each device has those of its own queries. One head is whole on each.

    Example:
        >>> kept_heads(8, 4), kept_heads(2, 4), kept_heads(1, 4)
        (8, 4, 1)
    """
    return 1 if kv_heads == 1 else math.lcm(kv_heads, head_shards)


def cached_axes(heads: int) -> LogicalAxes:
    """Logical axes of what is kept of one token: as its heads lie, or whole if one."""
    return (None if heads == 1 else "heads", "head_dim")


def refuse_uncached(causal: bool, **given: Any) -> None:
    """Refuses attention that no cache can answer.

    Raises:
        InputError: A token sees what follows it, or an argument is given.
    """
    if not causal:
        raise InputError(
            "this model generates no tokens: its attention is not causal, so a token "
            "depends on those that follow it",
            key="generation.not_causal",
        )
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"attention with {name}= cannot generate: a request is one document "
                "of tokens that all count; leave it out of the batch",
                key="generation.unsupported_argument",
            )
