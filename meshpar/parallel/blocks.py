"""One layer of a group of blocks, and the loop over layers, forward and backward.

The forward keeps each layer's residuals without its parameters; the backward gathers
the parameters again and reduce-scatters their gradients, layer by layer. So a split
parameter is whole for one layer at a time only, and is gathered once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layout.layout import is_named
from meshpar.model.block_run import Sums
from meshpar.model.contract import BlockGroup, Stream
from meshpar.parallel.remat import names_in, refuse_unknown, rematerialised
from meshpar.parallel.zero import Stored, gather_shards, in_loop, reduce_in_loop


class ScopeArrays(NamedTuple):
    """Arrays without gradient that the scope of a model's functions is made of.

    Args:
        batch: Arrays of the batch by name.
        cache: Cache of a generation; None in training.
        examples: Index of each example in the global batch.
        layer: Index of the layer; None outside the blocks.
        microbatch: Index of the microbatch in a pipeline.
        random: Key of the step's randomness.
        state: State of the layer, or of the functions outside the blocks.
    """

    batch: Any
    cache: Any = None
    examples: jax.Array | None = None
    layer: jax.Array | int | None = None
    microbatch: jax.Array | None = None
    random: jax.Array | None = None
    state: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """Residuals that must be kept, and the places of known arrays among them."""

    kept: list[jax.Array]
    treedef: Any = field(metadata={"static": True})
    known_at: tuple[int | None, ...] = field(metadata={"static": True})


def vjp_without(
    function: Callable[..., Any],
    differentiated: Sequence[Any],
    known: Any,
    *,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Return `function(*differentiated)` and its residuals without arrays in `known`.

    `jax.vjp` keeps an argument that the backward needs as that very array, so arrays in
    `known` are recognised by identity.

    Args:
        function: Arrays -> a tree of arrays; it may close over arrays.
        differentiated: Its arguments.
        known: Tree of arrays that `restore_vjp` will be given again.
        has_aux: True if the function returns a pair, its second without gradient.

    Returns:
        The value, the residuals, and with `has_aux` the second of the pair.
    """
    value, vjp, *others = jax.vjp(  # type: ignore[call-overload]  # knows literals only
        function, *differentiated, has_aux=has_aux
    )
    leaves, treedef = jax.tree.flatten(vjp)
    place = {id(array): at for at, array in enumerate(jax.tree.leaves(known))}
    known_at = tuple(place.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, at in zip(leaves, known_at, strict=True) if at is None]
    return value, Residuals(kept, treedef, known_at), *others


def restore_vjp(residuals: Residuals, known: Any) -> Callable[..., tuple]:
    """Return the backward: cotangent of the value -> those of `differentiated`."""
    known_leaves, kept = jax.tree.leaves(known), iter(residuals.kept)
    leaves = [
        next(kept) if at is None else known_leaves[at] for at in residuals.known_at
    ]
    return jax.tree.unflatten(residuals.treedef, leaves)


