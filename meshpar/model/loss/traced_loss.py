"""Trace a user's loss, and cut it between equal blocks: embed, one block, head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from meshpar.errors import InputError
from meshpar.model.loss.drop_ins import Shapes, example_key, inside, key_data
from meshpar.model.loss.facts import Arguments, Cut, TraceFacts
from meshpar.model.loss.leaf_names import BlockLeaves
from meshpar.model.loss.listed_blocks import listed_blocks
from meshpar.model.loss.program import STACKED, LossProgram
from meshpar.model.loss.scanned_blocks import scanned_blocks
from meshpar.model.loss.user_tree import UserLeaf, UserTree
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes
from meshpar.trace.walk import equations


class CutLoss(NamedTuple):
    """A loss cut for one shape of batch.

    Args:
        cuts: Its parts around each group of blocks.
        arguments: Numbers of the trace's arguments; `ends` are outside all blocks.
        results: Structure of what the loss returns.
    """

    cuts: tuple[Cut, ...]
    arguments: Arguments
    results: Any


class TracedLoss:
    """A user's loss, traced once for each shape of batch, dtype and mesh.

    Args:
        tree: The user's parameters.
        loss: The loss.
        groups: Where the blocks of each group are among the leaves.
        ends: Positions of the leaves outside the blocks.
        axes: Logical axes of each leaf, without the dim of stacked layers.
    """

    def __init__(
        self,
        tree: UserTree,
        loss: Callable[..., Any],
        groups: Sequence[BlockLeaves],
        ends: Sequence[int],
        axes: Sequence[LogicalAxes],
    ) -> None:
        self._tree, self._loss, self._groups, self._ends = tree, loss, groups, ends
        self._axes = axes
        positions = itertools.chain(*(group.positions for group in groups))
        self._layers = list(itertools.chain(*positions))
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
        key = self._key(*given)
        if key not in self._cuts:
            self._cuts[key] = self._cut(*given)
        return self._cuts[key], examples

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
        key = self._key(*given)
        if key not in self._draws:
            self._draws[key] = self._shared(*given)
        return self._draws[key]

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

        def struct(leaf: UserLeaf, axes: LogicalAxes) -> jax.ShapeDtypeStruct:
            real = jnp.issubdtype(leaf.dtype, jnp.floating)
            used = dtype if leaf.role == "param" and real and dtype else leaf.dtype
            return jax.ShapeDtypeStruct(_local_shape(leaf.shape, axes, scope), used)

        values = [struct(leaves[at], self._axes[at]) for at in order]
        return jax.make_jaxpr(traced)(values, shapes, data), structures[0]

    def _cut(
        self, params: Params, names: list[str], shapes: list, scope: Scope
    ) -> CutLoss:
        data = jax.eval_shape(lambda: key_data(scope, "loss"))
        shared = (
            frozenset() if data is None else self._shared(params, names, shapes, scope)
        )
        traced, results = self._program(params, names, shapes, data, scope, shared)
        first, last = len(self._ends), len(self._ends) + len(self._layers)
        program = LossProgram(traced, self._layer_numbers())
        numbers = program.arguments
        outside = Arguments(
            ends=tuple(numbers[:first]),
            layers=(),
            num_layers=0,
            stacked=False,
            batch=tuple(numbers[last : last + len(names)]),
            key=None if data is None else numbers[-1],
        )
        cuts, begin = [], first
        for group in self._groups:
            width = len(group.paths)
            end = begin + width * len(group.positions)
            arguments = replace(
                outside,
                ends=(*outside.ends, *numbers[first:begin], *numbers[end:last]),
                layers=tuple(
                    tuple(numbers[at : at + width]) for at in range(begin, end, width)
                ),
                num_layers=group.num_layers,
                stacked=group.stacked,
            )
            parts = cut(program, arguments, group.blocks)
            cuts.append(replace(parts, shared=shared))
            begin = end
        cuts = _with_carried(program, outside, cuts, numbers[first:last])
        paths = [group.blocks for group in self._groups]
        _check_chain(program, outside, cuts, paths)
        return CutLoss(tuple(cuts), outside, results)

    def _layer_numbers(self) -> dict[int, int]:
        """Return the layer of each argument in a block, counted over all groups."""
        numbers: list[int] = []
        layer = 0
        for group in self._groups:
            for positions in group.positions:
                own = STACKED if group.stacked else layer
                numbers += [own] * len(positions)
                layer += 1
        return {len(self._ends) + at: number for at, number in enumerate(numbers)}


def _local_shape(
    shape: tuple[int, ...], axes: LogicalAxes, scope: Scope
) -> tuple[int, ...]:
    """Return the shape that a device has of a parameter: its part of the experts."""
    num_devices = math.prod(map(lax.axis_size, scope.expert_axes))
    layers = shape[: len(shape) - len(axes)]
    pairs = zip(axes, shape[len(layers) :], strict=True)
    return *layers, *(
        size // num_devices if axis == "experts" else size for axis, size in pairs
    )


def _structs(batch: Mapping[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each array, by name, as devices hold it."""
    arrays = [batch[name] for name in sorted(batch)]
    return [
        jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for array in arrays
    ]


