"""Check that the sequences of a batch divide over devices, or can be padded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from meshpar.checks.sequence_probe import Probe, what_joins
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import traced_forward, tracing
from meshpar.parallel.grids.space import splits_tokens
from meshpar.parallel.sequence import sequence_dims, token_order
from meshpar.rules.rules import Rules


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
