"""Parameters outside the blocks, gathered and scattered beside blocks.

What the head alone uses is gathered beside the last block, and its gradients are
reduce-scattered beside that block's backward; the rest is gathered before the first
block, and reduce-scattered when the gradient of the embedding is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.parameter import Params
from meshpar.parallel.zero import (
    Stored,
    before_loop,
    gather,
    gradient_in_loop,
    reduce_scatter,
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
