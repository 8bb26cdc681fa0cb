"""Rematerialisation: what a block's backward recomputes instead of keeping.

The hidden values of an MLP are its largest arrays, and its backward has several. If
the backward recomputes them anyway, `in_token_chunks` makes those of one chunk of
tokens after another, forward and backward, so that their memory does not grow with a
device's share of the sequence. Weights' gradients are added up over the chunks in fp32.
Reference: Bekman et al. 2025 (Arctic long sequence training), on tiled MLPs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import InputError, nearest
from meshpar.layout import STAGE_REMATS
from meshpar.layout.layout import BLOCK_INPUT, ResidualNames, is_named
from meshpar.model.block_run import HeadSums
from meshpar.model.contract import Model
from meshpar.model.scope import SAVED_PREFIX, Scope, named_residual
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.parallel import sizes
from meshpar.parallel.expert.rounds import RECEIVED
from meshpar.rules.rules import LogicalAxes, array_split, degree, ruled_degree
from meshpar.trace.walk import equations

HOST_MEMORY = "pinned_host"
"""JAX's name for host memory that devices access directly."""


def rematerialised(
    block: Callable[[Any, jax.Array, Scope], Any], remat: str, *, looped: bool = True
) -> Callable[..., Any]:
    """Apply a `remat` policy to a block: a function of (make_scope, params, x, arrays).

    `make_scope` makes a scope from `arrays`. Unless `looped` says that a loop
    contains the block, XLA is kept from merging recomputation with the forward.

    - `none` keeps every residual, `full` only the block's input and the rows that
      experts received from other devices, `save:block_input` not even those.
    - `selective` also keeps what the block names with `Scope.save` (Korthikanti et al.
      2022, section 5: all but the inside of attention).
    - `dots` keeps the output of every matmul without batch dims.
    - `save:a/b` keeps residuals by name, `offload:c` moves them to the host's memory
      and back; `block_input` names the block's input.
    - `stage` and `stage_full` are `none` and `full` for a block: the pipeline keeps
      only the inputs of stages and runs their loops again.
    """
    remat = {"stage": "none", "stage_full": "full"}.get(remat, remat)

    def call(make_scope: Callable, params: Any, x: Any, arrays: Any) -> Any:
        scope = make_scope(arrays)
        # A user's own loop may have scopes of its own.
        if isinstance(scope, Scope) and (remat == "full" or is_named(remat)):
            scope = replace(scope, recomputed=True)
        if is_named(remat) and BLOCK_INPUT in ResidualNames.parse(remat).every:
            x = jax.tree.map(lambda array: named_residual(array, BLOCK_INPUT), x)
        return block(params, x, scope)

    if remat == "none":
        return call
    # Inside a loop XLA cannot merge the recomputation with the forward anyway.
    return jax.checkpoint(
        call, policy=_policy(remat), prevent_cse=not looped, static_argnums=(0,)
    )


def run_head(
    model: Model, remat: str, ends: Any, stream: Any, scope: Scope
) -> HeadSums:
    """Return a head's sums; a head that is the whole loss is rematerialised as a block.

    Args:
        model: The model.
        remat: Policy of the layout.
        ends: Parameters outside the blocks.
        stream: Stream after the last block.
        scope: Scope of the head; its batch is the head's.
    """

    def head(ends: Any, stream: Any, scope: Scope) -> Any:
        return model.head_sums(ends, stream, scope.batch, scope)

    if model.has_blocks:
        return head(ends, stream, scope)
    run = rematerialised(head, remat, looped=False)
    return run(lambda _: scope, ends, stream, ())


def check_residual_names(model: Model, remat: str, seq: int = 1) -> None:
    """Refuse a policy that names residuals which the model's blocks do not give.

    A model that cannot be traced on one token, or on `seq`, is checked when it is
    traced on its own batch (`meshpar.parallel.blocks.check_names`).

    Raises:
        InputError: A name is unknown; the message has the known ones.
    """
    if not is_named(remat):
        return
    for tokens in dict.fromkeys((1, seq)):
        with contextlib.suppress(InputError):
            known = model_residual_names(model, tokens)
            break
    else:
        return
    refuse_unknown(remat, known)


def model_residual_names(model: Model, seq: int = 1) -> tuple[str, ...]:
    """Return the names that a model's blocks give to residuals, in order.

    Raises:
        InputError: The model cannot be traced on an example of `seq` tokens.
    """
    with tracing(f"no residual's name can be found on an example of {seq} tokens"):
        return names_in(*traced_forward(model, traced_batch(model, 1, seq)))


