"""Token order: the tokens of a split sequence that each device has.

In zigzag order a sequence is cut into 2n chunks, of which device r of n has the two
r and 2n-1-r: one early, one late, so that under a causal mask all devices have as many
pairs of a query and a key it sees. Reference: Brandon et al. 2023 (striped attention),
section 3, for the imbalance; Llama team 2024, section 3.3.2, for the 2n chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives import asked, summed
from meshpar.errors import InputError
from meshpar.layout.context_method import RING, ContextAttention, ContextMethod
from meshpar.trace.token_flow import SEQUENCE_SUM, WHOLE_SEQUENCE


@dataclass(frozen=True, kw_only=True)
class TokenOrder:
    """The order in which the devices along a mesh axis have a sequence's tokens.

    Args:
        mesh_axis: The manual mesh axis that splits the sequence.
        num_ranks: Its size.
        across: How keys and values move between groups of devices.
        zigzag: True if each device has two chunks; else one, in natural order.
        heads: Neighbouring devices that split the heads while they attend, and have
            their group's tokens then. The groups lie in token order, and a group's
            tokens are shared out among its devices.
        stride: Places along the mesh axis from one device to the next.
        probe: Positions, where a function is traced only to find out what it does with
            tokens: what communicates gives its first argument's shape then.
        lengths: (tokens of a padded sequence, those before the padding) of each.
        cached: Of a probe, whether attention is what a cache answers token by token.

    Example:
        >>> order = TokenOrder(mesh_axis="context", num_ranks=2, zigzag=True)
        >>> [order.positions(4, rank).tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    mesh_axis: str
    num_ranks: int
    across: ContextMethod = RING
    zigzag: bool = False
    heads: int = 1
    stride: int = 1
    lengths: tuple[tuple[int, int], ...] = ()
    probe: Any = None
    cached: bool = False

    @property
    def text(self) -> str:
        """Attention method as a layout writes it."""
        groups = self.num_ranks // self.heads
        how = ContextAttention(heads=self.heads, groups=groups, across=self.across)
        return how.text

    def group_order(self) -> TokenOrder:
        """Return the order of the groups, each of which has its tokens whole."""
        return replace(
            self, num_ranks=self.num_ranks // self.heads, heads=1, stride=self.heads
        )

    def trading(self) -> list[list[int]] | None:
        """Return the ranks of each group's devices; None if there is one group."""
        size = self.heads
        if size == self.num_ranks:
            return None
        return [
            list(range(first, first + size)) for first in range(0, self.num_ranks, size)
        ]

    def sharing(self) -> list[list[int]] | None:
        """Return the ranks that share a sequence; None for all of the mesh axis.

        One of each group, which has the same heads of other tokens.
        """
        if self.stride == 1:
            return None
        whole = self.num_ranks * self.stride
        return [list(range(first, whole, self.stride)) for first in range(self.stride)]

    def hop(self, distance: int) -> list[tuple[int, int]]:
        """Return the (source, target) ranks of a shift by `distance` devices."""
        groups = self.sharing() or [list(range(self.num_ranks))]
        return [
            (source, group[(at + distance) % len(group)])
            for group in groups
            for at, source in enumerate(group)
        ]

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks of a sequence."""
        return self.num_ranks * (2 if self.zigzag else 1)

    def padded(self, num_tokens: int) -> int:
        """Return `num_tokens` rounded up to a number that divides into chunks."""
        return math.ceil(num_tokens / self.num_chunks) * self.num_chunks

    def length(self, num_tokens: int) -> int:
        """Return the tokens of the sequence with `num_tokens` a device, unpadded."""
        whole = num_tokens * self.num_ranks
        return dict(self.lengths).get(whole, whole)

    def rank(self) -> jax.Array:
        """Return this device's index along the mesh axis."""
        if self.probing or self.num_ranks == 1:
            return jnp.int32(0)
        return lax.axis_index(self.mesh_axis)

    @property
    def probing(self) -> bool:
        """True if a function is only traced, and nothing is to be sent."""
        return self.probe is not None

    def positions(self, num_tokens: int, rank: Any) -> Any:
        """Return the positions of a device's tokens in a sequence: (num_tokens,) int32.

        Args:
            num_tokens: Tokens of one device.
            rank: Its index; an int gives a NumPy array, an array a JAX array.
        """
        if self.probing:
            return self.probe
        xp = np if isinstance(rank, int) else jnp
        size = num_tokens * self.num_ranks // self.num_chunks
        within = xp.arange(size, dtype=xp.int32)
        return xp.concatenate([chunk * size + within for chunk in self._chunks(rank)])

    def own(self, array: jax.Array, dim: int) -> jax.Array:
        """Return this device's tokens of an array with the whole sequence along `dim`.

        Nothing is communicated. The sequence must divide into the chunks.
        """
        size = array.shape[dim] // self.num_chunks
        chunks = [
            lax.dynamic_slice_in_dim(array, chunk * size, size, dim)
            for chunk in self._chunks(self.rank())
        ]
        return jnp.concatenate(chunks, dim) if len(chunks) > 1 else chunks[0]

    def own_result(
        self,
        function: Callable[[jax.Array], jax.Array],
        array: jax.Array,
        num_tokens: int,
    ) -> jax.Array:
        """Return this device's tokens of a function of whole sequences, unpadded.

        Args:
            function: (batch, seq, ...) -> (batch, seq, ...).
            array: (batch, seq and its padding, ...), in the sequence's order.
            num_tokens: Tokens of one device.
        """
        padding = array.shape[1] - self.length(num_tokens)
        if not padding:
            return self.own(function(array), 1)
        found = function(array[:, :-padding])
        widths = [(0, padding if dim == 1 else 0) for dim in range(found.ndim)]
        return self.own(jnp.pad(found, widths), 1)

    def natural(self, ranks: jax.Array, dim: int) -> jax.Array:
        """Return the whole sequence in natural order, from the parts of all devices.

        Args:
            ranks: (ranks, ...), each device's array, as an all-gather stacks them.
            dim: Dim of the tokens in one device's array.
        """
        order = np.argsort(
            np.concatenate(
                [
                    self.positions(ranks.shape[dim + 1], rank)
                    for rank in range(self.num_ranks)
                ]
            )
        )
        joined = jnp.moveaxis(ranks, 0, dim)
        shape = ranks.shape[1:]
        joined = joined.reshape(*shape[:dim], -1, *shape[dim + 1 :])
        return jnp.take(joined, order, axis=dim) if self.zigzag else joined

    def _chunks(self, rank: Any) -> tuple[Any, ...]:
        if not self.zigzag:
            return (rank,)
        # A group's two chunks are cut into two for each of its devices.
        size = self.heads
        group, place = rank // size, rank % size
        last = self.num_chunks // size - 1 - group

        def chunk(at: Any) -> Any:
            second = at // size
            return (group + second * (last - group)) * size + at - second * size

        return chunk(2 * place), chunk(2 * place + 1)


Function = Callable[[jax.Array], jax.Array]
"""(batch, seq, ...) -> (batch, seq, ...), in the sequence's order."""


def sequence_sum(x: jax.Array, order: TokenOrder, platform: str) -> jax.Array:
    """Return the sum of `x` over the devices that share a sequence."""
    if order.probing:  # what no device has alone
        return _named(jnp.ones_like, SEQUENCE_SUM)(x)
    if order.num_ranks == 1:
        return x
    with asked("sequence_sum"):
        return summed(x, order.mesh_axis, platform)


def over_sequence(function: Function, x: jax.Array, order: TokenOrder) -> jax.Array:
    """Return this device's tokens of a function of whole sequences.

    Args:
        function: Function of whole sequences.
        x: (batch, tokens at hand, ...).
        order: The order of the tokens.

    Raises:
        InputError: `function` gives another number of tokens.
    """
    if order.probing:
        y = _zeros_like_result(function, x, order)
        places = order.probe.reshape(1, -1, *(1,) * (y.ndim - 2))
        return jnp.broadcast_to(places, y.shape).astype(y.dtype)
    if order.num_ranks == 1:
        return function(x)
    with asked("sequence_gather"):
        ranks = lax.all_gather(x, order.mesh_axis)
    return order.own_result(function, order.natural(ranks, 1), x.shape[1])


def _zeros_like_result(
    function: Function, x: jax.Array, order: TokenOrder
) -> jax.Array:
    """Return zeros in the shape of this device's tokens of a function's result."""
    seq = order.length(x.shape[1])
    whole = jnp.zeros((x.shape[0], seq, *x.shape[2:]), x.dtype)
    y = _named(function, WHOLE_SEQUENCE)(whole)
    if y.ndim < 2 or y.shape[1] != seq:
        raise InputError(
            f"a function given to scope.over_sequence gives shape {y.shape} of "
            f"sequences of {seq} tokens; it must give (examples, tokens, ...)",
            key="model.over_sequence_changes_tokens",
        )
    return jnp.zeros((y.shape[0], x.shape[1], *y.shape[2:]), y.dtype)


def _named(function: Function, name: str) -> Function:
    """Return a function whose call has a name in a trace."""

    def named(x: jax.Array) -> jax.Array:
        return function(x)

    named.__name__ = name
    return jax.jit(named)
