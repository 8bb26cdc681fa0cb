"""Rematerialisation: what a block's backward recomputes instead of keeping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshpar.errors import InputError, nearest
from meshpar.layout import STAGE_REMATS
from meshpar.layout.residual_names import BLOCK_INPUT, ResidualNames, is_named
from meshpar.model.contract import Model
from meshpar.model.scope import SAVED_PREFIX, Scope
from meshpar.model.tracing import traced_batch, traced_forward, tracing
from meshpar.trace.walk import equations

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host that devices read and write by themselves."""


def rematerialised(
    block: Callable[[Any, jax.Array, Scope], Any], remat: str, *, looped: bool = True
) -> Callable[..., Any]:
    """`block` under a policy, as a function of (make_scope, params, x, known).

    `known` is what `make_scope` makes a scope of; `looped` says that a loop is around
    it: without one, XLA is kept from merging what is recomputed with the forward.

    `none` keeps every residual. `full` keeps the block's input only. `selective` keeps
    besides what the block named with `Scope.save` (Korthikanti et al. 2022, section 5:
    all but the inside of attention), `dots` the output of every matmul without batch
    dims. `save:a/b` keeps the residuals of those names, `offload:c` moves them to the
    host's memory and back; the block's input is one of them, `block_input`. `stage` and
    `stage_full` are `none` and `full` of a block: what keeps a stage's input alone runs
    its loop again.
    """
    remat = {"stage": "none", "stage_full": "full"}.get(remat, remat)

    def call(make_scope: Callable, params: Any, x: Any, known: Any) -> Any:
        scope = make_scope(known)
        # A user's own loop may have scopes of its own.
        if isinstance(scope, Scope) and (remat == "full" or is_named(remat)):
            scope = replace(scope, recomputed=True)
        return block(params, _named_input(x, remat), scope)

    if remat == "none":
        return call
    # Inside a loop XLA cannot merge the recomputation with the forward anyway.
    return jax.checkpoint(
        call, policy=_policy(remat), prevent_cse=not looped, static_argnums=(0,)
    )


def _named_input(x: Any, remat: str) -> Any:
    """The stream under its name, where a policy speaks of it."""
    if not is_named(remat) or BLOCK_INPUT not in ResidualNames.parse(remat).every:
        return x
    return jax.tree.map(lambda x: checkpoint_name(x, SAVED_PREFIX + BLOCK_INPUT), x)


def check_residual_names(model: Model, remat: str) -> None:
    """Refuses a policy that names residuals which the model's blocks do not.

    A model that cannot be traced on a batch of one token is left until it is traced on
    its own (`meshpar.parallel.blocks.check_names`).

    Raises:
        InputError: They do not; the message has the names that they do.
    """
    if not is_named(remat):
        return
    known = None
    with contextlib.suppress(InputError):
        known = residuals_of(model)
    if known is not None:
        refuse_unknown(remat, known)


def residuals_of(model: Model) -> tuple[str, ...]:
    """The names that a model's blocks give to residuals, in order.

    Raises:
        InputError: The model cannot be traced on a batch of one token.
    """
    with tracing("no residual's name can be found on a batch of one token"):
        return names_in(*traced_forward(model, traced_batch(model, 1, 1)))


def refuse_unknown(remat: str, known: Sequence[str]) -> None:
    """Refuses a policy of names (`save:`, `offload:`) that are not among the known.

    Raises:
        InputError: They are not.
    """
    for name in ResidualNames.parse(remat).every:
        if name not in (BLOCK_INPUT, *known):
            raise InputError(
                f"remat={remat}: no block names a residual {name!r} with Scope.save; "
                f"{nearest(name, set(known))}",
                key="layout.unknown_residual",
            )


def keeps_stage_input(remat: str) -> bool:
    """Whether a pipeline keeps nothing but the inputs of its stages."""
    return remat in STAGE_REMATS


def _policy(remat: str) -> Callable[..., Any] | None:
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
    if remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return None


def _is_saved(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name == "name" and params["name"].startswith(SAVED_PREFIX)


def names_in(function: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
    """The names that a function gives to residuals, in order; nothing is run."""
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