def _float_dtype(params: Params) -> Any:
    """Return the dtype in which a step uses its parameters; None without real ones."""
    for leaf in jax.tree.leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.dtype
    return None


def cut(program: LossProgram, arguments: Arguments, blocks: str) -> Cut:
    """Return a traced loss cut between the blocks of one group.

    Args:
        program: The trace.
        arguments: Its arguments; `ends` has the parameters of other groups too.
        blocks: Path of the blocks, for errors.

    Raises:
        InputError: The blocks are not equal, not one after another, or not alone with
            their parameters.
    """
    facts = TraceFacts(program, arguments, blocks)
    if arguments.stacked:
        return scanned_blocks(facts)
    return listed_blocks(facts)


def _with_carried(
    program: LossProgram, outside: Arguments, cuts: list[Cut], leaves: Sequence[int]
) -> list[Cut]:
    """Let each group hand on what a later part reads of a stream before it.

    Args:
        program: The trace.
        outside: Its arguments outside the blocks.
        cuts: The loss, cut around each group of blocks.
        leaves: Parameters in the blocks.
    """
    cuts = list(cuts)
    wanted: Sequence[Any] = program.results
    from_blocks, from_inputs = program.reached(leaves), program.reached(outside.inputs)
    known = (*outside.ends, *outside.inputs)
    for at in reversed(range(1, len(cuts))):
        own = {number for number in cuts[at].last if number in from_blocks}
        earlier = {number for one in cuts[:at] for number in one.last}
        earlier = earlier.intersection(from_blocks) - own
        try:
            operations = program.needed(wanted, (*known, *cuts[at].last, *earlier))
        except LookupError:
            break  # `_check_chain` says what is missing.
        read = {atom for atom in wanted if not isinstance(atom, Literal)}
        read.update(*(operation.read for operation in operations))
        carried = sorted(earlier & read)
        cuts[at] = cuts[at].carrying(
            carried, [number in from_inputs for number in carried]
        )
        wanted = cuts[at].first
    return cuts


def _check_chain(
    program: LossProgram, outside: Arguments, cuts: Sequence[Cut], paths: Sequence[str]
) -> None:
    """Raise if anything depends on a block but through the stream that it returns.

    Args:
        program: The trace.
        outside: Its arguments outside the blocks.
        cuts: The loss, cut around each group of blocks.
        paths: Path of each group.
    """
    known = (*outside.ends, *outside.inputs)
    befores: list[tuple[int, ...]] = [(), *(one.last for one in cuts)]
    wanted = [*(one.first for one in cuts), program.results]
    for at, (needed, before) in enumerate(zip(wanted, befores, strict=True)):
        try:
            program.needed(needed, (*known, *before))
        except LookupError:
            part = "the loss" if at == len(cuts) else "what the first block reads"
            order = "give the paths in the order in which they run, "
            raise InputError(
                f"blocks={paths[min(at, len(cuts) - 1)]!r}: {part} depends on what a "
                "block keeps to itself, besides the stream that the last one returns; "
                f"{order if len(cuts) > 1 else ''}return it in the stream of every "
                "block, or write the model with meshpar.from_nnx",
                key="model.blocks_leak",
            ) from None
