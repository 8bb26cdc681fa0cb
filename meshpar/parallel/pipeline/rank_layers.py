"""The layers of a rank's stage, and the loops that an idle rank leaves out.

Every rank runs the same program, of each group as many places as the stage with most of
its layers; what differs from rank to rank is looked up in the arrangement's tables.

*Idle ranks.* A rank without a microbatch may skip its layers: then one rank runs its
layers while another is past them. A collective-permute there is a trap: XLA:CPU waits
in it for all devices, not for the pair, and computes wrong numbers or hangs. GSPMD
inserts some by itself. So a rank skips only if no active mesh axis is left to GSPMD,
and if the layers, forward and backward, are traced to have no permute and no collective
over `stage`. Otherwise it computes on zeros. `meshpar.audit` finds permutes in such a
loop of a compiled program nevertheless (hazard `divergent_permute`). Only on CPUs,
where virtual devices share the cores, and on accelerators of several kinds, where a
slow one has places for more layers than it is given: another accelerator has nothing
else to do, and a GPU copies the loop's condition to its host in every iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.hardware.platforms import platform_named
from meshpar.layout import MANUAL_AXES
from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel.blocks import (
    BACKWARD,
    FORWARD,
    Block,
    ScopeArrays,
    Stack,
    over_layers,
)
from meshpar.parallel.pipeline.crossing import STAGE
from meshpar.parallel.pipeline.stages import NO_LAYER, Arrangement, part
from meshpar.parallel.pipeline.work import At
from meshpar.trace.walk import collective_axes, equations

Fact = bool | jax.Array
"""A fact of this rank's stage; a plain boolean if it is the same for all stages."""


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """The layers of this rank's stages.

    Args:
        blocks: A layer of each group.
        params: Parameters of each group as stored, (chunks, places, ...).
        states: State of each group, (chunks, places, ...).
        arrangement: Which layers every rank has.
    """

    blocks: Sequence[Block]
    params: Sequence[Any]
    states: Sequence[Any]
    arrangement: Arrangement

    def stack(self, group: int, chunk: jax.Array) -> Stack:
        """Return the layers of a group in a stage of this rank."""
        first = sum(block.group.num_layers for block in self.blocks[:group])
        return Stack(
            block=self.blocks[group],
            shards=jax.tree.map(lambda x: _chunk(x, chunk), self.params[group]),
            state=jax.tree.map(lambda x: _chunk(x, chunk), self.states[group]),
            layers=layers_here(self.arrangement, group, chunk, first=first),
        )

    def num_layers(self, group: int, at: At) -> jax.Array:
        """Return how many layers of a group the rank runs; 0 while it is idle."""
        counts = np.count_nonzero(self.arrangement.layers[group] != NO_LAYER, axis=-1)
        own = jnp.asarray(counts, jnp.int32)[lax.axis_index(STAGE)]
        return jnp.where(at.is_active, _chunk(own, at.chunk), 0)

    def holds(self, group: int, chunk: jax.Array) -> Fact:
        """Return True if the stage has a layer of a group."""
        return _fact(self.arrangement.holds(group), chunk)

    def begins(self, group: int, chunk: jax.Array) -> Fact:
        """Return True if the stage has the first layer of a group."""
        return _fact(self.arrangement.begins(group), chunk)

    def ends(self, group: int, chunk: jax.Array) -> Fact:
        """Return True if the stage's last layer is of a group."""
        return _fact(self.arrangement.ends(group), chunk)


def layers_here(
    arrangement: Arrangement, group: int, chunk: jax.Array, *, first: int
) -> jax.Array:
    """Return a group's layers in a stage of this rank, counted over all groups.

    Args:
        arrangement: Which layers every rank has.
        group: Index of the group.
        chunk: Index among the rank's stages.
        first: The group's first layer.
    """
    layers = _chunk(
        jnp.asarray(arrangement.layers[group])[lax.axis_index(STAGE)], chunk
    )
    return jnp.where(layers >= 0, layers + first, layers) if first else layers


def _fact(table: np.ndarray, chunk: jax.Array) -> Fact:
    if table.all() or not table.any():
        return bool(table.all())
    return _chunk(jnp.asarray(table)[lax.axis_index(STAGE)], chunk)


