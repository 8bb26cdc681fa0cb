"""A model's functions of one microbatch, as the executor calls them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.collectives import Zero, follow, zero_on_parts
from meshpar.model.contract import Params
from meshpar.model.scope import Batch, Scope
from meshpar.parallel.block import Block
from meshpar.parallel.pipeline.ends import Shares
from meshpar.parallel.pipeline.executor import Work
from meshpar.parallel.pipeline.rank_stages import RankStages
from meshpar.parallel.pipeline.stages import Arrangement, only_group, part
from meshpar.parallel.placement import Placement
from meshpar.parallel.remat import keeps_stage_input
from meshpar.parallel.zero import Stored, is_stored, zero_from_all
from meshpar.rules.rules import auto_mesh_shape, spec_axes


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The embedding, stages and head of a model, for one microbatch at a time.

    Args:
        placement: The model on its mesh.
        arrangement: Which layers every rank has.
        weights: The ends' parameters for use.
        blocks: The blocks' as the loop takes them, (chunks, places, ...).
        end_gradients: Shapes of the ends' gradients, as they are added up.
        gradients: Of the blocks', (chunks, places, ...).
        batch: Arrays of (microbatches, examples, ...).
        key: What dropout derives from; None turns it off.
    """

    placement: Placement
    arrangement: Arrangement
    weights: Params
    blocks: Params
    end_gradients: Params
    gradients: Params
    batch: Batch
    key: jax.Array | None

    def work(self) -> Work:
        """What the executor runs for the loss and its gradients."""
        sums = jax.eval_shape(self._head, self.weights, self._share_shape(), 0)
        return self._work(self._loss, sums)

    def logits_work(self) -> Work:
        """What it runs for the logits of a single microbatch, in place of the sums."""

        def head(microbatch: jax.Array, last: jax.Array) -> tuple:
            share = self.shares.scatter(last, "head_scatter")
            logits = self.placement.model.logits(
                self.weights, share, self._share_scope(microbatch)
            )
            return logits, share, None, zero_on_parts(share, self.shares.spec)

        shape = jax.eval_shape(
            lambda share: self.placement.model.logits(
                self.weights, share, self._share_scope(0)
            ),
            self._share_shape(),
        )
        return self._work(head, shape)

    def _work(self, head: Any, sums: Any) -> Work:
        stages = self._stages()
        return Work(
            stage=stages.run,
            stage_keeping=stages.run_keeping,
            stage_gradient=stages.gradient,
            embed=self._embed,
            embed_gradient=self._embed_gradient,
            head=head,
            x=self._x,
            spec=self.shares.spec,
            gradients=self.gradients,
            end_gradients=self.end_gradients,
            loss_sums=sums,
            gradient_dtype=self.placement.gradient_dtype,
            auxiliary=tuple(stages.block.auxiliary),
        )

    @cached_property
    def shares(self) -> Shares:
        """How tokens are divided among the ranks."""
        placement, (_, seq, _) = self.placement, self._x.shape
        spec = placement.residual_spec(self._x.shape)
        sizes = auto_mesh_shape()
        parts = math.prod(sizes[axis] for axis in spec_axes(PartitionSpec(*spec[1:2])))
        num_ranks = placement.layout.stage
        return Shares(
            num_ranks=num_ranks,
            shared=placement.model.per_token and seq % (num_ranks * parts) == 0,
            seq=seq,
            spec=spec,
            parts=parts,
            sums_wide=placement.in_order,
        )

    @cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        def embed() -> jax.Array:
            inputs = self._inputs(0)
            scope = self.placement.scope(inputs)
            return self.placement.model.embed(self.weights, inputs["batch"], scope)

        return jax.eval_shape(embed)

    def _share_shape(self) -> jax.ShapeDtypeStruct:
        batch, seq, embed = self._x.shape
        num_shares = self.shares.num_ranks if self.shares.shared else 1
        return jax.ShapeDtypeStruct((batch, seq // num_shares, embed), self._x.dtype)

    def _inputs(self, microbatch: jax.Array | int) -> dict[str, Any]:
        batch = part(self.batch, microbatch)
        return {"batch": batch, **({} if self.key is None else {"key": self.key})}

    def _share_scope(
        self, microbatch: jax.Array | int, earlier: Zero | None = None
    ) -> Scope:
        inputs = self._inputs(microbatch)
        if earlier is not None:
            inputs["batch"] = {
                name: array + earlier.astype(array.dtype)
                for name, array in inputs["batch"].items()
            }
        if self.shares.shared:
            inputs["batch"] = self._share_of(inputs["batch"])
            inputs["positions"] = self.shares.positions()
            inputs["full_seq"] = self.shares.seq
        return self.placement.scope(inputs)

    def _share_of(self, batch: Batch) -> Batch:
        names = self.placement.model.sequence_inputs
        return {
            name: self.shares.of_sequence(array, f"batch[{name!r}]")
            if name in names
            else array
            for name, array in batch.items()
        }

    def _stages(self) -> RankStages:
        placement = self.placement
        group = only_group(placement.model)
        block = Block(
            group,
            stored=jax.tree.map(
                Stored.without_layers,
                placement.stored[group.name],
                is_leaf=is_stored,
            ),
            remat=placement.layout.remat,
            make_scope=placement.scope,
            padded=self.arrangement.padded,
            spec=self.shares.spec,
            in_order=placement.in_order,
        )
        return RankStages(
            block=block,
            blocks=self.blocks,
            arrangement=self.arrangement,
            inputs=self._inputs,
            keeps_input=keeps_stage_input(placement.layout.remat),
        )

    def _embed(self, microbatch: jax.Array, earlier: Zero | None) -> jax.Array:
        scope = self._share_scope(microbatch, earlier)
        share = self.placement.model.embed(self.weights, scope.batch, scope)
        return self.shares.gather(share, "embed_gather")

    def _embed_gradient(
        self, microbatch: jax.Array, first: jax.Array
    ) -> tuple[Params, tuple, Zero]:
        dx = self.shares.scatter(first, "embed_scatter")
        scope = self._share_scope(microbatch)
        _, vjp = jax.vjp(
            lambda weights: self.placement.model.embed(weights, scope.batch, scope),
            self.weights,
        )
        (gradients,) = vjp(jnp.where(self.shares.counts(), dx, 0))
        gradients, done = self._scattered(gradients, dx)
        return gradients, (), done

    def _scattered(self, gradients: Params, x: jax.Array) -> tuple[Params, Zero]:
        """The ends' gradients as they are added up, and 0 once they and `x` are there.

        GSPMD may have summed them by itself.
        """
        stored = self.placement.model.split(self.placement.stored)[0]
        there = zero_on_parts(x, self.shares.spec) + zero_from_all(stored, gradients)
        gradients, done = self.placement.scatter_ends(gradients, there)
        return gradients, there if done is None else done

    def _loss(self, microbatch: jax.Array, last: jax.Array) -> tuple:
        share = self.shares.scatter(last, "head_scatter")
        (loss_sum, weight_sum), vjp = jax.vjp(
            lambda weights, share: self._head(weights, share, microbatch),
            self.weights,
            share,
        )
        counts = self.shares.counts().astype(loss_sum.dtype)
        gradients, dy = vjp((counts, jnp.zeros_like(weight_sum)))
        gradients, done = self._scattered(gradients, dy)
        if self.placement.in_order:
            dy = follow(dy, done)
        dy = self.shares.gather(dy, "head_gather")
        sums = loss_sum * counts, weight_sum * counts
        return sums, dy, gradients, zero_on_parts(dy, self.shares.spec)

    def _head(
        self, weights: Params, share: jax.Array, microbatch: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        scope = self._share_scope(microbatch)
        return self.placement.model.head(weights, share, scope.batch, scope)