class Block:
    """One layer, as the loops call it.

    Only `gather` and `reduce` communicate over the batch axes. Collectives over the
    mesh axes of GSPMD, such as `tensor`, are in the model's functions
    (`parallel.tensor`).

    Args:
        group: The group of blocks.
        stored: Tree of `Stored` of one layer's parameters.
        remat: The policy of recomputation (`Layout.remat`).
        make_scope: `ScopeArrays` -> the scope that blocks see.
        padded: True if a negative layer marks a place without a block.
    """

    def __init__(
        self,
        group: BlockGroup,
        *,
        stored: Any,
        remat: str,
        make_scope: Callable[[ScopeArrays], Any],
        padded: bool = False,
    ) -> None:
        self.group, self.remat = group, remat
        self._stored, self._padded = stored, padded
        self._apply = {
            looped: rematerialised(group.run, remat, looped=looped)
            for looped in (True, False)
        }
        self._make_scope = make_scope

    @property
    def gathers(self) -> bool:
        """True if `gather` communicates."""
        return any(map(in_loop, jax.tree.leaves(self._stored)))

    @property
    def reduces(self) -> bool:
        """True if `reduce` communicates."""
        return any(stored.reduces_in_loop for stored in jax.tree.leaves(self._stored))

    def gather(self, shard: Any) -> Any:
        """Gather one layer's parameters in the compute dtype from this device's shards.

        One all-gather over the batch axes for each parameter that is split there while
        the blocks run: of its P values a device receives the P (n-1)/n that it lacks.
        """
        return self.joined(self.gather_split(shard)[0], shard)

    def gather_split(self, shard: Any, before: Any = ()) -> tuple[list[jax.Array], Any]:
        """Gather those of one layer's parameters that `gather` communicates.

        Args:
            shard: The layer's parameters on this device.
            before: Arrays that come back behind a barrier after what the gathers send,
                so that nothing that needs them delays the gathers.
        """
        layouts, treedef = jax.tree.flatten(self._stored)
        pairs = zip(layouts, treedef.flatten_up_to(shard), strict=True)
        split = [(layout, x) for layout, x in pairs if in_loop(layout)]
        sent = [x.astype(layout.compute_dtype) for layout, x in split]
        if sent and jax.tree.leaves(before):
            sent, before = lax.optimization_barrier((sent, before))
        return gather_shards([layout for layout, _ in split], sent, in_loop), before

    def joined(self, gathered: Sequence[jax.Array], shard: Any) -> Any:
        """Join parameters from `gather_split` and the whole ones of a layer's shard."""
        layouts, treedef = jax.tree.flatten(self._stored)
        leaves, split = treedef.flatten_up_to(shard), iter(gathered)
        return treedef.unflatten(
            next(split) if in_loop(layout) else x.astype(layout.compute_dtype)
            for layout, x in zip(layouts, leaves, strict=True)
        )

    def reduce(self, gradients: Any) -> Any:
        """Sum one layer's gradients over batch axes, to be added up.

        One reduce-scatter over the batch axes for each parameter whose gradient is
        split in the loop (`gradient_in_loop`): of its P values each device sends
        P (n-1)/n, in `Stored.sum_dtype`; over `Stored.loop_sums` one all-reduce of all,
        2 P (n-1)/n. Other gradients stay this device's own until the loop is done.
        """
        return reduce_in_loop(self._stored, gradients)

    def forward(
        self, weights: Any, x: Stream, layer: jax.Array, arrays: ScopeArrays
    ) -> tuple[Stream, Sums]:
        """Return the layer's output, shaped as `x`, and its sums.

        Args:
            weights: One layer's parameters, from `gather`.
            x: The stream of this device's examples.
            layer: int32 scalar; a negative one is no layer, and `x` passes through.
            arrays: Arrays that the scope is made of.
        """
        y, sums = self._call(weights, x, arrays._replace(layer=layer))
        return self._passed_on(y, sums, x, layer)

    def forward_keeping(
        self,
        weights: Any,
        x: Stream,
        layer: jax.Array,
        arrays: ScopeArrays,
        *,
        looped: bool = True,
    ) -> tuple[tuple[Stream, Sums], Residuals]:
        """Run `forward` and return its residuals too, without the parameters.

        Args:
            weights: As for `forward`, and so `x`, `layer` and `arrays`.
            x: The stream.
            layer: Index of the layer.
            arrays: Arrays that the scope is made of.
            looped: True inside a loop that does not contain the backward.
        """
        arrays = arrays._replace(layer=layer)

        def run(weights: Any, x: Stream) -> tuple[tuple[Stream, Sums], Sums]:
            y, sums = self._call(weights, x, arrays, looped)
            auxiliary = {name: sums.pop(name) for name in self.group.auxiliary}
            return (y, auxiliary), sums

        (y, auxiliary), residuals, others = vjp_without(
            run, (weights, x), known=(weights, arrays), has_aux=True
        )
        return self._passed_on(y, {**auxiliary, **others}, x, layer), residuals

    def backward(
        self,
        weights: Any,
        residuals: Residuals,
        dx: Stream,
        of_loss: jax.Array | float,
        layer: jax.Array,
        arrays: ScopeArrays,
    ) -> tuple[Any, Stream]:
        """Return gradients of one layer's parameters, for `reduce`, and of its `x`.

        At a place without a layer these are zeros and `dx` itself.

        Args:
            weights: As for `forward`, and so `layer` and `arrays`.
            residuals: From `forward_keeping`.
            dx: Gradient of the layer's output.
            of_loss: Gradient of the summed loss, which includes auxiliary losses.
            layer: Index of the layer.
            arrays: Arrays that the scope is made of.
        """
        vjp = restore_vjp(residuals, (weights, arrays._replace(layer=layer)))
        auxiliary_gradients = {
            name: jnp.float32(coefficient * of_loss)
            for name, coefficient in self.group.auxiliary.items()
        }
        gradients, dx_before = vjp((dx, auxiliary_gradients))
        if self._padded:
            is_layer = layer >= 0
            gradients = where(is_layer, gradients)
            dx_before = where(is_layer, dx_before, dx)
        return gradients, dx_before

    def residual_names(
        self, shard: Any, x: Stream, layer: jax.Array, arrays: ScopeArrays
    ) -> tuple[str, ...]:
        """Return the names that the block gives to residuals, by tracing it."""

        def run(shard: Any, x: Stream) -> tuple[Stream, Sums]:
            scope = self._make_scope(arrays._replace(layer=layer))
            return self.group.run(self.gather(shard), x, scope)

        return names_in(run, shard, x)

    def _call(
        self, weights: Any, x: Stream, arrays: ScopeArrays, looped: bool = True
    ) -> tuple[Stream, Sums]:
        y, sums = self._apply[looped](self._make_scope, weights, x, arrays)
        return y, dict(sums)

    def _passed_on(
        self, y: Stream, sums: Sums, x: Stream, layer: jax.Array
    ) -> tuple[Stream, Sums]:
        """Return a block's result, or its `x` at a place without a block."""
        if not self._padded:
            return y, sums
        # Outside what is differentiated: `jnp.where` masks a NaN forward, not its
        # gradient, and a block's gradient may be NaN where all its weights are 0.
        is_layer = layer >= 0
        return where(is_layer, y, x), where(is_layer, sums)