def _chunk(value: jax.Array, chunk: jax.Array) -> jax.Array:
    if value.shape[0] == 1:
        return value[0]
    return part(value, chunk)


class Saved(NamedTuple):
    """Residuals that `keep_layers` wrote.

    Args:
        buffers: (slots, places, ...) of every residual of a layer.
        slot: The slot that it wrote.
        treedef: Tree of a layer's residuals.
    """

    buffers: list[jax.Array]
    slot: jax.Array
    treedef: Any


def run_layers(
    stack: Stack, x: Stream, arrays: ScopeArrays, num_layers: jax.Array
) -> tuple[Stream, Sums]:
    """Run `run_blocks` on the first `num_layers` places; sums of the others are 0."""

    def forward(x: Stream, place: jax.Array | int) -> tuple:
        weights, layer, of_layer = layer_at(stack, arrays, place)
        return stack.block.forward(weights, x, layer, of_layer), ()

    x, sums, _ = _forwards(stack, x, num_layers, forward, [], jnp.int32(0))
    return x, over_layers(stack.block, sums)


def keep_layers(
    stack: Stack,
    x: Stream,
    arrays: ScopeArrays,
    num_layers: jax.Array,
    saved: list[jax.Array],
    slot: jax.Array,
) -> tuple[Stream, Sums, list[jax.Array]]:
    """Run `run_layers` and write what `backward_layers` needs into a slot of `saved`.

    `saved` has (slots, places, ...) for every residual of a layer.
    """

    def forward(x: Stream, place: jax.Array | int) -> tuple:
        weights, layer, of_layer = layer_at(stack, arrays, place)
        return stack.block.forward_keeping(weights, x, layer, of_layer)

    with jax.named_scope(FORWARD):
        x, sums, saved = _forwards(stack, x, num_layers, forward, saved, slot)
    return x, over_layers(stack.block, sums), saved


def backward_layers(
    stack: Stack,
    saved: Saved,
    dx: Stream,
    arrays: ScopeArrays,
    num_layers: jax.Array,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float,
) -> tuple[Stream, Any]:
    """Run `run_backward` on the places that `keep_layers` ran."""

    def one(carry: tuple, done: jax.Array) -> tuple:
        dx, totals = carry
        place = num_layers - 1 - done
        weights, layer, of_layer = layer_at(stack, arrays, place)
        residuals = saved_residuals(saved, place)
        gradients, dx = stack.block.backward(
            weights, residuals, dx, of_loss, layer, of_layer
        )
        return dx, add(totals, stack.block.reduce(gradients), place)

    with jax.named_scope(BACKWARD):
        return for_places(stack, num_layers, one, (dx, totals))


def saved_residuals(saved: Saved, place: jax.Array) -> Any:
    """Return the residuals of the layer at one place."""
    kept = []
    for buffer in saved.buffers:
        start = [saved.slot, place, *[jnp.int32(0)] * (buffer.ndim - 2)]
        shape = buffer.shape[2:]
        kept.append(lax.dynamic_slice(buffer, start, (1, 1, *shape)).reshape(shape))
    return jax.tree.unflatten(saved.treedef, kept)


def layer_at(
    stack: Stack, arrays: ScopeArrays, place: jax.Array | int
) -> tuple[Any, jax.Array, ScopeArrays]:
    """Return a layer's gathered parameters, its index, and its scope's arrays."""
    shard, state, layer = part(stack.xs, place)
    return stack.block.gather(shard), layer, arrays._replace(state=state)


def _forwards(
    stack: Stack,
    x: Stream,
    num_layers: jax.Array,
    forward: Callable[[Stream, jax.Array | int], tuple],
    saved: list[jax.Array],
    slot: jax.Array,
) -> tuple[Stream, Sums, list[jax.Array]]:
    """Run `forward` on so many places, their residuals written to a slot of `saved`.

    Returns the stream, the sums of each place, and the buffers.
    """

    def one(carry: tuple, place: jax.Array) -> tuple:
        x, sums, saved = carry
        (x, found), residuals = forward(x, place)
        sums = jax.tree.map(lambda of, one: of.at[place].set(one), sums, found)
        saved = [
            buffer.at[slot, place].set(value)
            for buffer, value in zip(saved, jax.tree.leaves(residuals), strict=True)
        ]
        return x, sums, saved

    sums = jax.tree.map(
        lambda one: jnp.zeros((len(stack.layers), *one.shape), one.dtype),
        jax.eval_shape(lambda x: forward(x, 0)[0][1], x),
    )
    return for_places(stack, num_layers, one, (x, sums, saved))


