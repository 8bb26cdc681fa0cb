"""Check a model on one device's tokens of a sequence: what joins or counts tokens.

Also whether the sequences of a batch divide over devices, or can be padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, input_shapes, logical_sizes
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    run_on,
    traced_forward,
    tracing,
)
from meshpar.parallel.grids.space import splits_tokens
from meshpar.parallel.sequence import sequence_dims, token_order
from meshpar.rules.rules import Rules
from meshpar.trace.token_counts import ALIKE
from meshpar.trace.token_mixing import mixes_tokens


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A check of a model's functions on one device's tokens.

    Args:
        model: The model.
        names: Names of the arrays of its batch.
        cached: Whether a cache answers attention, as in generation.
        ends_only: Whether to leave out the blocks, as for the ranks of a pipeline.
        of_logits: Whether to check `logits` in place of the head.
        counts: Whether the head's sums may count the tokens at hand.
    """

    model: Model
    names: tuple[str, ...]
    cached: bool = False
    ends_only: bool = False
    of_logits: bool = False
    counts: bool = True

    @property
    def mesh_axis(self) -> str:
        """Mesh axis whose devices share the tokens."""
        return "stage" if self.ends_only else "context"

    @property
    def examples(self) -> int:
        """Number of examples to trace.

        With one example, a reshape that merges examples and tokens leaves the tokens a
        dim by themselves, which can be followed.
        """
        return 1 if self.ends_only or self.of_logits else 3


def what_joins(probe: Probe, num_tokens: int) -> str | None:
    """Return the operation of a model that joins tokens; None if none does.

    Args:
        probe: The check.
        num_tokens: Tokens of the sequences to trace.

    Raises:
        InputError: It cannot be traced.
    """
    axis = probe.mesh_axis
    with tracing(f"the model cannot be traced as devices of {axis!r} run it"):
        if probe.of_logits:
            return _in_logits(probe, num_tokens)
        if probe.ends_only:
            return _in_ends(probe, num_tokens)
        return _followed(probe, num_tokens, _as_it_is, sums=True, counts=probe.counts)


def _as_it_is(found: Any, positions: jax.Array) -> Any:
    return found