# As JAX names the passes of what it differentiates, so that profiles and the audit tell
# them apart here too.
FORWARD, BACKWARD = "jvp(blocks)", "transpose(jvp(blocks))"


@dataclass(frozen=True)
class Stack:
    """The layers of one group of blocks that this device runs.

    Args:
        block: The function of one layer.
        shards: This device's shards of the stacked parameters, as the loop takes them.
        state: Stacked state of the model.
        layers: int32, the layer at each place of the stack.
        prefetch: Use the loops of `meshpar.parallel.prefetch` if layers communicate.
        keep: Gathered parameters stay whole from a layer's forward to its backward.
        sends_rows: True if a layer's experts send rows over a mesh axis.
    """

    block: Block
    shards: Any
    state: Any
    layers: jax.Array
    prefetch: bool = False
    keep: bool = False
    sends_rows: bool = False

    @property
    def xs(self) -> tuple:
        """Return the stacked arrays that `lax.scan` runs over."""
        return self.shards, self.state, self.layers

    @property
    def prefetches(self) -> bool:
        """True if the loops communicate one layer ahead."""
        return self.prefetch and (self.block.gathers or self.block.reduces)


def run_blocks(stack: Stack, x: Stream, arrays: ScopeArrays) -> tuple[Stream, Sums]:
    """Run all blocks of a stack; return the stream after them, and the blocks' sums.

    Auxiliary losses are summed over the layers, other sums are stacked. Each layer's
    parameters are gathered (`Block.gather`).

    Args:
        stack: The blocks.
        x: The stream of this device's examples.
        arrays: Arrays without gradient that scopes are made of.
    """

    def body(x: Stream, xs: tuple) -> tuple[Stream, Sums]:
        shard, state, layer = xs
        weights = stack.block.gather(shard)
        return stack.block.forward(weights, x, layer, arrays._replace(state=state))

    x, sums = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums)