def refuse_unknown(remat: str, known: Sequence[str]) -> None:
    """Refuse a policy with names (`save:`, `offload:`) that are not among `known`.

    Raises:
        InputError: A name is unknown.
    """
    for name in ResidualNames.parse(remat).every:
        if name not in (BLOCK_INPUT, *known):
            raise InputError(
                f"remat={remat}: no block names a residual {name!r} with Scope.save; "
                f"{nearest(name, set(known))}",
                key="layout.unknown_residual",
            )


def keeps_stage_input(remat: str) -> bool:
    """Return True if a pipeline keeps only the inputs of its stages."""
    return remat in STAGE_REMATS


def _policy(remat: str) -> Callable[..., Any]:
    if is_named(remat):
        names = ResidualNames.parse(remat)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SAVED_PREFIX + name for name in names.save],
            names_which_can_be_offloaded=[
                SAVED_PREFIX + name for name in names.offload
            ],
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    if remat == "selective":
        return _is_saved
    received = jax.checkpoint_policies.save_only_these_names(RECEIVED)
    if remat == "dots":
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint_policies.save_from_both_policies(dots, received)
    return received


def _is_saved(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name == "name" and params["name"].startswith(SAVED_PREFIX)


def names_in(function: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
    """Return the names that a function gives to residuals, in order, by tracing it."""
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments
    )
    traced = jax.make_jaxpr(function)(*shapes)
    return tuple(
        dict.fromkeys(
            equation.params["name"].removeprefix(SAVED_PREFIX)
            for equation in equations(traced.jaxpr)
            if _is_saved(equation.primitive, **equation.params)
        )
    )


def in_token_chunks(
    function: Callable[[Any, jax.Array], jax.Array],
    weights: Any,
    x: jax.Array,
    scope: Scope,
    *,
    widest: tuple[int, ...],
    widest_axes: LogicalAxes,
) -> jax.Array:
    """Return `function(weights, x)`, run in chunks of tokens if that saves memory.

    It runs in chunks if its backward is recomputed anyway (`Scope.recomputed`) and its
    widest array would take more than `HIDDEN_BYTES` on a device. Nothing is computed
    more often, and no more bytes are sent, in as many collectives as there are chunks.
    If mesh axes split the sequence, as under sequence parallelism, it runs at once:
    its hidden values are split over them.

    Args:
        function: (weights, (batch, tokens, ...)) -> (batch, tokens, ...).
        weights: Tree of arrays.
        x: (batch, seq, ...).
        scope: Where the function runs.
        widest: Shape of the largest array that the function makes, (batch, seq, ...).
        widest_axes: Its logical axes.
    """
    num_chunks = _num_chunks(x, scope, widest, widest_axes)
    if num_chunks == 1:
        return function(weights, x)
    batch, seq = x.shape[:2]
    padded = jnp.pad(x, ((0, 0), (0, -seq % num_chunks), *((0, 0),) * (x.ndim - 2)))
    chunks = jnp.moveaxis(padded.reshape(batch, num_chunks, -1, *x.shape[2:]), 1, 0)
    # In fp32, so that the gradients of all chunks are added up in it.
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(wide: Any, chunk: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide, weights)
        return function(narrow, chunk)

    _, found = lax.scan(lambda _, chunk: (None, one(wide, chunk)), None, chunks)
    whole = jnp.moveaxis(found, 0, 1)
    return whole.reshape(batch, -1, *whole.shape[3:])[:, :seq]


def _num_chunks(
    x: jax.Array, scope: Scope, widest: tuple[int, ...], axes: LogicalAxes
) -> int:
    if not scope.recomputed:
        return 1
    if scope.rules is not None:
        names = [name for name in ("seq", "residual_seq") if name in scope.rules.table]
        if any(ruled_degree(scope.rules, name) > 1 for name in names):
            return 1
    seq = x.shape[1]
    num_shards = math.prod(map(degree, array_split(scope.rules, axes, widest)))
    bytes_here = math.prod(widest) * x.dtype.itemsize // num_shards
    return equal_chunks(min(-(-bytes_here // sizes.HIDDEN_BYTES), seq), seq)


def equal_chunks(least: int, num_tokens: int) -> int:
    """Return the number of chunks for tokens: the first from `least` that divides.

    Equal chunks need no padding. If no number below `2 * least` divides, it is `least`.

    Example:
        >>> equal_chunks(5, 12), equal_chunks(5, 11)
        (6, 5)
    """
    more = range(least, 2 * least)
    return next((num for num in more if num_tokens % num == 0), least)
