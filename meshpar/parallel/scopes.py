"""What a model's functions see on a mesh: their scope, and how their stream lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.model.contract import RESIDUAL, Stream
from meshpar.model.inputs import Batch
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.tensor import shard_index
from meshpar.rules.rules import Rules, auto_mesh_shape, is_axes


@dataclass(frozen=True, kw_only=True)
class Scopes:
    """Makes scopes, inside `jax.shard_map` over the manual mesh axes.

    Args:
        rules: Logical axis -> mesh axes.
        platform: Kind of device.
        batch_axes: Mesh axes of size above 1 that split the batch.
        replica_axes: Mesh axes outside them that do too, for a replica each.
        num_microbatches: Parts that a device's share of the batch is run in.
        training: Whether a training step runs.
        order: Which tokens this device has; None where it has whole sequences.
    """

    rules: Rules
    platform: str
    batch_axes: tuple[str, ...]
    num_microbatches: int = 1
    training: bool = True
    order: TokenOrder | None = None
    replica_axes: tuple[str, ...] = ()

    def __call__(self, known: Mapping[str, Any], **shared: Any) -> Scope:
        """The scope that `known` arrays make; `shared` has what ranks share."""
        return Scope(
            rules=self.rules,
            batch=Batch(known["batch"]),
            layer=known.get("layer", -1),
            state=known.get("state", {}),
            examples=known["examples"],
            random=known["random"],
            training=self.training,
            batch_axes=shared.pop("batch_axes", self.batch_axes),
            num_microbatches=self.num_microbatches,
            platform=self.platform,
            order=self.order,
            cache=known.get("cache"),
            **shared,
        )

    def examples(self, batch: Any) -> jax.Array:
        """The index in the global batch of each of this device's examples, uint32."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        first = shard_index((*self.replica_axes, *self.batch_axes)) * rows
        return (first + jnp.arange(rows)).astype(jnp.uint32)


def stream_specs(axes: Any, stream: Stream, rules: Rules) -> Any:
    """How a group's stream lies over automatic mesh axes: a spec for each array.

    Of an array that nothing is said of it is empty, of others as long as its dims.

    Args:
        axes: Tree of logical axes (`BlockGroup.stream`), or None.
        stream: The arrays or their shapes, this device's examples.
        rules: Logical axis -> mesh axes.

    Raises:
        InputError: The stream is not the declared tree.
        RuleError: An array of it cannot be laid out.
    """
    _check_real(stream)
    if axes is None:
        return jax.tree.map(lambda x: _spec(_default(x, rules), x, rules), stream)
    declared = jax.tree.structure(axes, is_leaf=is_axes)
    if declared != jax.tree.structure(stream):
        raise InputError(
            f"the stream is declared as {axes}, but the functions make "
            f"{jax.tree.map(jnp.shape, stream)}; declare a tuple of logical axes for "
            "each of its arrays",
            key="model.stream_of_other_tree",
        )
    return jax.tree.map(
        lambda names, x: _spec(names, x, rules), axes, stream, is_leaf=is_axes
    )


def _check_real(stream: Stream) -> None:
    for path, x in jax.tree.leaves_with_path(stream):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise InputError(
                f"the stream holds {x.dtype}{x.shape} at "
                f"{jax.tree_util.keystr(path) or 'its root'}, but what flows between "
                "blocks has gradients; read integers from scope.batch",
                key="model.integer_stream",
            )


def _default(x: Any, rules: Rules) -> tuple[str | None, ...]:
    if len(x.shape) == 3 and "residual_seq" in rules.table:
        return RESIDUAL
    return ()


def _spec(names: tuple[str | None, ...], x: Any, rules: Rules) -> PartitionSpec:
    if not names:
        return PartitionSpec()
    return rules.spec(names, x.shape, mesh_shape=auto_mesh_shape(), path="stream")
