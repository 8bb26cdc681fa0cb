"""Split sequences: the tokens of a batch on each device, and outputs in their order.

A batch arrives with whole sequences. Each device takes its own tokens of every array,
in the layout's order, so tokens, targets, weights and documents stay aligned and
nothing is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, Layout
from meshpar.model.contract import Model
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import traced_forward
from meshpar.parallel.placement import BATCH, Placement

SEGMENTS = "segment_ids"
"""The input with the number of each token's document; below 0 for padding."""


def token_order(layout: Layout) -> TokenOrder | None:
    """Return the order of tokens over a layout's devices; None for whole sequences.

    It is zigzag, which balances causal work, except for Ulysses, whose devices have
    whole sequences while they attend.
    """
    if layout.context == 1:
        return None
    how = layout.attention_method
    return TokenOrder(
        mesh_axis="context",
        num_ranks=layout.context,
        across=how.across,
        zigzag=how.groups > 1,
        heads=how.heads,
    )


def sequence_dims(model: Model, name: str, array: Any) -> tuple[int, ...]:
    """Return the dims of an array of a batch that are split over `context`.

    These are the dims whose logical axis is `seq` or ends with `_seq`.

    Raises:
        InputError: The model does not declare the array's dims.
    """
    if name not in model.known_inputs:
        if name in model.sequence_inputs:
            return (1,)
        if array.ndim < 2:
            return ()
        raise InputError(
            f"context splits sequences, but nothing says which dim of batch[{name!r}] "
            "has them; declare it in inputs=, as Input(('batch', 'seq')) if dim 1 does",
            key="model.unknown_token_dim",
        )
    axes = model.known_inputs[name].logical_axes
    return tuple(dim for dim, axis in enumerate(axes) if is_sequence(axis))


def is_sequence(logical_axis: str | None) -> bool:
    """Return True if a logical axis of a batch's arrays counts tokens.

    Example:
        >>> is_sequence("source_seq"), is_sequence("height")
        (True, False)
    """
    return logical_axis is not None and (
        logical_axis == "seq" or logical_axis.endswith("_seq")
    )


def own_tokens(
    placement: Placement, batch: Mapping[str, jax.Array], *, natural: bool = False
) -> tuple[dict[str, jax.Array], TokenOrder]:
    """Return this device's tokens of every array, and their order.

    The layout splits sequences. Those that do not divide are padded with tokens of
    weight 0.

    Args:
        placement: The model on its mesh.
        batch: This device's examples, with whole sequences.
        natural: Keep the order of the sequence, for outputs.
    """
    order = cast(TokenOrder, token_order(placement.layout))
    if natural:
        order = dataclasses.replace(order, zigzag=False)
    own, lengths = {}, {}
    for name, array in batch.items():
        dims = sequence_dims(placement.model, name, array)
        for dim in dims:
            size = array.shape[dim]
            lengths[order.padded(size)] = size
            array = order.own(_padded(array, dim, order.padded(size), name), dim)
        own[name] = array
    uneven = tuple((whole, size) for whole, size in lengths.items() if whole != size)
    return own, dataclasses.replace(order, lengths=uneven)


def _padded(array: jax.Array, dim: int, size: int, name: str) -> jax.Array:
    missing = size - array.shape[dim]
    if not missing:
        return array
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, missing)
    return jnp.pad(array, widths, constant_values=-1 if name == SEGMENTS else 0)


def outputs_in_order(
    placement: Placement, local: Callable[..., Any], given: tuple
) -> Any:
    """Return global outputs of `local`, with tokens in the order of the sequence.

    It sends nothing: outputs stay split over `context`.

    Args:
        placement: The model on its mesh.
        local: (params, model state, batch, step, seed) -> outputs of this device's
            tokens in natural order, inside `Placement.on_shards`.
        given: Its global arguments.
    """
    if not placement.splits_tokens:
        return placement.on_state(local, BATCH)(*given)
    batch = given[2]
    whole = _output_shapes(placement, batch, 1)
    split = _output_shapes(placement, batch, placement.layout.context)
    specs = jax.tree.map(_split_dims, whole, split)
    outputs = placement.on_state(local, specs)(*given)
    return jax.tree.map(
        lambda x, like: x[tuple(slice(size) for size in like.shape)], outputs, whole
    )


def _output_shapes(placement: Placement, batch: Any, parts: int) -> Any:
    """Return shapes of a model's outputs for a share of every sequence."""
    model, order = placement.model, token_order(placement.layout)
    order = dataclasses.replace(cast(TokenOrder, order), zigzag=False)

    def share(name: str, array: jax.Array) -> jax.ShapeDtypeStruct:
        dims = list(array.shape)
        for dim in sequence_dims(model, name, array) if parts > 1 else ():
            dims[dim] = order.padded(dims[dim]) // parts
        return jax.ShapeDtypeStruct(tuple(dims), array.dtype)

    shapes = {name: share(name, array) for name, array in batch.items()}
    # `TrainStep.logits` refuses a model without.
    return jax.eval_shape(*traced_forward(model, shapes, logits=True, training=False))


def _split_dims(whole: Any, split: Any) -> PartitionSpec:
    entries: list[Any] = [
        None if size == part else "context"
        for size, part in zip(whole.shape, split.shape, strict=True)
    ]
    entries[0] = BATCH_AXES
    return PartitionSpec(*entries)
