"""`Scope`: the context of a model's functions (rules, batch, layer, random numbers)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, summed
from meshpar.errors import InputError
from meshpar.model.inputs import Batch
from meshpar.model.token_cache import TokenCache
from meshpar.model.token_order import TokenOrder, over_sequence, sequence_sum
from meshpar.rules.rules import LogicalAxes, Rules, auto_mesh_shape, spec_axes

SAVED_PREFIX = "meshpar."
"""Prefix of the name of every residual that a block asks to keep."""


def named_residual(x: jax.Array, name: str) -> jax.Array:
    """Return `x` with a name that policies of `remat` know."""
    return checkpoint_name(x, SAVED_PREFIX + name)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Context of a model's function: where it runs, and on which examples and tokens.

    Args:
        rules: How arrays are laid out; None outside any mesh.
        batch: The inputs of these examples, those that need no gradient.
        layer: Index of the layer among all groups; -1 outside the blocks.
        state: State of this layer, or of the ends outside the blocks, as a tree.
        examples: Index of each example at hand in the global batch, uint32; None where
            nobody asked for random numbers.
        random: Key of (seed, step) that all randomness derives from; None for none.
        training: Whether a training step runs; without, dropout does nothing.
        token_positions: Positions in the sequence of the tokens at hand; None if they
            are the whole sequence.
        full_seq: Tokens of the whole sequence, where those at hand are a share of it.
        order: Which tokens of each sequence are at hand, where its devices share it
            out among them; None where they are whole.
        batch_axes: Manual mesh axes that split the examples of one microbatch.
        expert_hosts: Number of hosts of the devices that share experts; each host has
            the same number of them, one host after another. 1 if unknown.
        experts_in_parts: Whether experts may send their rows in parts.
        num_microbatches: Parts that the batch of a device is run in, one by one.
        ranks_diverge: Whether pipeline ranks do work of their own, so that no permute
            may stand in what one of them does.
        platform: Kind of device the program is for: `cpu`, `gpu` or `tpu`.
        recomputed: Whether the backward runs the function again.
        batch_sums: List that records calls of `batch_sum`; None for none.
        sequence_sums: List that records calls of `sequence_sum`; None for none.
        cache: Cache of the earlier tokens while a model generates; else None.
    """

    rules: Rules | None = None
    batch: Mapping[str, jax.Array] = field(default_factory=Batch)
    layer: jax.Array | int = -1
    state: Any = field(default_factory=dict)
    examples: jax.Array | None = None
    random: jax.Array | None = None
    training: bool = False
    token_positions: jax.Array | None = None
    full_seq: int | None = None
    order: TokenOrder | None = None
    batch_axes: tuple[str, ...] = ()
    expert_hosts: int = 1
    experts_in_parts: bool = True
    num_microbatches: int = 1
    ranks_diverge: bool = False
    platform: str = "cpu"
    recomputed: bool = False
    batch_sums: list[str] | None = field(default=None, repr=False)
    sequence_sums: list[str] | None = field(default=None, repr=False)
    cache: TokenCache | None = field(default=None, repr=False)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the manual mesh axes of size above 1 that split the experts."""
        mapped = () if self.rules is None else self.rules.table.get("experts") or ()
        return tuple(axis for axis in mapped if axis in self.batch_axes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Return the mesh axes of GSPMD, of size above 1, that split `residual_seq`."""
        if self.rules is None or "residual_seq" not in self.rules.table:
            return ()
        sizes, axes = auto_mesh_shape(), self.rules.mesh_axes("residual_seq")
        return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

    def constrain(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        """Return `x` laid out by the rules (`Rules.constrain`), if there is a mesh."""
        return x if self.rules is None else self.rules.constrain(x, logical_axes)

    def map_shards(
        self,
        function: Callable[..., jax.Array],
        in_axes: Sequence[LogicalAxes],
        out_axes: LogicalAxes,
        *,
        whole_mesh: bool = False,
    ) -> Callable[..., jax.Array]:
        """Return `function` mapped over shards, for work that needs no other shard.

        Args:
            function: Takes and returns arrays; sees local shapes.
            in_axes: Logical axes of each argument.
            out_axes: Logical axes of the result.
            whole_mesh: Whether mesh axes of one device are made manual too, as a kernel
                needs that XLA cannot split.
        """
        if self.rules is None:
            return function
        rules = self.rules

        def mapped(*arrays: jax.Array) -> jax.Array:
            layouts = zip(in_axes, arrays, strict=True)
            specs = tuple(_spec(rules, axes, array.shape) for axes, array in layouts)
            used = {axis for spec in specs for axis in spec_axes(spec)}
            if whole_mesh:
                mesh = jax.sharding.get_abstract_mesh()
                used |= {axis for axis in mesh.auto_axes if mesh.shape[axis] == 1}
            if not used:
                return function(*arrays)
            out_shape = jax.eval_shape(function, *arrays).shape
            return jax.shard_map(
                function,
                in_specs=specs,
                out_specs=_spec(rules, out_axes, out_shape),
                axis_names=used,
                check_vma=False,
            )(*arrays)

        return mapped

    def same_layout(
        self,
        one_axes: LogicalAxes,
        other_axes: LogicalAxes,
        one_shape: Sequence[int],
        other_shape: Sequence[int],
    ) -> bool:
        """Return True if two arrays are split alike, dim by dim."""
        if self.rules is None:
            return True
        one = _spec(self.rules, one_axes, one_shape)
        return one == _spec(self.rules, other_axes, other_shape)

    def idle_axes(
        self, logical_axes: LogicalAxes, shape: Sequence[int]
    ) -> tuple[str, ...]:
        """Return the automatic mesh axes longer than 1 that do not split an array."""
        if self.rules is None:
            return ()
        split = set(spec_axes(_spec(self.rules, logical_axes, shape)))
        sizes = auto_mesh_shape().items()
        return tuple(axis for axis, size in sizes if size > 1 and axis not in split)

    def save(self, x: jax.Array, name: str) -> jax.Array:
        """Return `x` with a name: `remat=selective` keeps it instead of recomputing it.

        `remat=save:NAME` keeps those named alone, `remat=offload:NAME` in the host's
        memory.
        """
        return named_residual(x, name)

    def positions(self, seq: int) -> jax.Array:
        """Return the positions in the sequence of the `seq` tokens at hand: (seq,).

        While a model generates every example has its own: (batch, seq).
        """
        if self.cache is not None:
            return jnp.maximum(self.cache.positions, 0)
        if self.token_positions is not None:
            return self.token_positions
        if self.order is not None:
            return self.order.positions(seq, self.order.rank())
        return jnp.arange(seq, dtype=jnp.int32)

    def seq_length(self, seq: int) -> int:
        """Return the length of the whole sequence, of which `seq` tokens are at hand.

        Raises:
            InputError: Not `seq` are at hand; found out where a model is traced before
                its sequences are split, not where it runs.
        """
        if self.order is not None and self.order.probing:
            self._check_tokens("seq_length", seq)
        if self.cache is not None:
            return self.cache.max_seq
        if self.full_seq is not None:
            return self.full_seq
        return seq if self.order is None else self.order.length(seq)

    def key(self, name: str) -> jax.Array:
        """Return a key for each example at hand: (examples,), for `jax.vmap`.

        A function of (seed, step, layer, `name`, example) alone, so that no layout
        changes what is drawn.

        Raises:
            InputError: There is nothing to derive from (`Scope(random=, examples=)`),
                or devices share the tokens of an example here.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> scope = Scope(random=jax.random.key(0), examples=jnp.arange(4))
            >>> draw = lambda key: jax.random.normal(key, (3,))
            >>> jax.vmap(draw)(scope.key("noise")).shape
            (4, 3)
        """
        if self.order is not None:
            raise InputError(
                f"scope.key({name!r}) is one for each example, but the devices of "
                f"{self.order.mesh_axis} share the tokens of an example; set "
                f"{self.order.mesh_axis}=1, or draw with scope.dropout",
                key="model.key_of_shared_tokens",
            )
        if self.token_positions is not None:
            raise InputError(
                f"scope.key({name!r}) is one for each example, but the ranks of a "
                "pipeline share the tokens of an example in embed and head here; draw "
                "in a block, or leave per_token out",
                key="model.key_in_shared_ends",
            )
        return self._keys(name)

    def uniform(self, name: str) -> jax.Array:
        """Return a number in [0, 1) for each example at hand: fp32 (examples,).

        A function of (seed, step, layer, `name`, example) alone; devices that share the
        tokens of an example draw the same.

        Raises:
            InputError: As `key`, where there is nothing to derive from.
        """
        return jax.vmap(jax.random.uniform)(self._keys(name))

    def normal(self, shape: tuple[int, ...], name: str) -> jax.Array:
        """Return standard normal numbers for each token at hand: fp32 of that shape.

        A function of (seed, step, layer, `name`, example, token) alone: where devices
        share the tokens of an example, each draws all of them and takes its own.

        Args:
            shape: (examples, tokens at hand, ...).
            name: Of the place, another one for each in a function.

        Raises:
            InputError: Another number of examples or of tokens, nothing to derive from,
                or the model generates token by token, each example at a place of its
                own.
        """
        if self.cache is not None:
            raise InputError(
                f"scope.normal({name!r}) draws for whole sequences, but the model "
                "generates token by token here; draw in training alone",
                key="model.normal_while_generating",
            )
        keys = self._keys(name)
        if len(shape) < 2 or shape[0] != len(keys):
            raise InputError(
                f"scope.normal({name!r}) is asked for shape {shape}, but there are "
                f"{len(keys)} examples here; ask for (examples, tokens, ...)",
                key="model.normal_wrong_examples",
            )
        self._check_tokens(f"normal({name!r})", shape[1])
        whole = (self.seq_length(shape[1]), *shape[2:])
        drawn = jax.vmap(lambda key: jax.random.normal(key, whole))(keys)
        shared = self.token_positions is not None or self.order is not None
        return drawn[:, self.positions(shape[1])] if shared else drawn

    def dropout(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """Return `x` with a share `rate` of its values zeroed and the rest scaled up.

        The mask is a function of (seed, step, layer, `name`, example) only.

        Args:
            x: The example is its first dim.
            rate: From 0 to below 1.
            name: Of the place, another one for each in a function.

        Raises:
            InputError: The first dim is not as long as there are examples.
        """
        if not self.training or self.random is None or rate == 0.0:
            return x
        keys = self._keys(name)
        if x.ndim == 0 or x.shape[0] != len(keys):
            raise InputError(
                f"scope.dropout({name!r}) is given shape {x.shape}, but there are "
                f"{len(keys)} examples here, one mask for each; put the example first",
                key="model.dropout_wrong_examples",
            )
        shape = x.shape[1:]
        shared = self.token_positions is not None or self.order is not None
        if shared and x.ndim < 3:
            raise InputError(
                f"scope.dropout({name!r}) is given shape {x.shape}, but devices share "
                "the tokens of an example here: give it (examples, tokens, ...)",
                key="model.dropout_without_tokens",
            )
        if shared:
            self._check_tokens(f"dropout({name!r})", x.shape[1])
            shape = (self.seq_length(x.shape[1]), *shape[1:])
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, shape))(keys)
        if shared:
            keep = keep[:, self.positions(x.shape[1])]
        return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)

    def batch_sum(self, x: jax.Array) -> jax.Array:
        """Return `x` summed over the devices that share the global batch.

        One all-reduce of `x` over the batch axes, and of its gradient in the backward.

        Args:
            x: A sum over the examples at hand.

        Raises:
            InputError: The batch runs in several microbatches, none of which has the
                others' examples; or the ranks of a pipeline share the tokens here.
        """
        self._check_whole("batch_sum")
        if self.batch_sums is not None:
            self.batch_sums.append("batch_sum")
        if self.num_microbatches > 1:
            raise InputError(
                "scope.batch_sum needs the whole global batch at once, but it runs in "
                f"microbatches={self.num_microbatches}; set microbatches=1, or "
                "normalise with state that a step updates (BlockGroup.update_state)",
                key="model.batch_sum_in_microbatches",
            )
        if self.order is not None:
            raise InputError(
                "scope.batch_sum adds up sums over examples, but "
                f"{self.order.num_ranks} devices share the tokens of each; set "
                f"{self.order.mesh_axis}=1",
                key="model.batch_sum_of_shared_tokens",
            )
        if not self.batch_axes:
            return x
        with asked("batch_sum"):
            return summed(x, self.batch_axes, self.platform)

    def sequence_sum(self, x: jax.Array) -> jax.Array:
        """Return `x` summed over the devices that share the tokens of each example.

        One all-reduce of `x` over the mesh axis that splits sequences, and of its
        gradient in the backward. What it gives is alike on all of them: what is linear
        in a sum over the tokens at hand may be multiplied by it and stays a part.

        Args:
            x: A sum over the tokens at hand.

        Raises:
            InputError: The ranks of a pipeline share the tokens here.
        """
        self._check_whole("sequence_sum")
        if self.sequence_sums is not None:
            self.sequence_sums.append("sequence_sum")
        return x if self.order is None else sequence_sum(x, self.order, self.platform)

    def over_sequence(
        self, function: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """Return the tokens at hand of a function of whole sequences.

        One all-gather of `x` over the mesh axis that splits sequences.

        Args:
            function: (batch, seq, ...) -> (batch, seq, ...), in the sequence's order.
                It has no other tokens than those of its array, whose own length it
                takes.
            x: (batch, tokens at hand, ...).

        Raises:
            InputError: The ranks of a pipeline share the tokens here, `x` is no array
                of tokens or has another number of them, or `function` gives others.
        """
        self._check_whole("over_sequence")
        if len(getattr(x, "shape", ())) < 2:
            is_array = hasattr(x, "shape")
            given = f"shape {x.shape}" if is_array else f"a {type(x).__name__}"
            raise InputError(
                f"scope.over_sequence is given {given}, but takes one array of "
                "(batch, tokens at hand, ...); join several along their last dim",
                key="model.over_sequence_not_tokens",
            )
        self._check_tokens("over_sequence", x.shape[1])
        if self.order is None:
            return function(x)
        return over_sequence(function, x, self.order)

    def at_layer(self, layer: jax.Array | int, state: Any = None) -> Scope:
        """Return this scope inside block `layer`, with that layer's state."""
        return replace(self, layer=layer, state={} if state is None else state)

    def _check_whole(self, name: str) -> None:
        if self.token_positions is not None:
            raise InputError(
                f"scope.{name} is of whole sequences, but in embed and head the ranks "
                "of a pipeline share the tokens of an example; call it in a block, or "
                "leave per_token out",
                key="model.whole_sequence_in_ends",
            )

    def _check_tokens(self, call: str, seq: int) -> None:
        """Raise if a call is for another number of tokens than this device has."""
        probing = self.order is not None and self.order.probing
        if self.token_positions is None and not probing:
            return
        tokens = len(self.positions(0))
        if seq != tokens:
            raise InputError(
                f"scope.{call} is for {seq} tokens, but devices share the tokens of an "
                f"example here, of which {tokens} are at hand: give it those, as "
                "(examples, tokens, ...); in over_sequence take the array's own length",
                key="model.wrong_number_of_tokens",
            )

    def _keys(self, name: str) -> jax.Array:
        if self.random is None or self.examples is None:
            raise InputError(
                f"random numbers for {name!r} derive from a seed, a step and each "
                "example's index, but this scope has none; give "
                "Scope(random=key, examples=jnp.arange(num_examples))",
                key="model.random_without_seed",
            )
        key = jax.random.fold_in(self.random, zlib.crc32(name.encode()))
        key = jax.random.fold_in(key, jnp.asarray(self.layer).astype(jnp.uint32))
        examples = self.examples.astype(jnp.uint32)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, examples)


def _spec(
    rules: Rules, logical_axes: LogicalAxes, shape: Sequence[int]
) -> PartitionSpec:
    return rules.spec(logical_axes, shape, mesh_shape=auto_mesh_shape())
