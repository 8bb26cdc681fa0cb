"""Rematerialisation: what a block's backward recomputes instead of keeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from meshpar.layout import STAGE_REMATS
from meshpar.model import SAVED_PREFIX, Scope


def rematerialised(
    block: Callable[[Any, jax.Array, Scope], Any], remat: str
) -> Callable[..., Any]:
    """`block` under a policy, as a function of (make_scope, params, x, scope inputs).

    `none` keeps every residual. `full` keeps the block's input only. `selective` keeps
    what the block named with `Scope.save` (Korthikanti et al. 2022, section 5), `dots`
    the output of every matmul without batch dims. `stage` and `stage_full` are `none`
    and `full` of a block: what keeps a stage's input alone runs its loop again.
    """
    remat = {"stage": "none", "stage_full": "full"}.get(remat, remat)

    def call(make_scope: Callable, params: Any, x: jax.Array, inputs: Any) -> Any:
        return block(params, x, make_scope(inputs))

    if remat == "none":
        return call
    # Inside a loop XLA cannot merge the recomputation with the forward anyway.
    return jax.checkpoint(
        call, policy=_policy(remat), prevent_cse=False, static_argnums=(0,)
    )


def keeps_stage_input(remat: str) -> bool:
    """Whether a pipeline keeps nothing but the inputs of its stages."""
    return remat in STAGE_REMATS


def _policy(remat: str) -> Callable[..., Any] | None:
    if remat == "selective":
        return _is_named
    if remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return None


def _is_named(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name == "name" and params["name"].startswith(SAVED_PREFIX)
