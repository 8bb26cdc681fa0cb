"""Whether a model and a batch can be split along their sequences, before any runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.inputs import (
    BATCH_DIM,
    MissingInputError,
    logical_sizes,
    shapes_of,
)
from meshpar.model.token_mixing import mixes_tokens
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    run_on,
    traced_batch,
    traced_forward,
    tracing,
)
from meshpar.parallel.sequence import is_sequence, sequence_dims
from meshpar.parallel.sequence_lengths import check_sequences
from meshpar.parallel.space import splits_tokens
from meshpar.rules.rules import Rules

_TRACED_TOKENS = (16, 8, 4, 2)
"""Of the sequences that a model is traced on: the first that it takes."""


def check_context(model: Model, layout: Layout, rules: Rules) -> None:
    """Refuses a model that a layout cannot split along its sequences.

    Raises:
        InputError: A function mixes tokens, no input has any, or the heads do not
            divide over what Ulysses splits them over.
    """
    if not splits_tokens(model, layout, rules):
        return
    if layout.attention_method.heads > 1:
        _check_heads(model, layout, rules)
    check_token_wise(model)


def check_per_token(model: Model, layout: Layout) -> None:
    """Refuses a model that says of its ends what ranks rely on, and they do not do.

    Inputs with a dim that has neither a name nor a size cannot be traced before there
    is a batch; a model of those is taken at its word.

    Raises:
        InputError: `Model.per_token` is set, the ranks of a pipeline share the tokens
            of embed and head, and one of the two mixes them.
    """
    if layout.stage == 1 or not model.per_token or not _has_shapes(model):
        return
    try:
        found = tokens_joined(model, ends_only=True)
    except InputError as error:
        if isinstance(error.__cause__, MissingInputError):
            return  # Of an array that no input declares `Model.seq_dim` says so.
        raise
    if found is not None:
        raise InputError(
            "per_token=True says that embed and head treat every token by itself, so "
            f"that the {layout.stage} ranks of a pipeline have some tokens each, but "
            f"one of them does not: {found}; leave per_token out"
        )


def context_problems(
    model: Model, layout: Layout, rules: Rules, seq: int
) -> Iterator[str]:
    """Why a model or its sequences of `seq` tokens do not suit a layout."""
    if not splits_tokens(model, layout, rules):
        return
    try:
        check_context(model, layout, rules)
        check_sequences(model, layout, rules, traced_batch(model, 1, seq))
    except InputError as error:
        yield str(error)


def _check_heads(model: Model, layout: Layout, rules: Rules) -> None:
    sizes, trading = layout.mesh_shape, layout.attention_method.heads
    for path, parameter in model.flat_parameters().items():
        for name, size in zip(parameter.logical_axes, parameter.shape, strict=True):
            if name != "heads" or "heads" not in rules.table:
                continue
            split = math.prod(sizes[axis] for axis in rules.mesh_axes("heads"))
            if size % (split * trading):
                raise InputError(
                    f"attention={layout.attention} splits heads over "
                    f"{'context=' if trading == layout.context else ''}{trading}"
                    f"{f' x {split}' if split > 1 else ''}, which does not divide the "
                    f"{size} of {path}; take attention=ring or allgather, or another "
                    "context"
                )


def check_token_wise(model: Model) -> None:
    """Refuses a model whose functions mix tokens otherwise than by attention.

    Raises:
        InputError: No input has a sequence, or one has it in two dims; or a function
            mixes tokens, counts places from the first token at hand, or makes another
            sum than one over tokens.
    """
    _check_one_dim(model)
    if _fixed_tokens(model) is None and not _open_sequences(model):
        raise InputError(
            "context splits sequences, but no declared input has a dim of tokens "
            "(logical axis 'seq', or one that ends with '_seq'); set context=1"
        )
    found = tokens_joined(model)
    if found is not None:
        raise InputError(
            "context splits sequences, but a function of the model joins tokens "
            f"otherwise than by meshpar's attention: {found}; set context=1"
        )


def _check_one_dim(model: Model) -> None:
    """Refuses pairs of tokens, of which devices would have their own with their own."""
    for name, one in model.known_inputs.items():
        axes = [axis for axis in one.logical_axes if is_sequence(axis)]
        if len(axes) > 1:
            raise InputError(
                f"context splits sequences, but inputs[{name!r}] has them in several "
                f"dims, {' and '.join(map(repr, axes))}, and a device its own tokens' "
                "share of each; name one of the dims, and None those that stay whole, "
                "or set context=1"
            )


@functools.lru_cache(maxsize=32)
def tokens_joined(
    model: Model, *, cached: bool = False, ends_only: bool = False
) -> str | None:
    """Where a model joins tokens otherwise than by attention; None if nowhere.

    Its functions are traced, on no device, as the devices of a split sequence run them:
    with the inputs that a batch needs, and with those that it may have.

    Args:
        model: The model.
        cached: Whether attention is what a cache answers, not what devices share.
        ends_only: Whether embed and head alone are asked for.

    Raises:
        InputError: They cannot be traced.
    """
    fixed = _fixed_tokens(model)
    sizes = _TRACED_TOKENS if fixed is None else (fixed,)
    for num_tokens in sizes:
        try:
            mixes = functools.partial(_mixes, model, num_tokens, cached, ends_only)
            return mixes(()) or (mixes(_optional(model)) if _optional(model) else None)
        except InputError:  # longer than the model takes, perhaps
            if num_tokens == sizes[-1]:
                raise
    return None


def _has_shapes(model: Model) -> bool:
    """Whether each dim of the inputs, the examples apart, has a name or a size."""
    return not any(
        name is None and size is None
        for one in model.known_inputs.values()
        for name, size in zip(one.logical_axes, one.sizes, strict=True)
    )


def _open_sequences(model: Model) -> bool:
    return any(is_sequence(name) for name in logical_sizes(model.known_inputs))


def _fixed_tokens(model: Model) -> int | None:
    """Tokens of every batch's sequences, where the inputs say so."""
    sizes = {
        size
        for one in model.known_inputs.values()
        for name, size in zip(one.logical_axes, one.sizes, strict=True)
        if is_sequence(name) and size is not None
    }
    return max(sizes, default=None)


