"""The functions of a model under the contract, as the pipeline's core calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from meshpar.model.contract import BlockGroup, Stream
from meshpar.model.inputs import split_gradient_inputs
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.parallel.blocks import Block, Known
from meshpar.parallel.pipeline.ends import STAGE, Shares
from meshpar.parallel.pipeline.group_seams import Enter
from meshpar.parallel.pipeline.idle import mesh_hindrance
from meshpar.parallel.pipeline.stages import Arrangement
from meshpar.parallel.placement import Placement, Scopes, stream_specs
from meshpar.parallel.program import one_layer


@dataclass(frozen=True, kw_only=True)
class ModelFunctions:
    """`Functions` of a model.

    Args:
        placement: The model on its mesh.
        scopes: What makes scopes.
        end_state: State of the ends.
    """

    placement: Placement
    scopes: Scopes
    end_state: Params

    @property
    def remat(self) -> str:
        """What the backward recomputes."""
        return self.placement.layout.remat

    @property
    def platform(self) -> str:
        """Of the mesh."""
        return self.placement.platform

    @property
    def keeps_together(self) -> str | None:
        """By the layout's mesh, and its ring of keys and values."""
        layout = self.placement.layout
        how = layout.attention_method
        if how.groups > 1 and how.across == "ring":
            return "keys and values are permuted over 'context'"
        return mesh_hindrance(self.placement.mesh.shape, self.platform)

    def embed(self, weights: Params, known: Known, shares: Shares | None) -> Stream:
        """`Model.embed` of a share."""
        scope = self._scope(known, shares)
        return self.placement.model.embed(weights, scope.batch, scope)

    def head(
        self, weights: Params, stream: Stream, known: Known, shares: Shares
    ) -> tuple[jax.Array, jax.Array]:
        """`Model.head` of a share."""
        scope = self._scope(self._without_inputs(known), shares)
        return self.placement.model.loss_sums(weights, stream, scope.batch, scope)

    def outputs(
        self, weights: Params, stream: Stream, known: Known, shares: Shares
    ) -> Any:
        """`Model.logits` of a share."""
        # `TrainStep.logits` refuses a model without.
        logits = cast(Callable[..., Any], self.placement.model.logits)
        known = self._without_inputs(known)
        return logits(weights, stream, self._scope(known, shares))

    def blocks(self, arrangement: Arrangement) -> Sequence[Block]:
        """A layer of each group, under the layout's remat."""
        model = self.placement.model
        _, stored = model.split(self.placement.stored)
        return [
            Block(
                group,
                stored=one_layer(stored[at]),
                remat=self.remat,
                make_scope=lambda known: self.scopes(self._without_inputs(known)),
                padded=arrangement.padded(at),
            )
            for at, group in enumerate(model.groups)
        ]

    def enters(self) -> Sequence[Enter | None]:
        """`BlockGroup.enter` of each group."""
        return [self._enter(group) for group in self.placement.model.groups]

    def specs(self, group: int, stream: Stream) -> Any:
        """How a group's stream lies over automatic mesh axes."""
        axes = self.placement.model.groups[group].stream
        return stream_specs(axes, stream, self.placement.rules)

    def shared_dims(self, *, of_embed: bool) -> tuple[int, ...]:
        """Tokens where the model allows it, then examples; none of a single rank.

        A head sums over examples, so that any rank can have any of them.
        """
        if self.placement.layout.stage == 1:
            return ()
        return (1, 0) if self.placement.model.per_token else (0,)

    def differentiated(self, known: Known) -> Any:
        """The inputs that have a gradient."""
        return split_gradient_inputs(self.placement.model.inputs, known["batch"])[1]

    def with_differentiated(self, known: Known, part: Any) -> Known:
        """A microbatch with other values of them."""
        return {**known, "batch": {**known["batch"], **part}}

    def scatter_ends(self, gradients: Params) -> Params:
        """As ZeRO adds them up."""
        return self.placement.scatter_ends(gradients)

    def _enter(self, group: BlockGroup) -> Enter | None:
        enter = group.enter
        if enter is None:
            return None
        return lambda weights, stream, known: enter(
            weights, stream, self._scope(self._without_inputs(known), None)
        )

    def _without_inputs(self, known: Known) -> Known:
        """What all but `embed` see."""
        batch, _ = split_gradient_inputs(self.placement.model.inputs, known["batch"])
        return {**known, "batch": batch}

    def _scope(self, known: Known, shares: Shares | None) -> Scope:
        """The scope outside the blocks, of this rank's share."""
        known = {**known, "state": self.end_state}
        if shares is None or shares.dim is None:
            return self.scopes(known)
        batch, model = known["batch"], self.placement.model
        if shares.dim == 0:
            share = {
                name: shares.of(array, 0, f"batch[{name!r}]")
                for name, array in batch.items()
            }
            examples = shares.of(known["examples"], 0, "examples")
            axes = (*self.scopes.batch_axes, STAGE)
            own = {**known, "batch": share, "examples": examples}
            return self.scopes(own, batch_axes=axes)
        outside, share = self.scopes(known), {}
        for name, array in batch.items():
            dim = model.seq_dim(name) if array.ndim > 1 else None
            share[name] = (
                array if dim is None else shares.of(array, dim, f"batch[{name!r}]")
            )
        return self.scopes(
            {**known, "batch": share},
            token_positions=outside.positions(shares.size)[shares.positions()],
            full_seq=outside.seq_length(shares.size),
        )
