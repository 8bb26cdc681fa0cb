"""Check before a run that a model and a batch can be split along their sequences.

A trace follows tokens through a model's functions (`meshpar.trace.token_mixing`), but
not through a derivative that a user wrote. A model with one runs once on whole
sequences and once on two devices that share them; both must give the same result.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.checks.halves import CANNOT_RUN, Cut, check_small, what_halves_change
from meshpar.checks.own_derivatives import own_derivatives
from meshpar.checks.sequence_probe import Probe, check_sequences, what_joins
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.layout.requirements import ATTENTION, Facts, problems
from meshpar.model.contract import Model
from meshpar.model.inputs import (
    BATCH_DIM,
    MissingInputError,
    input_shapes,
    logical_sizes,
)
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.parallel.grids.space import splits_tokens
from meshpar.parallel.sequence import is_sequence, sequence_dims
from meshpar.rules.rules import LogicalAxes, Rules

_TRACED_TOKENS = (16, 8, 4, 2)
"""Tokens of the sequences to trace a model on: the first number that it takes."""


def check_context(model: Model, layout: Layout, rules: Rules) -> None:
    """Raise if a layout that splits sequences cannot split a model along them.

    Raises:
        InputError: A function mixes tokens, no input has any, or the heads do not
            divide over what Ulysses splits them over.
    """
    if layout.attention_method.heads > 1:
        _check_heads(model, layout, rules)
    check_token_wise(model)


def check_per_token(model: Model, layout: Layout) -> None:
    """Raise if a model under stages declares `per_token` and its ends mix tokens.

    Inputs with a dim that has neither a name nor a size cannot be traced before there
    is a batch; such a model is not checked.

    Raises:
        InputError: `Model.per_token` is set, the ranks of a pipeline share the tokens
            of embed and head, and one of the two mixes them.
    """
    if not model.per_token or not _has_shapes(model):
        return
    try:
        found = tokens_joined(model, ends_only=True)
    except InputError as error:
        if isinstance(error.__cause__, MissingInputError):
            return  # Of an array that no input declares `Model.seq_dim` says so.
        raise
    if found is not None:
        raise InputError(
            "per_token=True says that embed and head treat each token separately, so "
            f"that the {layout.stage} ranks of a pipeline split the tokens, but "
            f"one of them does not: {found}; leave per_token out",
            key="model.per_token_joins_tokens",
        )


def context_errors(
    model: Model, layout: Layout, rules: Rules, seq: int
) -> Iterator[InputError]:
    """Yield the error if a model, or its sequences of `seq` tokens, do not suit it."""
    if not splits_tokens(model, layout, rules):
        return
    try:
        check_context(model, layout, rules)
        check_sequences(model, layout, rules, traced_batch(model, 1, seq))
    except InputError as error:
        yield error


def _check_heads(model: Model, layout: Layout, rules: Rules) -> None:
    if "heads" not in rules.table:
        return
    sizes = layout.mesh_shape
    shards = math.prod(sizes[axis] for axis in rules.mesh_axes("heads"))
    for path, parameter in model.flat_parameters().items():
        named = dict(zip(parameter.logical_axes, parameter.shape, strict=True))
        facts = Facts(
            layout=layout,
            heads=named.get("heads"),
            heads_in=path,
            head_shards=shards,
        )
        for problem in problems(facts, ATTENTION):
            raise problem.error()


def check_token_wise(model: Model) -> None:
    """Raise if functions of a model mix tokens otherwise than by attention.

    Raises:
        InputError: No input has a sequence, or one has it in two dims; or a function
            mixes tokens, counts places from the first token at hand, or makes another
            sum than one over tokens.
    """
    _check_one_dim(model)
    sizes = logical_sizes(model.known_inputs)
    if _fixed_tokens(model) is None and not any(map(is_sequence, sizes)):
        raise InputError(
            "context splits sequences, but no declared input has a dim of tokens "
            "(logical axis 'seq', or one that ends with '_seq'); set context=1",
            key="model.no_sequence_input",
        )
    found = tokens_joined(model)
    if found is not None:
        instead = "call meshpar.attend and meshpar.positions, or "
        raise InputError(
            "context splits sequences, but a function of the model joins tokens "
            f"by other means than meshpar's attention: {found}; "
            f"{instead if model.unflatten is not None else ''}set context=1",
            key="model.joins_tokens",
        )


def _check_one_dim(model: Model) -> None:
    """Raise if an input has several dims of tokens: a device would have few pairs."""
    for name, one in model.known_inputs.items():
        axes = [axis for axis in one.logical_axes if is_sequence(axis)]
        if len(axes) > 1:
            raise InputError(
                f"context splits sequences, but inputs[{name!r}] has them in several "
                f"dims, {' and '.join(map(repr, axes))}, and a device its own tokens' "
                "share of each; name one of the dims, and None those that stay whole, "
                "or set context=1",
                key="model.several_sequence_dims",
            )


@functools.lru_cache(maxsize=32)
def tokens_joined(
    model: Model, *, cached: bool = False, ends_only: bool = False
) -> str | None:
    """Return where a model joins tokens otherwise than by attention; None if nowhere.

    Its functions are traced, on no device, as the devices of a split sequence run them:
    with the required inputs, and with the optional ones too.

    Args:
        model: The model.
        cached: Whether a cache answers attention, as in generation.
        ends_only: Whether to check embed and head alone. Ranks of a pipeline share the
            dim `seq` alone; an operation that only may join tokens is allowed.

    Raises:
        InputError: They cannot be traced.
    """
    inputs = model.known_inputs
    needed = tuple(name for name, one in inputs.items() if not one.optional)
    probe = Probe(model=model, names=needed, cached=cached, ends_only=ends_only)
    found = _joined(probe)
    if found is None and len(needed) < len(inputs):
        found = _joined(replace(probe, names=tuple(inputs)))
    if found is None and not cached:
        backward = functools.partial(tokens_joined_backward, model, ends_only=ends_only)
        found = _on_few_tokens(probe, backward)
    return found


def check_logits_tokens(
    model: Model, layout: Layout, rules: Rules, names: Sequence[str]
) -> None:
    """Raise if `logits` joins tokens that devices share.

    Args:
        model: A model with `logits`.
        layout: The layout, which may split sequences.
        rules: Rules, by which `context` may split space instead.
        names: Names of the arrays of the batch.

    Raises:
        InputError: `logits` surely joins them, or gives a sum over tokens.
    """
    known = tuple(name for name in model.known_inputs if name in names)
    probe = Probe(model=model, names=known, of_logits=True)
    if splits_tokens(model, layout, rules):
        _check_probed(probe, f"layout {str(layout)!r} splits sequences")
    if layout.stage > 1 and model.per_token and _has_shapes(model):
        _check_probed(
            replace(probe, ends_only=True),
            f"per_token=True lets the {layout.stage} ranks of a pipeline share tokens",
        )


def _check_probed(probe: Probe, why: str) -> None:
    try:
        found = _joined(probe)
    except InputError as error:
        if isinstance(error.__cause__, MissingInputError):
            return  # The run reports it.
        raise
    if found is not None:
        raise InputError(
            f"{why}, but logits joins tokens, and a device has only some of them: "
            f"{found}; return each token's own, or use a layout with "
            f"{probe.mesh_axis}=1",
            key="model.logits_join_tokens",
        )


def _joined(probe: Probe) -> str | None:
    """Return what joins tokens in the first sequences that the model takes."""
    return _on_few_tokens(probe, functools.partial(what_joins, probe))


def _on_few_tokens(probe: Probe, asked: Callable[[int], str | None]) -> str | None:
    """Return the answer for the first number of tokens that the model takes."""
    fixed = _fixed_tokens(probe.model, ends_only=probe.ends_only)
    sizes = _TRACED_TOKENS if fixed is None else (fixed,)
    for num_tokens in sizes:
        try:
            return asked(num_tokens)
        except InputError:  # longer than the model takes, perhaps
            if num_tokens == sizes[-1]:
                raise
    return None


def _has_shapes(model: Model) -> bool:
    """Return True if each dim of the inputs has a name or a size."""
    return not any(
        name is None and size is None
        for one in model.known_inputs.values()
        for name, size in zip(one.logical_axes, one.sizes, strict=True)
    )


def _fixed_tokens(model: Model, *, ends_only: bool = False) -> int | None:
    """Return the number of tokens that the inputs fix; None if they leave it open."""
    sizes = {
        size
        for one in model.known_inputs.values()
        for name, size in zip(one.logical_axes, one.sizes, strict=True)
        if size is not None and (name == "seq" if ends_only else is_sequence(name))
    }
    return max(sizes, default=None)


_EXAMPLES = 4


@dataclass(frozen=True)
class _TokenCut(Cut):
    """Each of two devices has half of the tokens of every sequence.

    Args:
        dims: Name of each array of a batch -> dim of its tokens, or None.
        seq: Tokens of a sequence.
        ends_only: Whether the devices are ranks of a pipeline and share the ends.
    """

    dims: Mapping[str, int | None]
    seq: int
    ends_only: bool

    mesh_axis = "context"
    unit = "tokens"

    @property
    def fields(self) -> dict[str, Any]:
        if not self.ends_only:
            return {"order": TokenOrder(mesh_axis=self.mesh_axis, num_ranks=2)}
        half = self.seq // 2
        first = lax.axis_index(self.mesh_axis) * half
        places = first + jnp.arange(half, dtype=jnp.int32)
        return {"token_positions": places, "full_seq": self.seq}

    def dim(self, name: str) -> int | None:
        return self.dims[name]

    def stream_dim(self, logical_axes: LogicalAxes) -> int | None:
        dims = [dim for dim, axis in enumerate(logical_axes) if is_sequence(axis)]
        return dims[0] if dims else None

    def examples(self, numbers: jax.Array, parts: int) -> tuple[jax.Array, int | None]:
        return numbers, None


def tokens_joined_backward(
    model: Model, num_tokens: int, *, ends_only: bool = False
) -> str | None:
    """Return what changes when two devices share the tokens; None if nothing does.

    Only a model with a user-written derivative is run. If it is too large or cannot run
    on random numbers, a warning says that it is not checked.

    Args:
        model: A model whose trace has no function that joins tokens.
        num_tokens: Tokens of a sequence that it can be traced on.
        ends_only: Whether to check embed and head alone.
    """
    inputs = {k: one for k, one in model.known_inputs.items() if not one.optional}
    sizes = {**dict.fromkeys(logical_sizes(inputs), num_tokens), BATCH_DIM: _EXAMPLES}
    batch = input_shapes(inputs, sizes)
    with tracing("the model cannot be traced on whole sequences"):
        once, *shapes = traced_forward(model, batch, head=True, ends_only=ends_only)
        written = own_derivatives(jax.make_jaxpr(once)(*shapes))
    if not written:
        return None
    try:
        found = _in_halves(model, batch, num_tokens, ends_only)
    except CANNOT_RUN as error:
        names = ", ".join(repr(group.name) for group in model.groups)
        warnings.warn(
            f"the model of blocks {names} cannot run on halves of its sequences "
            f"({error}): its own derivative is not checked",
            stacklevel=2,
        )
        return None
    return found and f"{found}: see the derivative of your own at {written[0]}"


def _in_halves(
    model: Model, batch: Mapping[str, Any], num_tokens: int, ends_only: bool
) -> str | None:
    if num_tokens % 2:
        raise ValueError(f"{num_tokens} tokens are an odd number")
    check_small(model, batch)
    dims = {
        name: next(iter(sequence_dims(model, name, shape)), None)
        for name, shape in batch.items()
    }
    cut = _TokenCut(dims=dims, seq=num_tokens, ends_only=ends_only)
    return what_halves_change(model, batch, cut, ends_only=ends_only)
