"""A user's own block, embedding and head, as the pipeline's core calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshpar.errors import InputError
from meshpar.machine.mesh import mesh_platform
from meshpar.model.contract import BlockGroup, Stream
from meshpar.parallel.blocks import Block, Known
from meshpar.parallel.pipeline.ends import Shares
from meshpar.parallel.pipeline.group_seams import Enter
from meshpar.parallel.pipeline.idle import mesh_hindrance
from meshpar.parallel.pipeline.stages import Arrangement
from meshpar.parallel.pipeline.user_arguments import stream_specs_of
from meshpar.parallel.zero import Stored
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
    """What `pipeline_value_and_grad` was given: `Functions` of the pipeline's core.

    Args:
        block: `(layer_params, x)`, or `(layer_params, x, at)` with an `At`, -> x.
        head: `(end_params, x, targets)` -> `(loss_sum, weight_sum)` or a mean.
        embed_inputs: `(end_params, inputs)` -> x; None where the input is x itself.
        mesh: The mesh.
        schedule: What every rank does.
        num_layers: Layers of all stages.
        token_arrays: Which arrays of inputs and targets have tokens in dim 1, where
            embed and head treat every token by itself; None where they do not.
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient.
        remat: What the backward recomputes (`Layout.remat`).
        x_spec: How x lies over automatic mesh axes, or a tree of that.
        block_stored: Tree of `Stored` of the blocks, stacked.
        end_stored: Tree of `Stored` of the ends.
    """

    block: Callable[..., Any]
    head_sums: Callable[..., Any]
    embed_inputs: Callable[[Any, Any], Stream] | None
    mesh: Mesh
    schedule: Schedule
    num_layers: int
    token_arrays: tuple[Any, Any] | None
    auxiliary: dict[str, float]
    remat: str
    x_spec: Any
    block_stored: Any
    end_stored: Any

    @property
    def group(self) -> BlockGroup:
        """The blocks under the model's contract."""
        return block_group(self.block, self.num_layers, self.auxiliary)

    @property
    def platform(self) -> str:
        """Of the mesh."""
        return mesh_platform(self.mesh)

    @property
    def keeps_together(self) -> str | None:
        """By the mesh."""
        return mesh_hindrance(self.mesh.shape, self.platform)

    def embed(self, weights: Any, known: Known, shares: Shares | None) -> Stream:
        """The first block's input, of a share."""
        inputs = self._share_of(known["inputs"], 0, "inputs", shares)
        return (
            inputs if self.embed_inputs is None else self.embed_inputs(weights, inputs)
        )

    def head(
        self, weights: Any, stream: Stream, known: Known, shares: Shares
    ) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights in fp32, of a share.

        Raises:
            InputError: The head returns neither two scalars nor one.
        """
        targets = self._share_of(known["targets"], 1, "targets", shares)
        found = self.head_sums(weights, stream, targets)
        pair = tuple(found) if isinstance(found, tuple | list) else (found,)
        shapes = [jnp.shape(value) for value in pair]
        if shapes not in ([()], [(), ()]):
            raise InputError(
                f"head returns arrays of shapes {shapes}; it must return a scalar, the "
                "mean loss, or two: the sum of the loss and the sum of its weights",
                key="model.head_not_scalars",
            )
        if len(pair) == 1:
            num_shares = 1 if shares.dim is None else shares.num_ranks
            pair = (pair[0] / num_shares, 1 / num_shares)
        loss_sum, weight_sum = (jnp.asarray(value, jnp.float32) for value in pair)
        return loss_sum, weight_sum

    def blocks(self, arrangement: Arrangement) -> Sequence[Block]:
        """The only group's layer; its scope is an `At`."""

        def place(known: Known) -> At:
            layer = jnp.maximum(known["layer"], 0)
            return At(layer, known["microbatch"], known["inputs"])

        stored = jax.tree.map(Stored.without_layers, self.block_stored)
        return [
            Block(
                self.group,
                stored=stored,
                remat=self.remat,
                make_scope=place,
                padded=arrangement.padded(0),
            )
        ]

    def enters(self) -> Sequence[Enter | None]:
        """There is one group."""
        return [None]

    def specs(self, group: int, stream: Stream) -> Any:
        """`x_spec`, a whole spec for each array of x.

        Raises:
            InputError: It is of another tree or more dims than x, or x holds integers.
        """
        return stream_specs_of(self.x_spec, stream)

    def shared_dims(self, *, of_embed: bool) -> tuple[int, ...]:
        """Tokens are shared where the user says so; not at all without."""
        is_x = of_embed and self.embed_inputs is None  # on every rank anyway
        return () if self.token_arrays is None or is_x else (1,)

    def differentiated(self, known: Known) -> Any:
        """The inputs."""
        return known["inputs"]

    def with_differentiated(self, known: Known, part: Any) -> Known:
        """A microbatch with other inputs."""
        return {**known, "inputs": part}

    def scatter_ends(self, gradients: Any) -> Any:
        """They are whole on every device."""
        return gradients

    def _share_of(
        self, tree: Any, argument: int, name: str, shares: Shares | None
    ) -> Any:
        if shares is None or shares.dim is None or self.token_arrays is None:
            return tree
        return jax.tree.map_with_path(
            lambda path, array, has_tokens: (
                shares.of(array, 1, name + jax.tree_util.keystr(path))
                if has_tokens
                else array
            ),
            tree,
            self.token_arrays[argument],
        )


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