def _optional(model: Model) -> tuple[str, ...]:
    return tuple(name for name, one in model.known_inputs.items() if one.optional)


def _mixes(
    model: Model,
    num_tokens: int,
    cached: bool,
    ends_only: bool,
    optional: tuple[str, ...],
) -> str | None:
    """The operation of a model that mixes tokens; None if none does.

    Args:
        model: The model.
        num_tokens: Of the sequences that it is traced on.
        cached: As in `tokens_joined`.
        ends_only: As there.
        optional: The optional inputs that a batch has.
    """
    whole, share = (
        _Hand.of(model, num_tokens, at_hand, optional, cached, ends_only)
        for at_hand in (num_tokens, max(num_tokens // 2, 1))
    )
    params, state = one_layer_shapes(model), one_layer_state(model)
    axis = "stage" if ends_only else "context"
    with tracing(f"the model cannot be traced as devices of {axis!r} run it"):
        return mixes_tokens(
            whole.forward,
            num_tokens,
            whole.tokens,
            params,
            state,
            fewer=(share.forward, share.tokens),
            sums=True,
        )


@dataclass(frozen=True, kw_only=True)
class _Hand:
    """A model on the tokens that one device has of each sequence.

    Args:
        model: The model.
        order: In which a probe has them.
        batch: Name -> (shape, dim of its tokens or None).
        positions: Of the tokens.
        ends_only: Whether the blocks are left out.
    """

    model: Model
    order: TokenOrder
    batch: dict[str, tuple[jax.ShapeDtypeStruct, int | None]]
    positions: jax.ShapeDtypeStruct
    ends_only: bool

    @classmethod
    def of(
        cls,
        model: Model,
        seq: int,
        num_tokens: int,
        optional: tuple[str, ...],
        cached: bool,
        ends_only: bool,
    ) -> _Hand:
        """So many tokens of sequences of `seq`."""
        inputs = {
            name: replace(one, optional=False)
            for name, one in model.known_inputs.items()
            if not one.optional or name in optional
        }
        sizes = dict.fromkeys(logical_sizes(inputs), num_tokens)
        batch = {}
        for name, shape in shapes_of(inputs, {**sizes, BATCH_DIM: 3}).items():
            dims = sequence_dims(model, name, shape)
            given = tuple(
                num_tokens if dim in dims else size
                for dim, size in enumerate(shape.shape)
            )
            array = jax.ShapeDtypeStruct(given, shape.dtype)
            batch[name] = array, next(iter(dims), None)
        return cls(
            model=model,
            order=TokenOrder(
                mesh_axis="stage" if ends_only else "context",
                num_ranks=1,
                lengths=((num_tokens, seq),),
                cached=cached,
            ),
            batch=batch,
            positions=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
            ends_only=ends_only,
        )

    @property
    def tokens(self) -> list:
        """What `forward` is given first, with the dims of tokens."""
        return [self.batch, (self.positions, 0)]

    def forward(self, tokens: list, params: Any, state: Any) -> Any:
        """The sums of the model."""
        batch, positions = tokens
        order = replace(self.order, probe=positions)
        shapes = {name: shape for name, (shape, _) in self.batch.items()}
        once, *_ = traced_forward(
            self.model,
            shapes,
            head=True,
            ends_only=self.ends_only,
            run=run_on,
            order=order,
        )
        return once(params, state, batch)
