"""The loop over a model's blocks, forward and backward both written out.

The forward keeps each layer's residuals without its parameters; the backward gathers
the parameters again and reduce-scatters their gradients, layer by layer. So a split
parameter is whole for one layer at a time only, and gathered once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layout.residual_names import is_named
from meshpar.model.contract import BlockGroup, Stream
from meshpar.model.sums import Sums
from meshpar.parallel.remat import names_in, refuse_unknown, rematerialised
from meshpar.parallel.zero import (
    gather,
    gradient_in_loop,
    in_loop,
    reduce_scatter,
)

# As JAX names the passes of what it differentiates, so that profiles and the audit tell
# them apart here too.
FORWARD, BACKWARD = "jvp(blocks)", "transpose(jvp(blocks))"


@dataclass(frozen=True)
class Stack:
    """Blocks of one kind, one after another.

    Args:
        block: What a layer does.
        shards: Stacked parameters as the loop takes them, this device's shards.
        state: Stacked state.
        layers: int32, the layer that each place of the stack holds.
        prefetch: Whether its loops are those of `meshpar.parallel.prefetch`, where any
            parameter is split in them.
    """

    block: Block
    shards: Any
    state: Any
    layers: jax.Array
    prefetch: bool = False

    @property
    def xs(self) -> tuple:
        """What a loop over the layers runs along."""
        return self.shards, self.state, self.layers

    @property
    def prefetches(self) -> bool:
        """Whether something is communicated ahead."""
        return self.prefetch and (self.block.gathers or self.block.scatters)


def run_blocks(stack: Stack, x: Stream, known: Known) -> tuple[Stream, Sums]:
    """`x` after every block of a stack, and the blocks' sums.

    Auxiliary losses are summed over the layers, other sums are stacked. Each layer's
    parameters are gathered (`Block.gather`).

    Args:
        stack: The blocks.
        x: The stream, this device's examples.
        known: Arrays without gradient that scopes are made of.
    """

    def body(x: Stream, xs: tuple) -> tuple[Stream, Sums]:
        shard, state, layer = xs
        weights = stack.block.gather(shard)
        return stack.block.forward(weights, x, layer, {**known, "state": state})

    x, sums = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums)


def run_keeping(
    stack: Stack, x: Stream, known: Known
) -> tuple[Stream, Sums, Residuals]:
    """`run_blocks`, and what `run_backward` needs besides the arguments."""

    def body(x: Stream, xs: tuple) -> tuple[Stream, tuple[Sums, Residuals]]:
        shard, state, layer = xs
        (x, sums), residuals = stack.block.forward_keeping(
            stack.block.gather(shard), x, layer, {**known, "state": state}
        )
        return x, (sums, residuals)

    with jax.named_scope(FORWARD):
        x, (sums, residuals) = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums), residuals


def run_backward(
    stack: Stack,
    residuals: Residuals,
    dx: Stream,
    known: Known,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float,
) -> tuple[Stream, Any]:
    """The backward of `run_keeping`, gradients added up in place, layer by layer.

    Each layer's parameters are gathered once more, and its gradients reduce-scattered
    (`Block.scatter`).

    Args:
        stack: As for `run_keeping`.
        residuals: What it kept.
        dx: Gradient of its result.
        known: What scopes are made of.
        totals: Where gradients are added.
        add: (totals, gradients of one layer's shards, place in the stack) -> totals.
        of_loss: Gradient of the summed loss, auxiliary losses among it.

    Returns:
        The gradient of its `x`, and the totals.
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
            {**known, "state": state},
        )
        return (dx, add(totals, stack.block.scatter(gradients), place)), None

    xs = (stack.xs, residuals, jnp.arange(len(stack.layers)))
    with jax.named_scope(BACKWARD):
        return lax.scan(body, (dx, totals), xs, reverse=True)[0]


def check_names(stacks: Sequence[tuple[Stack, Stream]], known: Known) -> None:
    """Refuses a policy of names that no block of a model gives.

    Args:
        stacks: Of each group: its blocks, and the stream that they take.
        known: What scopes are made of.

    Raises:
        InputError: None gives them.
    """
    remat = stacks[0][0].block.remat
    if not is_named(remat):
        return
    names: list[str] = []
    for stack, x in stacks:
        first = jax.tree.map(lambda value: value[0], (stack.shards, stack.state))
        of_layer = {**known, "state": first[1]}
        names += stack.block.residual_names(first[0], x, stack.layers[0], of_layer)
    refuse_unknown(remat, names)


def over_layers(block: Block, sums: Sums) -> Sums:
    """Auxiliary losses summed over the layers; other sums as they are."""
    return {
        name: jnp.sum(values) if name in block.group.auxiliary else values
        for name, values in sums.items()
    }


Known = dict[str, Any]
"""Arrays without gradient that scopes are made of."""