def for_places(
    stack: Stack,
    num_layers: jax.Array,
    one: Callable[[Any, jax.Array], Any],
    carry: Any,
) -> Any:
    """Run `one` on the first `num_layers` places.

    A `while_loop`, as `lax.cond` copies on GPUs what it hands through: residuals and
    gradients are written where they stay.
    """
    num_places = len(stack.layers)

    def goes_on(carry: tuple) -> jax.Array:
        # The constant tells the audit how often the loop runs at most.
        return (carry[0] < num_places) & (carry[0] < num_layers)

    return lax.while_loop(
        goes_on,
        lambda carry: (carry[0] + 1, one(carry[1], carry[0])),
        (jnp.int32(0), carry),
    )[1]


_PERMUTES = ("ppermute", "pgather")


def mesh_hindrance(
    mesh_shape: Mapping[str, int], platform: str, device_kinds: int = 1
) -> str | None:
    """Return why idle ranks of a mesh compute on zeros; None if the layers decide.

    Args:
        mesh_shape: Size of each mesh axis.
        platform: Platform of its devices.
        device_kinds: Number of their kinds.

    Example:
        >>> mesh_hindrance({"data": 2, "stage": 4, "tensor": 1}, "cpu")
        >>> mesh_hindrance({"stage": 4, "tensor": 2}, "cpu")
        "GSPMD partitions over 'tensor', and may permute there"
        >>> mesh_hindrance({"stage": 4}, "gpu")
        'a gpu has nothing else to do, and would wait for its host'
        >>> mesh_hindrance({"stage": 4}, "gpu", device_kinds=2)
    """
    if not platform_named(platform).is_host and device_kinds == 1:
        return f"a {platform} has nothing else to do, and would wait for its host"
    return partitioning_hindrance(mesh_shape)


def partitioning_hindrance(mesh_shape: Mapping[str, int]) -> str | None:
    """Return that GSPMD partitions a mesh and over which axes; None if it does not."""
    automatic = [
        axis
        for axis, size in mesh_shape.items()
        if size > 1 and axis not in MANUAL_AXES
    ]
    if automatic:
        axes = " and ".join(map(repr, automatic))
        return f"GSPMD partitions over {axes}, and may permute there"
    return None


def layers_hindrance(stack: Stack, x: Any, arrays: ScopeArrays) -> str | None:
    """Return the collective of these layers that idle ranks cannot skip, or None.

    Args:
        stack: The layers.
        x: Shapes of the stream that they take.
        arrays: What scopes are made of.
    """

    def one_layer(x: Any, dx: Any) -> Any:
        shard, state, layer = jax.tree.map(lambda value: value[0], stack.xs)
        layer_arrays = arrays._replace(state=state)
        block, weights = stack.block, stack.block.gather(shard)
        forward, residuals = block.forward_keeping(weights, x, layer, layer_arrays)
        gradients, dx = block.backward(weights, residuals, dx, 1.0, layer, layer_arrays)
        return forward, block.reduce(gradients), dx

    for equation in equations(jax.make_jaxpr(one_layer)(x, x).jaxpr):
        name, axes = equation.primitive.name, collective_axes(equation)
        if name in _PERMUTES or STAGE in axes:
            return f"{name} over {' and '.join(map(repr, axes))}"
    return None


def warn_idle_ranks(group: str, hindrance: str) -> None:
    """Warn that idle ranks compute on zeros because of a collective in the layers."""
    warnings.warn(
        f"the pipeline's group {group!r} has a {hindrance}, which must not run on some "
        "ranks alone, so idle ranks compute on zeros for (stages - 1) ticks of each "
        "pass; move it to embed or head to save them",
        stacklevel=2,
    )