def run_keeping(
    stack: Stack, x: Stream, arrays: ScopeArrays
) -> tuple[Stream, Sums, Residuals]:
    """Run all blocks; return the stream, the sums, and residuals for `run_backward`."""

    def body(x: Stream, xs: tuple) -> tuple[Stream, tuple[Sums, Residuals]]:
        shard, state, layer = xs
        (x, sums), residuals = stack.block.forward_keeping(
            stack.block.gather(shard), x, layer, arrays._replace(state=state)
        )
        return x, (sums, residuals)

    with jax.named_scope(FORWARD):
        x, (sums, residuals) = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums), residuals


def run_backward(
    stack: Stack,
    residuals: Residuals,
    dx: Stream,
    arrays: ScopeArrays,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float,
) -> tuple[Stream, Any]:
    """Run the backward of `run_keeping`, adding gradients up layer by layer.

    Each layer's parameters are gathered once more, and its gradients reduced
    (`Block.reduce`).

    Args:
        stack: The blocks.
        residuals: From `run_keeping`.
        dx: Gradient of its stream.
        arrays: Arrays that scopes are made of.
        totals: Sums of gradients so far.
        add: (totals, gradients of one layer's shards, place in the stack) -> totals.
        of_loss: Gradient of the summed loss, which includes auxiliary losses.

    Returns:
        The gradient of `x`, and the totals.
    """

    def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        dx, totals = carry
        (shard, state, layer), residual, place = xs
        gradients, dx = stack.block.backward(
            stack.block.gather(shard),
            residual,
            dx,
            of_loss,
            layer,
            arrays._replace(state=state),
        )
        return (dx, add(totals, stack.block.reduce(gradients), place)), None

    xs = (stack.xs, residuals, jnp.arange(len(stack.layers)))
    with jax.named_scope(BACKWARD):
        return lax.scan(body, (dx, totals), xs, reverse=True)[0]


def check_names(stacks: Sequence[tuple[Stack, Stream]], arrays: ScopeArrays) -> None:
    """Check that blocks give the residual names that a `remat` policy asks for.

    Args:
        stacks: Blocks of each group, and the stream that they take.
        arrays: Arrays that scopes are made of.

    Raises:
        InputError: No block gives one of the names.
    """
    remat = stacks[0][0].block.remat
    if not is_named(remat):
        return
    names: list[str] = []
    for stack, x in stacks:
        first = jax.tree.map(lambda value: value[0], (stack.shards, stack.state))
        layer_arrays = arrays._replace(state=first[1])
        names += stack.block.residual_names(first[0], x, stack.layers[0], layer_arrays)
    refuse_unknown(remat, names)


def over_layers(block: Block, sums: Sums) -> Sums:
    """Sum auxiliary losses over the layers; leave other sums stacked."""
    return {
        name: jnp.sum(values) if name in block.group.auxiliary else values
        for name, values in sums.items()
    }


def where(condition: jax.Array, tree: Any, other: Any = None) -> Any:
    """Choose the arrays of one tree or of another; zeros if the other is absent."""
    if other is None:
        return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def one_layer(stored: Any) -> Any:
    """Return the `Stored` of one layer for each `Stored` of stacked parameters."""
    return jax.tree.map(Stored.without_layers, stored)


def sums_by_name(sums: Sequence[Sums]) -> Sums:
    """Add up the auxiliary losses of all groups that have the same name."""
    total: Sums = {}
    for group_sums in sums:
        for name, value in group_sums.items():
            total[name] = total.get(name, 0.0) + value
    return total
