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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from meshpar.model.contract import Stream
from meshpar.model.inputs import apart
from meshpar.model.parameter import Params
from meshpar.model.sums import Sums
from meshpar.parallel import prefetch
from meshpar.parallel.blocks import (
    Block,
    Known,
    Stack,
    check_names,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.model_state import statistics_of, sum_statistics, updated_state
from meshpar.parallel.placement import REPLICATED, Placement, Scopes
from meshpar.parallel.prefetch import prefetches
from meshpar.parallel.reduction import metrics_of, random_key, safe_inverse
from meshpar.parallel.sequence import outputs_in_order, tokens_at_hand
from meshpar.parallel.zero import (
    Stored,
    before_loop,
    gather,
    gradient_in_loop,
    reduce_scatter,
)

Found = tuple[jax.Array, dict[str, jax.Array], Params, Params, dict[str, jax.Array]]
"""Mean loss, more metrics, gradients as the optimizer has them, model state, and
gradients of the inputs that have one."""


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The functions of a model under a layout, to be called inside `jax.jit`.

    Over the batch axes move: parameters to where they are used (`Ends`,
    `Placement.blocks_before_loop`, `Block.gather`), gradients (`Ends.scattered`,
    `Block.scatter`, `Placement.reduce`), and one all-reduce of two fp32 scalars, of
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
    ) -> Found:
        """Mean loss, more metrics, gradients laid out as the states, model state.

        And the gradient of each input that has one, split as the batch.

        Args:
            params: At rest, global.
            state: The model's state, global.
            batch: Arrays (global batch, ...), split over the batch axes.
            step: uint32 or int32 scalar; randomness derives from it and `seed`.
            seed: uint32 scalar.
        """
        placement = self.placement

        def local(params: Params, state: Params, batch: Any, *of: jax.Array) -> Found:
            pass_ = _Pass.of(placement, params, state, batch, *of, training=True)
            return pass_.loss_and_gradients()

        found = placement.on_training_state(local)
        return found(params, state, batch, step, seed)

    def loss_sums(self, *of: Any) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, not in training."""

        def local(*of: Any) -> tuple[jax.Array, jax.Array]:
            pass_ = _Pass.of(self.placement, *of, training=False)
            return self.placement.sum_losses(pass_.head(*pass_.hidden()))

        return self.placement.on_state(local, (REPLICATED, REPLICATED))(*of)

    def logits(self, *of: Any) -> Any:
        """What the model's `logits` gives, each array with the example first."""

        def local(*of: Any) -> Any:
            pass_ = _Pass.of(self.placement, *of, training=False, natural=True)
            # `TrainStep.logits` refuses a model without.
            logits = cast(Callable[..., Any], self.placement.model.logits)
            return logits(*pass_.hidden(), pass_.outside)

        return outputs_in_order(self.placement, local, of)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """This device's part of one pass over a batch.

    Args:
        placement: The model on its mesh.
        scopes: What makes scopes.
        ends: The ends' parameters.
        groups: The blocks' parameters as the loop takes them.
        params: All of them at rest, this device's shards.
        state: The model's state.
        known: What scopes are made of, the batch without what has a gradient.
        inputs: The arrays of the batch that have one.
    """

    placement: Placement
    scopes: Scopes
    ends: Ends
    groups: list[Params]
    params: Params
    state: Params
    known: Known
    inputs: dict[str, jax.Array]

    @classmethod
    def of(
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
        own, order = tokens_at_hand(placement, batch, natural=natural)
        scopes = placement.scopes(training=training, order=order)
        model = placement.model
        own, inputs = apart(model.inputs, own)
        known = {
            "batch": own,
            "examples": scopes.examples(batch),
            "random": random_key(seed, step),
        }
        whole = {**known, "batch": {**own, **inputs}, "state": model.split(state)[0]}
        outside = scopes(whole)

        def embed(weights: Params) -> Stream:
            return model.embed(weights, outside.batch, outside)

        late = prefetches(placement) and not any(group.enter for group in model.groups)
        ends = Ends.of(
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
            known=known,
            inputs=inputs,
        )

    def loss_and_gradients(self) -> Found:
        placement = self.placement
        weights, x, vjps, stacks, sums, kept = self._forward()
        (loss_sum, weight_sum), head_vjp = jax.vjp(self.head, weights, x)
        auxiliary = [_chosen(stack, of) for stack, of in zip(stacks, sums, strict=True)]
        totals = placement.sum_losses((loss_sum, weight_sum, auxiliary))
        loss_sum, weight_sum, auxiliary = totals
        for stack, of_group in zip(stacks, auxiliary, strict=True):
            loss_sum += stack.block.group.weighted(of_group)
        share = safe_inverse(weight_sum)
        ends, dx = head_vjp((share, -loss_sum * share * share))
        beside = self.ends.scatter_late(ends)
        blocks: list[Any] = []
        for stack, vjp, residuals, zeros in reversed(
            list(zip(stacks, vjps, kept, self._zeros(weights), strict=True))
        ):
            dx, total, beside = _run_backward(
                stack, residuals, dx, self.known, zeros, share, beside
            )
            more, *dx_of = vjp(dx)
            dx = dx_of[0]
            ends = jax.tree.map(jnp.add, ends, more)
            blocks.insert(0, total)
        gradients = placement.reduce(self.ends.scattered(ends, beside), blocks)
        found = [statistics_of(*of) for of in zip(stacks, sums, strict=True)]
        statistics = sum_statistics(placement, found)
        state = updated_state(placement, self.params, self.state, statistics)
        metrics = metrics_of(weight_sum, sums_by_name(auxiliary))
        return loss_sum * share, metrics, gradients, state, dx

    def hidden(self) -> tuple[Params, Stream]:
        """The ends' parameters for use, and the last block's output."""
        x, beside = self.inputs, self.ends.late_shards
        early = self.ends.gather_early()
        weights = self.ends.joined(early)
        for at, stack in enumerate(self._stacks()):
            entered = self._entered(at)(weights, x)
            if stack.prefetches:
                x, _, beside = prefetch.run_blocks(stack, entered, self.known, beside)
            else:
                x, _ = run_blocks(stack, entered, self.known)
        return self.ends.joined(early, self.ends.gather_late(beside)), x

    def head(self, weights: Params, x: Stream) -> tuple[jax.Array, jax.Array]:
        model = self.placement.model
        return model.loss_sums(weights, x, self.outside.batch, self.outside)

    @property
    def outside(self) -> Any:
        """The scope outside the blocks."""
        return self._outside_of(self.known)

    def _forward(self) -> tuple:
        x, vjps, stacks, sums, kept, checked = self.inputs, [], [], [], [], []
        early, beside = self.ends.gather_early(), self.ends.late_shards
        weights = self.ends.joined(early)
        for at, stack in enumerate(self._stacks()):
            x, vjp = jax.vjp(self._entered(at), weights, x)
            checked.append((stack, x))
            x, of_group, residuals, beside = _run_keeping(stack, x, self.known, beside)
            vjps.append(vjp)
            stacks.append(stack)
            sums.append(of_group)
            kept.append(residuals)
        check_names(checked, self.known)
        weights = self.ends.joined(early, self.ends.gather_late(beside))
        return weights, x, vjps, stacks, sums, kept

    def _entered(self, at: int) -> Callable[..., Stream]:
        """(ends' parameters, stream of the group before) -> the stream of group `at`.

        Before the first group are the inputs that have a gradient.
        """
        if at == 0:
            return self._embed
        outside, enter = self.outside, self.placement.model.groups[at].enter
        if enter is None:
            return lambda _, x: x
        return lambda weights, x: enter(weights, x, outside)

    def _embed(self, weights: Params, inputs: dict[str, jax.Array]) -> Stream:
        batch = {**self.known["batch"], **inputs}
        scope = self._outside_of({**self.known, "batch": batch})
        return self.placement.model.embed(weights, scope.batch, scope)

    def _outside_of(self, known: Known) -> Any:
        ends, _ = self.placement.model.split(self.state)
        return self.scopes({**known, "state": ends})

    def _stacks(self) -> list[Stack]:
        """The layers of each group of blocks."""
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
                prefetch=prefetches(self.placement),
            )
            for at, (group, first) in enumerate(
                zip(model.groups, model.first_layers, strict=True)
            )
        ]

    def _zeros(self, weights: Params) -> list[Params]:
        shapes = self.placement.gradient_shapes(weights, self.groups)[1]
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _run_keeping(stack: Stack, x: Stream, known: Known, beside: Any) -> tuple:
    """The stack's output, its sums, what its backward needs, and `beside`."""
    if stack.prefetches:
        return prefetch.run_keeping(stack, x, known, beside)
    return *run_keeping(stack, x, known), beside