class Block:
    """One layer, as the loops call it.

    `gather` and `scatter` are what crosses the batch axes; the rest is this device's
    own. What GSPMD adds over its own mesh axes, such as `tensor`, stands in the model's
    functions (`parallel.tensor`).

    Args:
        group: The blocks.
        stored: Tree of `Stored` beside the parameters, of one layer.
        remat: What the backward recomputes (`Layout.remat`).
        make_scope: `Known` -> the scope that blocks see.
        padded: Whether a negative layer is a place without a block.
    """

    def __init__(
        self,
        group: BlockGroup,
        *,
        stored: Any,
        remat: str,
        make_scope: Callable[[Known], Any],
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
        """Whether `gather` communicates."""
        return any(map(in_loop, jax.tree.leaves(self._stored)))

    @property
    def scatters(self) -> bool:
        """Whether `scatter` communicates."""
        return any(map(gradient_in_loop, jax.tree.leaves(self._stored)))

    def gather(self, shard: Any) -> Any:
        """A layer's parameters for use, in the compute dtype.

        One all-gather over the batch axes for each parameter that is split there while
        the blocks run: of its P values a device receives the P (n-1)/n that it lacks.

        Args:
            shard: One layer's parameters, this device's shards.
        """
        return gather(self._stored, shard, in_loop)

    def scatter(self, gradients: Any) -> Any:
        """A layer's gradients as they are added up.

        One reduce-scatter over the batch axes for each parameter whose gradient is
        split in the loop (`gradient_in_loop`): of its P values each device sends
        P (n-1)/n, in `Stored.sum_dtype`. Other gradients stay this device's own until
        the loop is done.
        """
        return reduce_scatter(self._stored, gradients, gradient_in_loop)

    def forward(
        self, weights: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[Stream, Sums]:
        """The layer's output, and its sums.

        Args:
            weights: One layer's parameters, from `gather`.
            x: The stream, this device's examples; the output is alike.
            layer: int32 scalar, below 0 for a place without a layer: `x` goes through.
            known: What the scope is made of.
        """
        y, sums = self._call(weights, x, {**known, "layer": layer})
        return self._passed_on(y, sums, x, layer)

    def forward_keeping(
        self,
        weights: Any,
        x: Stream,
        layer: jax.Array,
        known: Known,
        *,
        looped: bool = True,
    ) -> tuple[tuple[Stream, Sums], Residuals]:
        """`forward`, and what `backward` needs: no parameter is among it.

        Args:
            weights: As for `forward`, and so the next three.
            x: The stream.
            layer: Its index.
            known: What the scope is made of.
            looped: Whether a loop is around it, and not around its backward.
        """
        known = {**known, "layer": layer}

        def run(weights: Any, x: Stream) -> tuple[tuple[Stream, Sums], Sums]:
            y, sums = self._call(weights, x, known, looped)
            auxiliary = {name: sums.pop(name) for name in self.group.auxiliary}
            return (y, auxiliary), sums

        (y, auxiliary), residuals, others = vjp_without(
            run, (weights, x), known=(weights, known), has_aux=True
        )
        return self._passed_on(y, {**auxiliary, **others}, x, layer), residuals

    def backward(
        self,
        weights: Any,
        residuals: Residuals,
        dx: Stream,
        of_loss: jax.Array | float,
        layer: jax.Array,
        known: Known,
    ) -> tuple[Any, Stream]:
        """Gradients of one layer's parameters, and of its `x`.

        Args:
            weights: As for `forward`.
            residuals: From `forward_keeping`.
            dx: Gradient of its output.
            of_loss: Gradient of the summed loss, auxiliary losses among it; a scalar.
            layer: As for `forward`.
            known: As for `forward`.

        Returns:
            Gradients shaped as the weights, for `scatter`; and that of `x`. Zeros and
            `dx` itself at a place without a layer.
        """
        vjp = restore_vjp(residuals, (weights, {**known, "layer": layer}))
        of_sums = {
            name: jnp.float32(coefficient * of_loss)
            for name, coefficient in self.group.auxiliary.items()
        }
        return self._cut(vjp((dx, of_sums)), dx, layer)

    def residual_names(
        self, shard: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[str, ...]:
        """The names that the block gives to residuals; nothing is run."""

        def run(shard: Any, x: Stream) -> tuple[Stream, Sums]:
            scope = self._make_scope({**known, "layer": layer})
            return self.group.run(self.gather(shard), x, scope)

        return names_in(run, shard, x)

    def _call(
        self, weights: Any, x: Stream, known: Known, looped: bool = True
    ) -> tuple[Stream, Sums]:
        y, sums = self._apply[looped](self._make_scope, weights, x, known)
        return y, dict(sums)

    def _passed_on(
        self, y: Stream, sums: Sums, x: Stream, layer: jax.Array
    ) -> tuple[Stream, Sums]:
        """A block's result, or its `x` where there is no block."""
        if not self._padded:
            return y, sums
        # Outside what is differentiated: `jnp.where` masks a NaN forward, not its
        # gradient, and a block's gradient may be NaN where all its weights are 0.
        here = layer >= 0
        return where(here, y, x), where(here, sums)

    def _cut(
        self, found: tuple[Any, Stream], dy: Stream, layer: jax.Array
    ) -> tuple[Any, Stream]:
        """Gradients of weights and `x`; zeros and `dy` where there is no block."""
        if not self._padded:
            return found
        (gradients, dx), here = found, layer >= 0
        return where(here, gradients), where(here, dx, dy)


def where(condition: jax.Array, tree: Any, other: Any = None) -> Any:
    """Every array of a tree, or that of another tree, 0 without one."""
    if other is None:
        return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The residuals that must be kept, and where the others go back."""

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
    """`function(*differentiated)` and its residuals, less the arrays in `known`.

    `jax.vjp` keeps an argument that the backward needs as that very array, so those
    arrays are found by identity, wherever JAX's version stores them.

    Args:
        function: A function of arrays -> a tree of arrays; it may close over arrays.
        differentiated: Its arguments.
        known: Tree of arrays that `restore_vjp` will be given again.
        has_aux: Whether the function returns a pair, its second without gradient.

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
    """The backward: cotangent of the value -> cotangents of `differentiated`."""
    at_hand, kept = jax.tree.leaves(known), iter(residuals.kept)
    leaves = [next(kept) if at is None else at_hand[at] for at in residuals.known_at]
    return jax.tree.unflatten(residuals.treedef, leaves)
