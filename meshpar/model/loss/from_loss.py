"""Build a model from a function that makes its parameters and one that is its loss.

The second way in, beside `from_nnx`: the model stays as it is, in Flax NNX or Linen,
Equinox, Haiku or plain dicts. Without `blocks` the whole loss is the head of a model
with one empty block, and runs under every layout without stages. With `blocks` it is
cut between equal blocks (`meshpar.model.loss.traced_loss`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import InputError
from meshpar.model.block_run import check_head
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.inputs import Input
from meshpar.model.loss.drop_ins import example_key, inside, key_data
from meshpar.model.loss.facts import Values, from_stream, in_stream, known_batch
from meshpar.model.loss.leaf_names import (
    NONE,
    BlockLeaves,
    Names,
    find_groups,
    leaf_axes,
)
from meshpar.model.loss.traced_loss import CutLoss, TracedLoss
from meshpar.model.loss.user_tree import UserLeaf, UserTree
from meshpar.model.parameter import Parameter, Params
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes
from meshpar.rules.sharding import insert, path_name

Loss = Callable[[Any, Mapping[str, Any], Any], Any]
"""(parameters, batch, key) -> (loss_sum, weight_sum), or with a dict of sums."""


def from_loss(
    init: Callable[[jax.Array], Any],
    loss: Loss,
    *,
    names: Names | None = None,
    blocks: str | Sequence[str] | None = None,
    inputs: Mapping[str, Input] | None = None,
) -> Model:
    """Return a model of a function that makes parameters, and of its loss, unchanged.

    The parameters are any pytree of arrays: a Flax NNX module, Linen variables, an
    Equinox module, Haiku's or plain dicts. Integers and booleans in it, NNX variables
    that are no `nnx.Param`, and Linen collections other than `params` are constants.
    `init(jax.random.key(seed))` gives the initial values, bitwise, on every layout.

    Random numbers of the loss are drawn for each example by itself where the leading
    dim of the drawn array holds the examples, so that no layout changes them. Streams
    of an NNX module (`nnx.Rngs`) get keys that derive from `key`. Outside training
    `key` is None, an NNX module is in `eval()` and an Equinox one in inference mode.

    Args:
        init: `init(key) -> params`.
        loss: `loss(params, batch, key) -> (loss_sum, weight_sum)`, two scalars: the sum
            of the loss over the examples of the batch, and the sum of their weights. A
            third value, a dict of name -> sum, adds metrics.
        names: Pattern of a parameter's path -> a logical axis, or None, for each of its
            dims; None leaves all dims whole. Where `blocks` are stacked, the dim of
            layers is None or left out. `*` stands for one key of the path, `**` for any
            number of them: `**/attn/*/kernel`. The first pattern that matches counts; a
            module's own names (`nnx.Param` metadata, Linen's `with_partitioning`) count
            where none does.
        blocks: Path of the repeated blocks: of a list of equal trees (`layers`), of
            trees named by number (`params/layers_*`), or of parameters stacked over
            layers that a `lax.scan` runs over. With it the model runs in stages, and
            layer by layer under `fsdp` and `remat`. Several paths, in the order in
            which they run, are blocks of several kinds: `("encoder", "decoder")`.
        inputs: Name -> `Input` of the arrays of a batch (`Model`).

    Raises:
        InputError: A pattern names too many or too few dims; there is nothing to train;
            or `blocks` are not equal or not one after another.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> from meshpar import Input, from_loss, make_train_step
        >>> def init(key):
        ...     return {"up": jax.random.normal(key, (4, 8)), "down": jnp.zeros((8, 1))}
        >>> def loss(params, batch, key):
        ...     y = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        ...     losses = (y[:, 0] - batch["y"]) ** 2
        ...     return losses.sum(), jnp.float32(losses.size)
        >>> model = from_loss(
        ...     init,
        ...     loss,
        ...     names={"up": ("embed", "mlp"), "down": ("mlp", None)},
        ...     inputs={
        ...         "x": Input(("batch", None), shape=(None, 4)), "y": Input(("batch",))
        ...     },
        ... )
        >>> step = make_train_step(model, optax.sgd(0.1), "data=-1")
        >>> state = step.init(seed=0)
        >>> state, metrics = step(state, dict(x=np.ones((8, 4)), y=np.ones(8)))
        >>> float(metrics["loss"])
        1.0
    """
    if not callable(loss):
        raise InputError(
            f"loss is a {type(loss).__name__}; give a function of (params, batch, key) "
            "that returns (loss_sum, weight_sum)",
            key="model.loss_not_callable",
        )
    for name, declared in (inputs or {}).items():
        if getattr(declared, "has_gradient", False):
            raise InputError(
                f"inputs[{name!r}] has_gradient=True, but from_loss differentiates its "
                "parameters alone; make it one of them, or write the model with "
                "meshpar.from_nnx",
                key="model.input_gradient_in_loss",
            )
    tree = UserTree(init)
    groups = (NONE,) if blocks is None else find_groups(tree.leaves, blocks)
    axes, problems = leaf_axes(tree.leaves, names or {}, groups)
    model = _LossModel(tree, loss, groups, axes).model(inputs)
    problems |= {
        collection: "stays as init makes it, like every Linen collection but params; "
        "a layer's state that changes needs meshpar.from_nnx"
        for collection in sorted(tree.collections)
    }
    problems |= dict.fromkeys(
        sorted(tree.numbers),
        "is a Python number, which is not trained; make it an array",
    )
    return replace(model, name_problems=problems)


class _LossModel:
    """A user's init and loss as the functions of the model contract."""

    def __init__(
        self,
        tree: UserTree,
        loss: Loss,
        groups: Sequence[BlockLeaves],
        axes: Sequence[LogicalAxes],
    ) -> None:
        self._tree, self._loss, self._groups, self._axes = tree, loss, groups, axes
        layers = itertools.chain(*(group.positions for group in groups))
        in_blocks = set(itertools.chain(*layers))
        self._ends = [
            at
            for at, leaf in enumerate(tree.leaves)
            if at not in in_blocks and leaf.role != "random"
        ]
        self._traced = TracedLoss(tree, loss, groups, self._ends, axes)
        self._changes_state = tree.has_statistics

    def model(self, inputs: Mapping[str, Input] | None) -> Model:
        """Return the model."""
        tree = self._tree.leaves
        parameters: Params = {group.name: {} for group in self._groups}
        state: Params = {}
        constants = []
        for at in self._ends:
            trained = tree[at].role == "param"
            self._check_name(tree[at])
            insert(parameters if trained else state, tree[at].path, self._declared(at))
            constants += [tree[at].name] if tree[at].role == "constant" else []
        for group, index, path in self._block_arrays():
            at, full = group.positions[0][index], (group.name, *path)
            trained = tree[at].role == "param"
            insert(parameters if trained else state, full, self._declared(at, group))
            constants += [".".join(full)] if tree[at].role == "constant" else []
        whole = self._groups[0] is NONE
        return Model(
            parameters=parameters,
            embed=_no_stream if whole else self._embed,
            groups=tuple(map(self._block_group, range(len(self._groups)))),
            head=self._whole_loss if whole else self._head,
            inputs=inputs,
            state=state,
            constants=tuple(constants),
            build_whole=self._values,
            unflatten=self._unflatten,
            update_ends=self._update_ends if whole and self._changes_state else None,
        )

    def _block_group(self, at: int) -> BlockGroup:
        group = self._groups[at]
        if group is NONE:
            return BlockGroup(
                name=group.name,
                num_layers=group.num_layers,
                block=lambda params, stream, scope: stream,
            )
        return BlockGroup(
            name=group.name,
            num_layers=group.num_layers,
            block=partial(self._block, at),
            enter=partial(self._enter, at) if at else None,
            called=group.blocks,
        )

    def _declared(self, at: int, group: BlockLeaves = NONE) -> Parameter:
        leaf = self._tree.leaves[at]
        return Parameter(
            shape=leaf.shape[1:] if group.stacked else leaf.shape,
            dtype=leaf.dtype,
            logical_axes=self._axes[at],
            num_layers=None if group is NONE else group.num_layers,
        )

    def _check_name(self, leaf: UserLeaf) -> None:
        if leaf.path[0] in {group.name for group in self._groups}:
            raise InputError(
                f"parameter {leaf.name} is under the name of the blocks, "
                f"{leaf.path[0]!r}; rename it",
                key="model.name_of_blocks_taken",
            )

    def _values(self, key: jax.Array) -> tuple[Params, Params]:
        """Return parameters and state as `init(key)` makes them, layers stacked."""
        values, trees = self._tree.values(key), self._tree.leaves
        params: Params = {group.name: {} for group in self._groups}
        state: Params = {}
        for at in self._ends:
            trained = trees[at].role == "param"
            insert(params if trained else state, trees[at].path, values[at])
        for group, index, path in self._block_arrays():
            layer_values = [values[layer[index]] for layer in group.positions]
            stacked = layer_values[0] if group.stacked else jnp.stack(layer_values)
            trained = trees[group.positions[0][index]].role == "param"
            insert(params if trained else state, (group.name, *path), stacked)
        return params, state

    def _block_arrays(self) -> Iterator[tuple[BlockLeaves, int, tuple[str, ...]]]:
        """Yield each array of the blocks: its group, and its index and path in it."""
        for group in self._groups:
            for index, path in enumerate(group.paths):
                yield group, index, path

    def _unflatten(self, params: Params, state: Params | None = None) -> Any:
        """Return the user's tree with these parameters, layers first to last."""
        missing = [
            self._tree.leaves[at].name
            for at in self._ends
            if self._tree.leaves[at].role != "param" and not state
        ]
        if missing:
            raise InputError(
                f"the tree has arrays that are not trained, such as {missing[0]}; give "
                "state.model_state too, or call step.unflatten(state)",
                key="model.tree_needs_state",
            )
        values = self._user_values(params, state or {})
        return self._tree.rebuild(values, None, training=False)

    def _user_values(self, params: Params, state: Params) -> list[Any]:
        """Return a value for each leaf of the user's tree, from stacked ones."""
        values: list[Any] = [None] * len(self._tree.leaves)
        for at in self._ends:
            leaf = self._tree.leaves[at]
            values[at] = _at_path(params if leaf.role == "param" else state, leaf.path)
        for group, index, path in self._block_arrays():
            for layer, positions in enumerate(group.positions):
                role = self._tree.leaves[positions[index]].role
                stacked = _at_path(
                    params if role == "param" else state, (group.name, *path)
                )
                whole = group.stacked
                values[positions[index]] = stacked if whole else stacked[layer]
        return values

    def _whole_loss(
        self, params: Params, stream: Any, batch: Mapping[str, Any], scope: Scope
    ) -> Any:
        values = self._user_values(params, scope.state)
        data = key_data(scope, "loss")
        shared = self._traced.shared_draws(params, batch, scope)
        key = None if data is None else example_key(data, shared)
        tree = self._tree.rebuild(
            values, key, training=scope.training, batch_axes=scope.batch_axes
        )
        with inside(scope):
            sums = check_head(self._loss(tree, dict(batch), key), "loss")
        if not scope.training or not self._changes_state:
            return sums
        if scope.batch_sums is not None:
            scope.batch_sums.append("nnx.BatchNorm")
        if scope.num_microbatches > 1:
            raise InputError(
                "the model has an nnx.BatchNorm, whose statistics are the global "
                f"batch's, but it runs in microbatches={scope.num_microbatches}; set "
                "microbatches=1, or use a norm of each example",
                key="model.batch_norm_in_microbatches",
            )
        # Every device has the whole statistics: their shares add up to one.
        share = 1.0 / math.prod(map(lax.axis_size, scope.batch_axes))
        statistics = self._tree.statistics(tree)
        return sums._replace(
            statistics={
                name: lax.stop_gradient(x) * share for name, x in statistics.items()
            }
        )

    def _update_ends(self, state: Params, sums: Mapping[str, jax.Array]) -> Params:
        """Return the state with the running statistics that the loss left."""
        return jax.tree.map_with_path(
            lambda path, old: sums.get(path_name(path), old), state
        )

    def _embed(self, params: Params, batch: Mapping[str, Any], scope: Scope) -> Any:
        loss, known, examples = self._cut(params, batch, scope)
        first = loss.cuts[0]
        return in_stream(first, first.embed(known), examples)

    def _enter(self, at: int, params: Params, stream: Any, scope: Scope) -> Any:
        """Return the stream of group `at` from that of the group before."""
        loss, known, examples = self._cut(params, scope.batch, scope)
        before, own = loss.cuts[at - 1 : at + 1]
        after = from_stream(before, before.last, stream)
        known |= dict(zip(before.last, after, strict=True))
        return in_stream(own, own.embed(known), examples)

    def _head(
        self, params: Params, stream: Any, batch: Mapping[str, Any], scope: Scope
    ) -> Any:
        loss, known, _ = self._cut(params, batch, scope)
        last = loss.cuts[-1]
        after = from_stream(last, last.last, stream)
        return jax.tree.unflatten(loss.results, last.head(known, after))

    def _block(self, at: int, params: Params, stream: Any, scope: Scope) -> Any:
        (cuts, arguments, _), examples = self._traced.cut(params, scope.batch, scope)
        group, parts = self._groups[at], cuts[at]
        values = []
        for path, position in zip(group.paths, group.positions[0], strict=True):
            trained = self._tree.leaves[position].role == "param"
            values.append(_at_path(params if trained else scope.state, path))

        def make_key(index: int, shape: tuple[int, ...]) -> jax.Array:
            data = key_data(scope, f"block.{index}")
            assert data is not None  # The trace without a key asks for none.
            key = example_key(data, parts.shared)
            return jax.random.split(key, shape) if shape else key

        batch = known_batch(arguments, sorted(scope.batch), scope.batch)
        arrays = from_stream(parts, parts.first, stream)
        layer = scope.layer - sum(one.num_layers for one in self._groups[:at])
        after = parts.block(values, batch, arrays, make_key, layer)
        result = in_stream(parts, after, examples)
        # The planner traces blocks in a dtype that the model may promote.
        return jax.tree.map(lambda y, x: y.astype(x.dtype), result, stream)

    def _cut(
        self, params: Params, batch: Mapping[str, Any], scope: Scope
    ) -> tuple[CutLoss, Values, int]:
        """Return the cut loss, the values of its arguments, and number of examples."""
        loss, examples = self._traced.cut(params, batch, scope)
        arguments = loss.arguments
        known = known_batch(arguments, sorted(batch), batch)
        for number, at in zip(arguments.ends, self._ends, strict=True):
            leaf = self._tree.leaves[at]
            known[number] = _at_path(
                params if leaf.role == "param" else scope.state, leaf.path
            )
        if arguments.key is not None:
            known[arguments.key] = key_data(scope, "loss")
        return loss, known, examples


def _no_stream(params: Params, batch: Mapping[str, Any], scope: Scope) -> jax.Array:
    """Return an empty stream: 0 for each example."""
    examples = jax.tree.leaves(dict(batch))[0].shape[0]
    return jnp.zeros((examples,), jnp.float32)


def _at_path(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
