"""An MLP of many experts, of which each token goes to a few (Shazeer et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshpar import InputError, Scope
from meshpar.model.block_run import Sums
from meshpar.models.layers.attention import normal
from meshpar.models.layers.mlp import GatedMLP
from meshpar.models.layers.router import Router, RouterConfig, choose_experts
from meshpar.parallel.expert.experts import counted_mlp, routed_function, routed_mlp

FURTHER = ("further_rounds", "further_rows")
"""The sums of what was sent after the first round: rounds, of each token, and rows."""

AUXILIARY = ("load_balance", "router_z", "dropped", *FURTHER)
"""The sums of a routed MLP that are auxiliary losses; `dropped` counts assignments."""

_WHOLE = ("batch", "seq", "embed")


class RoutedMLP(nnx.Module):
    """Gated experts, and shared ones that every token goes to.

    Args:
        embed: Size of the stream.
        hidden: Hidden size of an expert.
        router: How tokens choose.
        shared: Shared experts, which are one MLP of so many times the size.
        init_std, out_std: Standard deviation of the initial weights, and of those of
            the output.
    """

    def __init__(
        self,
        embed: int,
        hidden: int,
        *,
        router: RouterConfig,
        shared: int,
        init_std: float,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.router = Router(embed, router, init_std=init_std, rngs=rngs)
        experts = router.experts
        self.gate_up = normal(
            (experts, embed, 2, hidden),
            init_std,
            ("experts", "embed", None, "mlp"),
            rngs=rngs,
        )
        self.down = normal(
            (experts, hidden, embed), out_std, ("experts", "mlp", "embed"), rngs=rngs
        )
        self.shared = (
            GatedMLP(
                embed, shared * hidden, init_std=init_std, out_std=out_std, rngs=rngs
            )
            if shared
            else None
        )

    def __call__(self, x: jax.Array, scope: Scope) -> tuple[jax.Array, Sums]:
        """(batch, seq, embed) -> the same, before it is constrained, and sums."""
        config = self.router.config
        whole = scope.constrain(x, _WHOLE)
        experts, weights, sums = self.router(whole, scope)
        shared = () if self.shared is None else (self.shared(x, scope),)
        y, further, shared = counted_mlp(
            (whole, experts, weights),
            (self.gate_up[...], self.down[...]),
            scope,
            num_experts=config.experts,
            most_rows=_most_rows(config, *x.shape[:2], scope),
            beside=shared,
        )
        y = sum(shared, y)
        rounds = further.rounds * math.prod(experts.shape[:2])
        return y, sums | dict(zip(FURTHER, (rounds, further.rows), strict=True))


def _most_rows(config: RouterConfig, batch: int, seq: int, scope: Scope) -> int | None:
    capacity = config.capacity(scope.seq_length(seq))
    if capacity is not None and scope.cache is not None:
        raise InputError(
            f"capacity_factor={config.capacity_factor} drops tokens by what follows "
            "them in their sequence, so that none can be generated one by one; build "
            "the model with capacity_factor=0, which drops none",
            key="generation.capacity_drops_tokens",
        )
    return None if capacity is None else batch * min(capacity, seq)


def route_tokens(
    x: jax.Array,
    router: jax.Array | tuple[jax.Array, jax.Array],
    kernels: Any,
    scope: Scope,
    *,
    top_k: int | None,
    function: Callable[[Any, jax.Array], jax.Array] | None,
) -> jax.Array:
    """Return the weighted results of each token's experts (`meshpar.experts`)."""
    here = _num_experts(kernels)
    if isinstance(router, tuple) is not (top_k is None):
        given = "a tuple" if isinstance(router, tuple) else "an array"
        raise InputError(
            f"experts: router is {given} and top_k={top_k}; give an array of logits "
            "and top_k, or a tuple (choices, weights) alone",
            key="model.wrong_expert_choices",
        )
    if isinstance(router, tuple):
        chosen, weights = (jnp.asarray(array) for array in router)
        num_experts = here * math.prod(map(lax.axis_size, scope.expert_axes))
    else:
        num_experts = router.shape[-1]
        config = RouterConfig(experts=num_experts, top_k=top_k)
        _, chosen, weights = choose_experts(router.astype(jnp.float32), config)
    if chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1]:
        raise InputError(
            f"experts: choices of shape {chosen.shape} and weights of shape "
            f"{weights.shape} for tokens of shape {x.shape}; give each token equally "
            "many of both, along the last dim",
            key="model.wrong_expert_choices",
        )
    tokens = x, chosen.astype(jnp.int32), weights.astype(jnp.float32)
    options = {"num_experts": num_experts, "distinct": top_k is not None}
    if function is not None:
        return routed_function(*tokens, kernels, scope, function=function, **options)
    return routed_mlp(*tokens, *_gate_up_and_down(kernels, x), scope, **options)


def _num_experts(kernels: Any) -> int:
    """Return the first dim of all arrays of a tree."""
    shapes = [jnp.shape(array) for array in jax.tree.leaves(kernels)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(
            f"experts: kernels has arrays of shapes {shapes}; give arrays whose first "
            "dim is the experts",
            key="model.wrong_expert_kernels",
        )
    return sizes.pop()


def _gate_up_and_down(kernels: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the arrays of gated experts from (gate, up, down)."""
    embed = x.shape[-1]
    shapes = [jnp.shape(array) for array in jax.tree.leaves(kernels)]
    experts, *_, hidden = shapes[0]
    wanted = [(experts, embed, hidden)] * 2 + [(experts, hidden, embed)]
    if not isinstance(kernels, tuple | list) or shapes != wanted:
        raise InputError(
            f"experts: kernels is a {type(kernels).__name__} of shapes {shapes} for "
            f"tokens of size {embed}; give (gate, up, down) of shapes (experts, "
            f"{embed}, hidden) twice and (experts, hidden, {embed}), or the function "
            "of one expert",
            key="model.wrong_expert_kernels",
        )
    gate, up, down = kernels
    return jnp.stack((gate, up), axis=2), down
