"""The protocol of a token cache: attention of new tokens to all tokens so far.

Attention is the one place where a token meets others. While a model generates, its
scope has a cache: attention gives it the new tokens' queries, keys and values, and it
returns the attention to all tokens so far. So a model is written once, for training and
generation.
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
"""Names of the cached arrays of a source."""


@dataclass(frozen=True, kw_only=True)
class CachedArray:
    """One array that a layer caches for each token.

    Args:
        name: Name, unique in the layer, such as `keys`.
        shape: Shape for one token, such as (kv_heads, head_dim).
        dtype: Dtype of its values.
        logical_axes: A name, or None, for each dim of `shape`.
        window: Number of tokens after which it may be dropped; None for never.
        of_source: Whether the tokens are those of the source that a decoder reads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes
    window: int | None = None
    of_source: bool = False


class TokenCache(Protocol):
    """Cache of a scope while its model generates."""

    @property
    def max_seq(self) -> int:
        """Largest number of tokens of a sequence."""

    @property
    def positions(self) -> jax.Array:
        """Positions in their sequences: (batch, new tokens) int32, -1 for no token."""

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
        """Return causal attention of the new tokens to their sequences so far.

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
        """Return attention of the new tokens to the whole source.

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
    """A cache that only records the arrays of a block while it is traced.

    Args:
        max_seq: Largest number of tokens of a sequence.
        positions: Positions as in `TokenCache`.
        head_shards: Number of shards of the heads.
        arrays: Filled with the arrays of a layer, in order of use.
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
        """Return zeros in the shape of the result."""
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
    """Return the name of a cached array of a layer's attention.

    Args:
        name: Name at the first call.
        asked: Number of calls of the layer before.

    Example:
        >>> array_name("keys", 0), array_name("keys", 1)
        ('keys', 'keys.1')
    """
    return f"{name}.{asked}" if asked else name


def kept_heads(kv_heads: int, head_shards: int) -> int:
    """Return the number of cached key heads, with copies if there are more devices.

    Each device has the heads of its own queries. A single head is whole on each.

    Example:
        >>> kept_heads(8, 4), kept_heads(2, 4), kept_heads(1, 4)
        (8, 4, 1)
    """
    return 1 if kv_heads == 1 else math.lcm(kv_heads, head_shards)


def cached_axes(heads: int) -> LogicalAxes:
    """Return the logical axes of a cached array, split by heads if it has several."""
    return (None if heads == 1 else "heads", "head_dim")


def refuse_uncached(causal: bool, **given: Any) -> None:
    """Raise if a cache cannot compute an attention.

    Raises:
        InputError: It is not causal, or an unsupported argument is given.
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
