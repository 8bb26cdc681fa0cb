"""A model's loss, gradients and logits under a layout without stages, per device.

One `jax.shard_map`, manual over the batch axes, so that what crosses them is written
here: parameters gathered and gradients reduce-scattered per block (`zero`), one
reduction of the rest per step (`reduction`). GSPMD partitions over the other mesh axes.

Parameters outside the blocks (`Ends`) move beside blocks. Those that only the head
uses are gathered beside the last block, and their gradients are reduce-scattered beside
that block's backward. The others are gathered before the first block, and
reduce-scattered once the gradient of the embedding is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from meshpar.model.block_run import HeadSums
from meshpar.model.contract import Stream
from meshpar.model.inputs import split_gradient_inputs
from meshpar.model.parameter import Params
from meshpar.model.token_order import TokenOrder
from meshpar.parallel import prefetch
from meshpar.parallel.blocks import (
    Block,
    ScopeArrays,
    Stack,
    check_names,
    one_layer,
    run_backward,
    run_blocks,
    run_keeping,
    sums_by_name,
)
from meshpar.parallel.model_state import state_statistics, updated_ends, updated_state
from meshpar.parallel.placement import REPLICATED, Placement, Scopes
from meshpar.parallel.reduction import loss_metrics, random_key, safe_inverse
from meshpar.parallel.remat import run_head
from meshpar.parallel.sequence import outputs_in_order, own_tokens
from meshpar.parallel.zero import Stored, before_loop, gather, reduce_in_loop
from meshpar.trace.dependence import arguments_read

LossAndGradients = tuple[
    jax.Array, dict[str, jax.Array], Params, Params, dict[str, jax.Array]
]
"""Mean loss, more metrics, gradients laid out as optimizer states, model state, and
gradients of the inputs that have one."""

Leaves = list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The functions of a model under a layout, to be called inside `jax.jit`.

    Over the batch axes move: parameters to where they are used (`Ends`,
    `Placement.blocks_before_loop`, `Block.gather`), gradients (`Ends.reduced`,
    `Block.reduce`, `Placement.reduce`), and one all-reduce of two fp32 scalars, of
    auxiliary losses and of what the model's state is made of.

    Args:
        placement: The model on its mesh.
    """

    placement: Placement

    def loss_and_gradients(
        self,
        params: Params,
        state: Params,
        batch: Any,
        step: jax.Array,
        seed: jax.Array,
    ) -> LossAndGradients:
        """Return the mean loss, metrics, gradients, model state and input gradients.

        Gradients are laid out as optimizer states, those of inputs as the batch.

        Args:
            params: Global parameters at rest.
            state: Global state of the model.
            batch: Arrays (global batch, ...), split over the batch axes.
            step: uint32 or int32 scalar; randomness derives from it and `seed`.
            seed: uint32 scalar.
        """

        def local(*arguments: Any) -> LossAndGradients:
            pass_ = _Pass.start(self.placement, *arguments, training=True)
            return pass_.loss_and_gradients()

        run = self.placement.on_training_state(local)
        return run(params, state, batch, step, seed)

    def loss_sums(self, *arguments: Any) -> HeadSums:
        """Return the head's sums over the global batch, not in training."""

        def local(*arguments: Any) -> HeadSums:
            pass_ = _Pass.start(self.placement, *arguments, training=False)
            return self.placement.sum_losses(pass_.head(*pass_.hidden()))

        return self.placement.on_state(local, REPLICATED)(*arguments)

    def logits(self, *arguments: Any) -> Any:
        """Return the model's `logits`, each array with the example first."""

        def local(*arguments: Any) -> Any:
            pass_ = _Pass.start(
                self.placement, *arguments, training=False, natural=True
            )
            # `TrainStep.logits` refuses a model without.
            logits = cast(Callable[..., Any], self.placement.model.logits)
            return logits(*pass_.hidden(), pass_.outside)

        return outputs_in_order(self.placement, local, arguments)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Parameters outside the blocks, split into those for the head and the others.

    Args:
        stored: Layout of each parameter.
        shards: This device's shard of each, at rest.
        treedef: Structure of their tree.
        is_late: True for a parameter that only the head uses.
    """

    stored: list[Stored]
    shards: Leaves
    treedef: Any
    is_late: list[bool]

    @classmethod
    def from_shards(
        cls, stored: Any, shards: Params, embed: Callable[[Params], Any] | None
    ) -> Ends:
        """Find the parameters that `embed` does not read, by tracing it.

        Args:
            stored: Tree of `Stored`.
            shards: The same tree of shards.
            embed: A function of the gathered parameters; None gathers all of them
                before the first block.
        """
        leaves, treedef = jax.tree.flatten(shards)
        is_late = [False] * len(leaves)
        if embed is not None:
            whole = jax.eval_shape(lambda x: gather(stored, x, before_loop), shards)
            is_late = [not read for read in arguments_read(embed, whole)]
        return cls(
            stored=jax.tree.leaves(stored),
            shards=leaves,
            treedef=treedef,
            is_late=is_late,
        )

    @property
    def late_shards(self) -> Leaves:
        """Return the shards of the parameters that only the head uses."""
        return self._chosen(self.shards, True)

    def gather_early(self) -> Leaves:
        """Gather the parameters that not only the head uses (`zero.gather`)."""
        stored = self._chosen(self.stored, False)
        return gather(stored, self._chosen(self.shards, False), before_loop)

    def gather_late(self, shards: Leaves) -> Leaves:
        """Gather the parameters that only the head uses, from `late_shards`."""
        return gather(self._chosen(self.stored, True), shards, before_loop)

    def joined(self, early: Leaves, late: Leaves | None = None) -> Params:
        """Join both parts to one tree, with zeros for late ones that are absent."""
        if late is None:
            shapes = jax.eval_shape(self.gather_late, self.late_shards)
            late = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        parts = {False: iter(early), True: iter(late)}
        return self.treedef.unflatten([next(parts[key]) for key in self.is_late])

    def reduce_late(self, gradients: Params) -> Leaves:
        """Reduce the late part of all gradients (`zero.reduce_in_loop`)."""
        return self._reduced(gradients, True)

    def reduced(self, gradients: Params, late: Leaves) -> Params:
        """Reduce the early part of all gradients and join it with the late one.

        Args:
            gradients: Shaped as the gathered parameters.
            late: From `reduce_late`.
        """
        return self.joined(self._reduced(gradients, False), late)

    def _reduced(self, gradients: Params, late: bool) -> Leaves:
        leaves = self._chosen(self.treedef.flatten_up_to(gradients), late)
        return reduce_in_loop(self._chosen(self.stored, late), leaves)

    def _chosen(self, leaves: list, late: bool) -> list:
        pairs = zip(leaves, self.is_late, strict=True)
        return [leaf for leaf, is_late in pairs if is_late == late]


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """This device's part of one pass over a batch.

    Args:
        placement: The model on its mesh.
        scopes: Makes the scopes of the model's functions.
        ends: Parameters outside the blocks.
        groups: Parameters of the blocks, as the loop takes them.
        params: This device's shards of all parameters at rest.
        state: The model's state.
        arrays: Arrays that scopes are made of; its batch lacks `inputs`.
        inputs: Arrays of the batch that have a gradient.
    """

    placement: Placement
    scopes: Scopes
    ends: Ends
    groups: list[Params]
    params: Params
    state: Params
    arrays: ScopeArrays
    inputs: dict[str, jax.Array]

    @classmethod
    def start(
        cls,
        placement: Placement,
        params: Params,
        state: Params,
        batch: Any,
        step: jax.Array,
        seed: jax.Array,
        *,
        training: bool,
        natural: bool = False,
    ) -> _Pass:
        """Prepare a pass over this device's examples and tokens."""
        order: TokenOrder | None = None
        own = dict(batch)
        if placement.splits_tokens:
            own, order = own_tokens(placement, batch, natural=natural)
        scopes = placement.scopes(training=training, order=order)
        model = placement.model
        own, inputs = split_gradient_inputs(model.inputs, own)
        arrays = ScopeArrays(
            batch=own,
            examples=scopes.examples(batch),
            random=random_key(seed, step),
        )
        outside = scopes(
            arrays._replace(batch={**own, **inputs}, state=model.split(state)[0])
        )

        def embed(weights: Params) -> Stream:
            return model.embed(weights, outside.batch, outside)

        late = placement.prefetches and not any(group.enter for group in model.groups)
        ends = Ends.from_shards(
            model.split(placement.stored)[0],
            model.split(params)[0],
            embed if late else None,
        )
        return cls(
            placement=placement,
            scopes=scopes,
            ends=ends,
            groups=placement.blocks_before_loop(params),
            params=params,
            state=state,
            arrays=arrays,
            inputs=inputs,
        )

    def loss_and_gradients(self) -> LossAndGradients:
        placement = self.placement
        weights, x, vjps, stacks, sums, kept = self._forward()
        sums_of_loss, head_vjp, (terms, statistics) = jax.vjp(
            lambda weights, x: self.head(weights, x).differentiated(),
            weights,
            x,
            has_aux=True,
        )
        auxiliary = [
            {name: group_sums[name] for name in stack.block.group.auxiliary}
            for stack, group_sums in zip(stacks, sums, strict=True)
        ]
        totals = placement.sum_losses((*sums_of_loss, auxiliary, terms))
        loss_sum, weight_sum, auxiliary, terms = totals
        for stack, group_losses in zip(stacks, auxiliary, strict=True):
            loss_sum += stack.block.group.weighted(group_losses)
        share = safe_inverse(weight_sum)
        ends, dx = head_vjp((share, -loss_sum * share * share))
        overlapped = self.ends.reduce_late(ends)
        shapes = placement.gradient_shapes(weights, self.groups)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        blocks: list[Any] = []
        for stack, vjp, residuals, total in reversed(
            list(zip(stacks, vjps, kept, zeros, strict=True))
        ):
            dx, total, overlapped = _run_backward(
                stack, residuals, dx, self.arrays, total, share, overlapped
            )
            more, dx = vjp(dx)
            ends = jax.tree.map(jnp.add, ends, more)
            blocks.insert(0, total)
        gradients = placement.reduce(self.ends.reduced(ends, overlapped), blocks)
        state = self.state
        if placement.model.changes_state:
            pairs = zip(stacks, sums, strict=True)
            of_groups = [state_statistics(*pair) for pair in pairs]
            state = updated_state(placement, self.params, state, of_groups)
            state = updated_ends(placement, state, statistics)
        metrics = loss_metrics(weight_sum, sums_by_name(auxiliary), terms)
        return loss_sum * share, metrics, gradients, state, dx

    def hidden(self) -> tuple[Params, Stream]:
        """Return the gathered parameters of the ends, and the last block's output."""
        x, overlapped = self.inputs, self.ends.late_shards
        early = self.ends.gather_early()
        weights = self.ends.joined(early)
        for at, stack in enumerate(self._stacks()):
            entered = self._entered(at)(weights, x)
            if stack.prefetches:
                x, _, overlapped = prefetch.run_blocks(
                    stack, entered, self.arrays, overlapped
                )
            else:
                x, _ = run_blocks(stack, entered, self.arrays)
        return self.ends.joined(early, self.ends.gather_late(overlapped)), x

    def head(self, weights: Params, x: Stream) -> HeadSums:
        placement = self.placement
        remat = placement.layout.remat
        return run_head(placement.model, remat, weights, x, self.outside)

    @property
    def outside(self) -> Any:
        """Return the scope of functions outside the blocks."""
        return self._outside_scope(self.arrays)

    def _forward(self) -> tuple:
        x, vjps, stacks, sums, kept, checked = self.inputs, [], [], [], [], []
        early, overlapped = self.ends.gather_early(), self.ends.late_shards
        weights = self.ends.joined(early)
        residuals: Any
        for at, stack in enumerate(self._stacks()):
            x, vjp = jax.vjp(self._entered(at), weights, x)
            checked.append((stack, x))
            if stack.prefetches:
                x, group_sums, residuals, overlapped = prefetch.run_keeping(
                    stack, x, self.arrays, overlapped
                )
            else:
                x, group_sums, residuals = run_keeping(stack, x, self.arrays)
            vjps.append(vjp)
            stacks.append(stack)
            sums.append(group_sums)
            kept.append(residuals)
        check_names(checked, self.arrays)
        weights = self.ends.joined(early, self.ends.gather_late(overlapped))
        return weights, x, vjps, stacks, sums, kept

    def _entered(self, at: int) -> Callable[..., Stream]:
        """Return (ends' parameters, stream of the last group) -> stream of group `at`.

        The first group takes the inputs that have a gradient in place of a stream.
        """
        model = self.placement.model
        if at == 0:

            def embed(weights: Params, inputs: dict[str, jax.Array]) -> Stream:
                batch = {**self.arrays.batch, **inputs}
                scope = self._outside_scope(self.arrays._replace(batch=batch))
                return model.embed(weights, scope.batch, scope)

            return embed
        outside, enter = self.outside, model.groups[at].enter
        if enter is None:
            return lambda _, x: x
        return lambda weights, x: enter(weights, x, outside)

    def _outside_scope(self, arrays: ScopeArrays) -> Any:
        ends, _ = self.placement.model.split(self.state)
        return self.scopes(arrays._replace(state=ends))

    def _stacks(self) -> list[Stack]:
        """Return the layers of each group of blocks."""
        model = self.placement.model
        _, stored = model.split(self.placement.stored)
        _, state = model.split(self.state)
        return [
            Stack(
                block=Block(
                    group,
                    stored=one_layer(stored[at]),
                    remat=self.placement.layout.remat,
                    make_scope=self.scopes,
                ),
                shards=self.groups[at],
                state=state[at],
                layers=first + jnp.arange(group.num_layers, dtype=jnp.int32),
                prefetch=self.placement.prefetches,
                keep=self.placement.layout.zero < 3,
                sends_rows=self.placement.layout.expert > 1,
            )
            for at, (group, first) in enumerate(
                zip(model.groups, model.first_layers, strict=True)
            )
        ]


def _run_backward(
    stack: Stack,
    kept: Any,
    dx: Stream,
    arrays: ScopeArrays,
    totals: Params,
    of_loss: jax.Array,
    overlapped: Any,
) -> tuple:
    """Return gradients of the stack's input and parameters, and `overlapped`."""

    def put(totals: Params, gradients: Params, place: jax.Array) -> Params:
        return jax.tree.map(
            lambda total, gradient: total.at[place].set(gradient.astype(total.dtype)),
            totals,
            gradients,
        )

    if stack.prefetches:
        return prefetch.run_backward(
            stack, kept, dx, arrays, totals, put, of_loss=of_loss, overlapped=overlapped
        )
    return *run_backward(
        stack, kept, dx, arrays, totals, put, of_loss=of_loss
    ), overlapped