def _run_backward(
    stack: Stack,
    kept: Any,
    dx: Stream,
    known: Known,
    zeros: Params,
    of_loss: jax.Array,
    beside: Any,
) -> tuple:
    """The gradient of the stack's input, of its parameters, and `beside`."""
    if stack.prefetches:
        return prefetch.run_backward(
            stack, kept, dx, known, zeros, _put, of_loss=of_loss, beside=beside
        )
    return *run_backward(stack, kept, dx, known, zeros, _put, of_loss=of_loss), beside


def one_layer(stored: Any) -> Any:
    """Tree of `Stored` of stacked parameters -> of one layer's."""
    return jax.tree.map(Stored.without_layers, stored)


def _chosen(stack: Stack, sums: Sums) -> Sums:
    return {name: sums[name] for name in stack.block.group.auxiliary}


def sums_by_name(sums: Sequence[Sums]) -> Sums:
    """The auxiliary losses of all groups, those of one name together."""
    total: Sums = {}
    for of_group in sums:
        for name, value in of_group.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _put(totals: Params, gradients: Params, place: jax.Array) -> Params:
    return jax.tree.map(
        lambda total, gradient: total.at[place].set(gradient.astype(total.dtype)),
        totals,
        gradients,
    )


Leaves = list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The parameters outside the blocks.

    Args:
        stored: Of each of them.
        shards: This device's, at rest.
        treedef: Of the tree of them.
        of_head: Whether the head alone uses it.
    """

    stored: list[Stored]
    shards: Leaves
    treedef: Any
    of_head: list[bool]

    @classmethod
    def of(
        cls, stored: Any, shards: Params, embed: Callable[[Params], Any] | None
    ) -> Ends:
        """The parameters, those that `embed` does not use found by tracing it.

        Args:
            stored: Tree of `Stored`.
            shards: The same tree of shards.
            embed: A function of the whole parameters; None where all are to be there
                before the first block.
        """
        stored_leaves = jax.tree.leaves(stored)
        leaves, treedef = jax.tree.flatten(shards)
        of_head = [False] * len(leaves)
        if embed is not None:
            whole = jax.eval_shape(lambda x: gather(stored, x, before_loop), shards)
            of_head = [not used for used in _used(embed, whole)]
        return cls(
            stored=stored_leaves, shards=leaves, treedef=treedef, of_head=of_head
        )

    @property
    def late_shards(self) -> Leaves:
        """Of the parameters that the head alone uses."""
        return self._chosen(self.shards, True)

    def gather_early(self) -> Leaves:
        """The other parameters for use: one all-gather for each that is split.

        Communicates as `zero.gather`.
        """
        stored = self._chosen(self.stored, False)
        return gather(stored, self._chosen(self.shards, False), before_loop)

    def gather_late(self, shards: Leaves) -> Leaves:
        """Those that the head alone uses, from `late_shards`; as `gather_early`."""
        return gather(self._chosen(self.stored, True), shards, before_loop)

    def joined(self, early: Leaves, late: Leaves | None = None) -> Params:
        """The whole tree; zeros for what is missing, which nothing uses."""
        if late is None:
            late = [
                jnp.zeros(one.shape, one.dtype)
                for one in jax.eval_shape(self.gather_late, self.late_shards)
            ]
        parts = {False: iter(early), True: iter(late)}
        return self.treedef.unflatten(
            [next(parts[of_head]) for of_head in self.of_head]
        )

    def scatter_late(self, gradients: Params) -> Leaves:
        """Gradients of what the head alone uses, from the head's, as they are kept.

        Communicates as `zero.reduce_scatter`.
        """
        return self._scattered(gradients, True)

    def scattered(self, gradients: Params, late: Leaves) -> Params:
        """All gradients, the others reduce-scattered here; `late` from `scatter_late`.

        Communicates as `zero.reduce_scatter`.
        """
        return self.joined(self._scattered(gradients, False), late)

    def _scattered(self, gradients: Params, of_head: bool) -> Leaves:
        leaves = self._chosen(self.treedef.flatten_up_to(gradients), of_head)
        return reduce_scatter(
            self._chosen(self.stored, of_head), leaves, gradient_in_loop
        )

    def _chosen(self, leaves: list, of_head: bool) -> list:
        return [
            leaf
            for leaf, own in zip(leaves, self.of_head, strict=True)
            if own == of_head
        ]


def _used(function: Callable[[Params], Any], tree: Params) -> list[bool]:
    """Whether a function reads each array of a tree, as its trace says."""
    program = jax.make_jaxpr(function)(tree).jaxpr
    read = {
        id(atom)
        for atoms in (*(equation.invars for equation in program.eqns), program.outvars)
        for atom in atoms
    }
    return [id(variable) in read for variable in program.invars]
