"""A user's own block, embedding and head, for one microbatch at a time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshpar.collectives import Zero, follow, zero_on_parts
from meshpar.errors import InputError
from meshpar.mesh import platform_of
from meshpar.model.contract import BlockGroup
from meshpar.parallel.block import Block
from meshpar.parallel.pipeline.ends import STAGE, Shares
from meshpar.parallel.pipeline.float_leaves import (
    differentiable,
    split_floats,
)
from meshpar.parallel.pipeline.rank_stages import RankStages
from meshpar.parallel.pipeline.stages import Arrangement, part
from meshpar.parallel.pipeline.user_arguments import check_x_dims
from meshpar.parallel.pipeline.work import Work
from meshpar.parallel.remat import keeps_stage_input
from meshpar.parallel.zero import Stored, is_stored, zero_from_all
from meshpar.rules.rules import spec_axes
from meshpar.schedules import Schedule


class At(NamedTuple):
    """Where a block runs.

    Args:
        layer: Index of its layer, int32.
        microbatch: Index of the microbatch within this device's part of the batch.
        inputs: That microbatch of the pipeline's input, without gradient.
    """

    layer: jax.Array
    microbatch: jax.Array
    inputs: Any


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """What `pipeline_value_and_grad` was given, as the executor's work needs it.

    Args:
        block: `(layer_params, x)`, or `(layer_params, x, at)` with an `At`, -> x.
        head: `(end_params, x, targets)` -> `(loss_sum, weight_sum)` or a mean.
        embed: `(end_params, inputs)` -> x; None where the input is x itself.
        mesh: The mesh.
        schedule: What every rank does.
        token_arrays: Which arrays of inputs and targets have tokens in dim 1, where
            embed and head treat every token by itself; None where they do not.
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient.
        remat: What the backward recomputes (`Layout.remat`).
        x_spec: How x lies over automatic mesh axes.
        block_stored: Tree of `Stored` of the blocks, stacked.
        end_stored: Tree of `Stored` of the ends.
    """

    block: Callable[..., jax.Array]
    head: Callable[..., Any]
    embed: Callable[[Any, Any], jax.Array] | None
    mesh: Mesh
    schedule: Schedule
    token_arrays: tuple[Any, Any] | None
    auxiliary: dict[str, float]
    remat: str
    x_spec: PartitionSpec
    block_stored: Any
    end_stored: Any

    @property
    def in_order(self) -> bool:
        """Whether collectives wait for one another (`meshpar.collectives`)."""
        return platform_of(self.mesh) == "cpu"

    def first(self, ends: Any, inputs: Any) -> jax.Array:
        """The first block's input."""
        return inputs if self.embed is None else self.embed(ends, inputs)

    def sums(
        self, ends: Any, x: jax.Array, targets: Any, *, num_shares: int
    ) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights in fp32, of one of the shares of a microbatch.

        Raises:
            InputError: The head returns neither two scalars nor one.
        """
        found = self.head(ends, x, targets)
        pair = tuple(found) if isinstance(found, tuple | list) else (found,)
        shapes = [jnp.shape(value) for value in pair]
        if shapes not in ([()], [(), ()]):
            raise InputError(
                f"head returns arrays of shapes {shapes}; it must return a scalar, the "
                "mean loss, or two: the sum of the loss and the sum of its weights"
            )
        if len(pair) == 1:
            pair = (pair[0] / num_shares, 1 / num_shares)
        loss_sum, weight_sum = (jnp.asarray(value, jnp.float32) for value in pair)
        return loss_sum, weight_sum


def block_group(
    block: Callable[..., Any], num_layers: int, auxiliary: dict[str, float]
) -> BlockGroup:
    """The block under the model's contract, its scope an `At`."""
    wanted = [
        parameter
        for parameter in inspect.signature(block).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]

    def without_place(params: Any, x: jax.Array, _: Any) -> Any:
        return block(params, x)

    return BlockGroup(
        name="blocks",
        num_layers=num_layers,
        block=block if len(wanted) > 2 else without_place,
        auxiliary=auxiliary,
    )


