"""Trace a user's loss for the shapes of a batch, cut it, and keep what was found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.loss.cut import cut
from meshpar.model.loss.drop_ins import inside
from meshpar.model.loss.example_keys import Shapes, example_key, key_data
from meshpar.model.loss.facts import Arguments, Cut
from meshpar.model.loss.leaf_names import BlockLeaves
from meshpar.model.loss.program import STACKED, LossProgram
from meshpar.model.loss.user_tree import UserLeaf, UserTree
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.trace.walk import equations


class CutLoss(NamedTuple):
    """A loss cut for one shape of batch.

    Args:
        cut: Its parts.
        arguments: Numbers of the trace's arguments.
        results: Structure of what the loss returns.
    """

    cut: Cut
    arguments: Arguments
    results: Any


class TracedLoss:
    """A user's loss, traced once for each shape of batch, dtype and mesh.

    Args:
        tree: The user's parameters.
        loss: The loss.
        blocks: Where the blocks are among the leaves.
        ends: Positions of the leaves outside the blocks.
    """

    def __init__(
        self,
        tree: UserTree,
        loss: Callable[..., Any],
        blocks: BlockLeaves,
        ends: Sequence[int],
    ) -> None:
        self._tree, self._loss, self._blocks, self._ends = tree, loss, blocks, ends
        self._layers = list(itertools.chain(*blocks.positions))
        self._cuts: dict[Any, CutLoss] = {}
        self._draws: dict[Any, Shapes] = {}
        self._rules: list[Any] = []

    def cut(
        self, params: Params, batch: Mapping[str, Any], scope: Scope
    ) -> tuple[CutLoss, int]:
        """Return the loss cut for such a batch, and the number of examples."""
        shapes = _structs(batch)
        examples = shapes[0].shape[0]
        given = params, sorted(batch), shapes, scope
        if scope.order is not None and scope.order.probing:
            return self._cut(*given), examples
        known = self._key(*given)
        if known not in self._cuts:
            self._cuts[known] = self._cut(*given)
        return self._cuts[known], examples

    def shared_draws(
        self, params: Params, batch: Mapping[str, Any], scope: Scope
    ) -> Shapes:
        """Return the shapes that the loss draws once for all examples.

        The loss is traced on the batch and on one twice as large: what does not grow
        is drawn for all examples alike, whatever its leading dim.

        Raises:
            InputError: An array of the same shape is drawn for each example too.
        """
        if key_data(scope, "loss") is None:
            return frozenset()
        given = params, sorted(batch), _structs(batch), scope
        if scope.order is not None and scope.order.probing:
            return self._shared(*given)
        known = self._key(*given)
        if known not in self._draws:
            self._draws[known] = self._shared(*given)
        return self._draws[known]

    def _shared(
        self, params: Params, names: list[str], shapes: list, scope: Scope
    ) -> Shapes:
        rows = shapes[0].shape[0]

        def drawn(times: int) -> list[tuple[int, ...]]:
            larger = [
                jax.ShapeDtypeStruct((times * one.shape[0], *one.shape[1:]), one.dtype)
                for one in shapes
            ]
            words = jax.eval_shape(lambda: key_data(scope, "loss"))
            data = jax.ShapeDtypeStruct(
                (words.shape[0] + (times - 1) * rows,), words.dtype
            )
            program, _ = self._program(params, names, larger, data, scope, frozenset())
            return [
                tuple(one.params["shape"])
                for one in equations(program)
                if one.primitive.name == "random_bits"
            ]

        pairs = list(zip(drawn(1), drawn(2), strict=True))
        shared = frozenset(one for one, twice in pairs if one == twice)
        for one, twice in pairs:
            if one != twice and one in shared:
                raise InputError(
                    f"the loss draws random arrays of shape {one} for each of its "
                    f"{rows} examples, and others of that shape for all alike; give "
                    "those another shape, or the batch another number of examples",
                    key="model.ambiguous_draw",
                )
        return shared

    def _key(
        self, params: Params, names: list[str], shapes: list, scope: Scope
    ) -> tuple:
        self._rules.append(scope.rules)  # So that no other gets its id.
        # JAX keeps the mesh of a trace with every operation.
        return (
            tuple(zip(names, map(str, shapes), strict=True)),
            scope.training and scope.random is not None and scope.examples is not None,
            str(_float_dtype(params)),
            scope.training,
            jax.sharding.get_abstract_mesh(),
            id(scope.rules),
            scope.order,
            scope.platform,
            scope.recomputed,
        )

    def _program(
        self,
        params: Params,
        names: list[str],
        shapes: list,
        data: Any,
        scope: Scope,
        shared: Shapes,
    ) -> tuple[Any, Any]:
        """Return the trace of the loss, and the structure of its results."""
        leaves, order = self._tree.leaves, [*self._ends, *self._layers]
        dtype, structures = _float_dtype(params), []

        def traced(values: list[Any], arrays: list[Any], data: Any) -> Any:
            given: list[Any] = [None] * len(leaves)
            for at, value in zip(order, values, strict=True):
                given[at] = value
            key = None if data is None else example_key(data, shared)
            tree = self._tree.rebuild(
                given,
                key,
                training=scope.training,
                batch_axes=None if self._layers else (),
            )
            with inside(scope):
                results = self._loss(tree, dict(zip(names, arrays, strict=True)), key)
            flat, structure = jax.tree.flatten(results)
            structures.append(structure)
            return flat

        def struct(leaf: UserLeaf) -> jax.ShapeDtypeStruct:
            real = jnp.issubdtype(leaf.dtype, jnp.floating)
            used = dtype if leaf.role == "param" and real and dtype else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape, used)

        values = [struct(leaves[at]) for at in order]
        return jax.make_jaxpr(traced)(values, shapes, data), structures[0]

    def _cut(
        self, params: Params, names: list[str], shapes: list, scope: Scope
    ) -> CutLoss:
        data = jax.eval_shape(lambda: key_data(scope, "loss"))
        shared = (
            frozenset() if data is None else self._shared(params, names, shapes, scope)
        )
        traced, results = self._program(params, names, shapes, data, scope, shared)
        blocks, first = self._blocks, len(self._ends)
        width = len(blocks.paths)
        of_layer = {
            first + at: STACKED if blocks.stacked else at // width
            for at in range(len(self._layers))
        }
        program = LossProgram(traced, of_layer)
        numbers, after = program.arguments, first + len(self._layers)
        arguments = Arguments(
            ends=tuple(numbers[:first]),
            layers=tuple(
                tuple(numbers[first + at : first + at + width])
                for at in range(0, len(self._layers), width)
            ),
            num_layers=blocks.num_layers,
            stacked=blocks.stacked,
            batch=tuple(numbers[after : after + len(names)]),
            key=None if data is None else numbers[-1],
        )
        parts = replace(cut(program, arguments, blocks.blocks), shared=shared)
        return CutLoss(parts, arguments, results)


def _structs(batch: Mapping[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each array, by name, as devices hold it."""
    arrays = [batch[name] for name in sorted(batch)]
    return [
        jax.ShapeDtypeStruct(one.shape, jax.dtypes.canonicalize_dtype(one.dtype))
        for one in arrays
    ]


def _float_dtype(params: Params) -> Any:
    """Return the dtype in which a step uses its parameters; None without real ones."""
    for leaf in jax.tree.leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.dtype
    return None