def _followed(
    probe: Probe,
    num_tokens: int,
    then: Callable[[Any, jax.Array], Any],
    **options: bool,
) -> str | None:
    """Return what joins tokens in `then` of the model's results and positions."""
    whole, share = (
        Share.from_probe(probe, num_tokens, at_hand)
        for at_hand in (num_tokens, max(num_tokens // 2, 1))
    )
    return mixes_tokens(
        whole.then(then),
        num_tokens,
        whole.tokens,
        one_layer_shapes(probe.model),
        one_layer_state(probe.model),
        fewer=(share.then(then), share.tokens),
        **options,
    )


def _in_logits(probe: Probe, num_tokens: int) -> str | None:
    found = _followed(probe, num_tokens, _as_it_is, lenient=True)
    if found is not None:
        return found
    # Only linear operations may follow a sum over tokens.
    if _followed(probe, num_tokens, lambda found, _: jax.tree.map(jnp.abs, found)):
        return "its result is a sum over tokens, of which each device has a part"
    return None


def _in_ends(probe: Probe, num_tokens: int) -> str | None:
    found = _followed(probe, num_tokens, _as_it_is, lenient=True)
    if found is not None:
        return found
    if any(_is_alike(probe, num_tokens, at) for at in range(2)):
        return ALIKE
    return None


def _is_alike(probe: Probe, num_tokens: int, at: int) -> bool:
    """Return True if a sum of the head depends on neither tokens nor their number."""

    def one(found: Any, positions: jax.Array) -> Any:
        return found[0][at]

    def beside_tokens(found: Any, positions: jax.Array) -> Any:
        return found[0][at] * positions

    if _followed(probe, num_tokens, one, sums=True) is None:
        return False
    # Tokens that meet what depends on their number are refused.
    return _followed(probe, num_tokens, beside_tokens) is None


@dataclass(frozen=True, kw_only=True)
class Share:
    """Inputs of a check: the tokens that one device has of each sequence.

    Args:
        probe: The check.
        order: Token order of the scope.
        batch: Name -> (shape, dim of its tokens or None).
        positions: Shape of the positions of the tokens.
    """

    probe: Probe
    order: TokenOrder
    batch: dict[str, tuple[jax.ShapeDtypeStruct, int | None]]
    positions: jax.ShapeDtypeStruct

    @classmethod
    def from_probe(cls, probe: Probe, seq: int, num_tokens: int) -> Share:
        """Return the inputs of a device with `num_tokens` of sequences of `seq`."""
        inputs = {
            name: replace(one, optional=False)
            for name, one in probe.model.known_inputs.items()
            if name in probe.names
        }
        sizes = {**dict.fromkeys(logical_sizes(inputs), seq), BATCH_DIM: probe.examples}
        return cls(
            probe=probe,
            order=TokenOrder(
                mesh_axis=probe.mesh_axis,
                num_ranks=1,
                lengths=((num_tokens, seq),),
                cached=probe.cached,
            ),
            batch={
                name: _at_hand(shape, _token_dims(probe, name, shape), num_tokens)
                for name, shape in input_shapes(inputs, sizes).items()
            },
            positions=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        )

    @property
    def tokens(self) -> list:
        """First argument of `forward`, with the dims of tokens."""
        return [self.batch, (self.positions, 0)]

    def forward(self, tokens: list, params: Any, state: Any) -> Any:
        """Return the model's sums, or its logits."""
        batch, positions = tokens
        probe = self.probe
        shapes = {name: shape for name, (shape, _) in self.batch.items()}
        fields: dict[str, Any] = {
            "ends_only": probe.ends_only,
            "run": run_on,
            "order": replace(self.order, probe=positions),
        }
        of_logits = probe.of_logits
        once, *_ = traced_forward(
            probe.model, shapes, head=not of_logits, logits=of_logits, **fields
        )
        return once(params, state, batch)

    def then(self, function: Callable[[Any, jax.Array], Any]) -> Callable[..., Any]:
        """Return `forward` followed by a function of its result and the positions."""

        def forward(tokens: list, params: Any, state: Any) -> Any:
            return function(self.forward(tokens, params, state), tokens[1])

        return forward


def _token_dims(
    probe: Probe, name: str, shape: jax.ShapeDtypeStruct
) -> tuple[int, ...]:
    """Return the dims that devices split: `seq` alone for ranks of a pipeline."""
    if not probe.ends_only:
        return sequence_dims(probe.model, name, shape)
    dim = probe.model.seq_dim(name)
    return () if dim is None else (dim,)


def _at_hand(
    shape: jax.ShapeDtypeStruct, dims: tuple[int, ...], num_tokens: int
) -> tuple[jax.ShapeDtypeStruct, int | None]:
    """Return the shape with `num_tokens` tokens, and their dim."""
    given = tuple(
        num_tokens if dim in dims else size for dim, size in enumerate(shape.shape)
    )
    return jax.ShapeDtypeStruct(given, shape.dtype), next(iter(dims), None)


def check_sequences(
    model: Model,
    layout: Layout,
    rules: Rules,
    batch: Mapping[str, Any],
    *,
    partly: bool = False,
) -> None:
    """Raise if a layout cannot split the sequences of a batch.

    Args:
        model: The model.
        layout: The layout, whose `context` splits sequences.
        rules: Rules, by which `context` may split space instead.
        batch: Arrays, or their shapes.
        partly: Whether outputs alone are wanted, of which padding is cut off.

    Raises:
        InputError: Sequences do not divide into its chunks, and cannot be padded.
    """
    order = token_order(layout)
    if order is None or not splits_tokens(model, layout, rules):
        return
    sizes: dict[int, tuple[str, int]] = {}
    for name, array in batch.items():
        for dim in sequence_dims(model, name, array):
            size = array.shape[dim]
            if size % order.num_chunks:
                _check_no_sums(model, order, batch, name, size, partly)
            if size % order.num_chunks and not partly:
                _check_padded(model, order, batch, name, dim, size)
            other, known = sizes.setdefault(order.padded(size), (name, size))
            if known != size:
                raise InputError(
                    f"batch[{name!r}] has sequences of {size} tokens and "
                    f"batch[{other!r}] of {known}: padded for {order.mesh_axis}="
                    f"{order.num_ranks} both have {order.padded(size)}, and could not "
                    "be told apart; pad one of them yourself",
                    key="batch.lengths_padded_alike",
                )


def _check_padded(
    model: Model,
    order: TokenOrder,
    batch: Mapping[str, Any],
    name: str,
    dim: int,
    size: int,
) -> None:
    what = _uneven(order, name, size)
    inputs = model.known_inputs
    axis = inputs[name].logical_axes[dim] if name in inputs else None
    weights = (inputs[given] for given in batch if given in inputs)
    if not any(one.is_weight and axis in one.logical_axes for one in weights):
        raise InputError(
            f"{what}, and no array weighs {axis!r}, so that padding would count; pad "
            "the batch yourself",
            key="batch.unweighted_padding",
        )
    names = tuple(given for given in batch if given in inputs)
    if _counts_tokens(model, names, order.padded(size)):
        raise InputError(
            f"{what}, and a sum of the head counts tokens by the shape of an array, in "
            "which padding would count; count them by the weights, or pad the batch "
            "yourself",
            key="batch.padding_in_count",
        )
    for group in model.groups:
        if group.auxiliary or group.changes_state:
            raise InputError(
                f"{what}, and block group {group.name!r} sums over tokens, in which "
                "padding would count; pad the batch yourself",
                key="batch.padding_in_block_sums",
            )


@functools.lru_cache(maxsize=32)
def _counts_tokens(model: Model, names: tuple[str, ...], num_tokens: int) -> bool:
    """Return True if a sum of the head counts tokens by the shape of an array."""
    probe = Probe(model=model, names=names)
    if what_joins(probe, num_tokens) is not None:
        return False
    return what_joins(replace(probe, counts=False), num_tokens) is not None


def _check_no_sums(
    model: Model,
    order: TokenOrder,
    batch: Mapping[str, Any],
    name: str,
    size: int,
    partly: bool,
) -> None:
    shapes = {
        given: jax.ShapeDtypeStruct(
            array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
        )
        for given, array in batch.items()
    }
    if _calls_sequence_sum(model, tuple(shapes.items()), partly):
        raise InputError(
            f"{_uneven(order, name, size)}, and a function of the model calls "
            "scope.sequence_sum, in which padding would count; pad the batch yourself, "
            "with weights of 0 that the function takes into account",
            key="batch.padding_in_sequence_sum",
        )


@functools.lru_cache(maxsize=32)
def _calls_sequence_sum(
    model: Model, batch: tuple[tuple[str, jax.ShapeDtypeStruct], ...], partly: bool
) -> bool:
    """Return True if a function of the model calls `Scope.sequence_sum`."""
    calls: list[str] = []
    shapes = dict(batch)
    once, *given = traced_forward(
        model, shapes, head=not partly, logits=partly, sequence_sums=calls
    )
    with tracing("the model cannot be traced for context"):
        jax.eval_shape(once, *given)
    return bool(calls)


def _uneven(order: TokenOrder, name: str, size: int) -> str:
    return (
        f"batch[{name!r}] has sequences of {size} tokens, which do not divide into the "
        f"{order.num_chunks} chunks of {order.mesh_axis}={order.num_ranks}"
    )
