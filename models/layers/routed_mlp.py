"""An MLP of many experts, of which each token goes to a few (Shazeer et al. 2017)."""

from __future__ import annotations

import jax
from flax import nnx

from meshpar import InputError, Scope
from meshpar.model.block_run import Sums
from meshpar.models.layers.attention import normal
from meshpar.models.layers.mlp import GatedMLP
from meshpar.models.layers.router import Router, RouterConfig
from meshpar.parallel.expert.experts import routed_mlp

AUXILIARY = ("load_balance", "router_z", "dropped")
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
        y = routed_mlp(
            whole,
            experts,
            weights,
            self.gate_up[...],
            self.down[...],
            scope,
            num_experts=config.experts,
            most_rows=_most_rows(config, *x.shape[:2], scope),
        )
        if self.shared is not None:
            y = y + self.shared(x, scope)
        return y, sums


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