@dataclass(frozen=True, kw_only=True)
class UserMicrobatches:
    """A user's embedding, stages and head, for one microbatch at a time.

    Args:
        functions: What they are.
        arrangement: Which layers every rank has.
        blocks: The blocks' parameters, (chunks, places, ...).
        ends: The parameters of embedding and head.
        inputs: Arrays of (microbatches, examples, ...).
        targets: The same of the head's.
    """

    functions: UserFunctions
    arrangement: Arrangement
    blocks: Any
    ends: Any
    inputs: Any
    targets: Any

    def work(self) -> Work:
        """What the executor runs."""
        stages = self._stages()
        return Work(
            stage=stages.run,
            stage_keeping=stages.run_keeping,
            stage_gradient=stages.gradient,
            embed=self._embed,
            embed_gradient=self._embed_gradient,
            head=self._loss,
            x=self._x,
            spec=self.shares.spec,
            gradients=self.blocks,
            end_gradients=self.ends,
            loss_sums=(jax.ShapeDtypeStruct((), jnp.float32),) * 2,
            gradient_dtype=jnp.float32,
            inputs=differentiable(self.inputs),
            auxiliary=tuple(self.functions.auxiliary),
        )

    @cached_property
    def shares(self) -> Shares:
        """How tokens are divided among the ranks; not at all without `token_arrays`."""
        given, shape = self.functions, self._x.shape
        check_x_dims(given.x_spec, shape)
        whole = (*given.x_spec, *(None,) * (len(shape) - len(given.x_spec)))
        of_seq = spec_axes(PartitionSpec(*whole[1:2]))
        parts = math.prod(given.mesh.shape[mesh_axis] for mesh_axis in of_seq)
        num_ranks = given.schedule.num_ranks
        seq = shape[1] if len(shape) > 1 else 0
        return Shares(
            num_ranks=num_ranks,
            shared=given.token_arrays is not None
            and seq > 0
            and seq % (num_ranks * parts) == 0,
            seq=seq,
            spec=PartitionSpec(*whole) if any(whole) else PartitionSpec(),
            parts=parts,
            sums_wide=given.in_order,
        )

    @cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        x = jax.eval_shape(self.functions.first, self.ends, part(self.inputs, 0))
        if not isinstance(x, jax.ShapeDtypeStruct):
            raise InputError(
                f"blocks take one array, but the pipeline's input is {x}; give embed=, "
                "which makes it one"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(
                f"blocks take a floating-point x, but the pipeline's input is {x.dtype}"
                f"{x.shape}; give embed=, which makes it one"
            )
        return x

    def _stages(self) -> RankStages:
        given = self.functions

        def inputs(microbatch: jax.Array) -> dict[str, Any]:
            kept = lax.stop_gradient(part(self.inputs, microbatch))
            return {"inputs": kept, "microbatch": jnp.asarray(microbatch)}

        def place(inputs: dict[str, Any]) -> At:
            layer = jnp.maximum(inputs["layer"], 0)
            return At(layer, inputs["microbatch"], inputs["inputs"])

        num_layers = int(self.arrangement.layers.max()) + 1
        block = Block(
            block_group(given.block, num_layers, given.auxiliary),
            stored=jax.tree.map(
                Stored.without_layers, given.block_stored, is_leaf=is_stored
            ),
            remat=given.remat,
            make_scope=place,
            padded=self.arrangement.padded,
            spec=self.shares.spec,
            in_order=given.in_order,
        )
        return RankStages(
            block=block,
            blocks=self.blocks,
            arrangement=self.arrangement,
            inputs=inputs,
            keeps_input=keeps_stage_input(given.remat),
        )

    def _embed(self, microbatch: jax.Array, earlier: Zero | None) -> jax.Array:
        inputs = part(self.inputs, microbatch)
        if self.functions.embed is None:
            return inputs
        inputs = jax.tree.map(lambda array: _follow(array, earlier), inputs)
        share = self.functions.embed(self.ends, self._share_of_inputs(inputs))
        return self.shares.gather(share, "embed_gather") if self._shared else share

    def _embed_gradient(
        self, microbatch: jax.Array, first: jax.Array
    ) -> tuple[Any, Any, Zero]:
        embed, inputs = self.functions.embed, part(self.inputs, microbatch)
        if embed is None:
            nothing = jax.tree.map(jnp.zeros_like, self.ends)
            return nothing, [first], zero_on_parts(first, self.shares.spec)
        floats, filled = split_floats(inputs)
        _, vjp = jax.vjp(
            lambda ends, floats: embed(ends, self._share_of_inputs(filled(floats))),
            self.ends,
            floats,
        )
        dx = self.shares.scatter(first, "embed_scatter") if self._shared else first
        ends, floats = self._where_counts(vjp(dx), stage=0)
        return ends, floats, self._done(dx, ends)

    def _loss(self, microbatch: jax.Array, last: jax.Array) -> tuple:
        share = self.shares.scatter(last, "head_scatter") if self._shared else last
        targets = self._share_of_targets(part(self.targets, microbatch))
        num_shares = self.shares.num_ranks if self._shared else 1
        sums, vjp = jax.vjp(
            lambda ends, share: self.functions.sums(
                ends, share, targets, num_shares=num_shares
            ),
            self.ends,
            share,
        )
        gradients, dy = vjp((jnp.ones(()), jnp.zeros(())))
        last_stage = self.functions.schedule.num_stages - 1
        sums, gradients = self._where_counts((sums, gradients), stage=last_stage)
        if self.functions.in_order:
            dy = follow(dy, self._done(dy, gradients))
        if self._shared:
            dy = self.shares.gather(dy, "head_gather")
        return sums, dy, gradients, zero_on_parts(dy, self.shares.spec)

    @property
    def _shared(self) -> bool:
        return self.shares.shared

    def _where_counts(self, tree: Any, *, stage: int) -> Any:
        """What a rank finds at one end: all ranks share it, or that stage's has it."""
        if self._shared:
            return tree
        here = lax.axis_index(STAGE) == self.functions.schedule.rank_of_stage[stage]
        return jax.tree.map(lambda value: jnp.where(here, value, 0), tree)

    def _done(self, x: jax.Array, gradients: Any) -> Zero:
        """0, once these are there: GSPMD may sum gradients of the ends by itself."""
        stored = self.functions.end_stored
        return zero_on_parts(x, self.shares.spec) + zero_from_all(stored, gradients)

    def _share_of_inputs(self, inputs: Any) -> Any:
        return self._share_of(inputs, 0, "inputs") if self._shared else inputs

    def _share_of_targets(self, targets: Any) -> Any:
        return self._share_of(targets, 1, "targets") if self._shared else targets

    def _share_of(self, tree: Any, argument: int, name: str) -> Any:
        return jax.tree.map_with_path(
            lambda path, array, has_tokens: (
                self.shares.of_sequence(array, name + jax.tree_util.keystr(path))
                if has_tokens
                else array
            ),
            tree,
            self.functions.token_arrays[argument],
        )


def _follow(array: jax.Array, earlier: Zero | None) -> jax.Array:
    if earlier is None or not jnp.issubdtype(array.dtype, jnp.number):
        return array
    return follow(array, earlier)
