"""The contract between a model and every parallel strategy.

A model is data and functions over a tree of parameters:

    embed(params, batch, scope) -> stream
    block(block_params, stream, scope) -> stream   once per layer, parameters stacked
    head(params, stream, batch, scope) -> (loss_sum, weight_sum)

*Inputs*: `batch` is a dict of arrays with the example first, declared by name
(`Input`). *Stream*: what flows between blocks, one array or a tree of arrays, each with
the example first; whatever needs a gradient on its way (conditioning, an encoder's
output, skips) is a leaf of it. *Groups*: blocks of one kind, one group after another;
a group may begin with `enter(params, stream, scope) -> stream`, which makes its stream
from that of the group before. Shapes are constant inside a group. *Parameters* are a
nested dict whose top-level keys are the names of the groups and whatever else the model
has; `embed`, `enter` and `head` see all but the groups' (the *ends*).

The loss is `sum(loss_sum) / sum(weight_sum)` over the global batch, so that padding,
masks, shards and microbatches cannot change it. A group may declare auxiliary losses
(router z-loss, load balancing); its block then returns `(stream, sums)`, a sum over its
tokens or examples for each, and

    loss = (sum(loss_sum) + sum(coefficient * sums)) / sum(weight_sum)

with `sums` over all layers and the global batch too. What is not a sum over examples,
such as a product of means over a batch, would depend on the microbatches: take it of
each example.

A head may return named terms as a third value: a sum over its tokens or examples, or
such a sum and the sum of its weights. They are metrics, without gradient.

The backward starts from the gradient of that mean on every layout: each example's
`loss_sum` has the cotangent 1 / `sum(weight_sum)` of the global batch, also where the
batch is cut into microbatches. So a `jax.custom_vjp` whose backward is not linear, such
as one that clips, sees the same values everywhere.

*State* is arrays that are no parameters: running statistics, a router's bias, integer
tables. A function reads its layer's as `scope.state`. It changes once a step, outside
the gradient: `update_state(state, sums) -> state` of each layer, from what its blocks
summed over the global batch under other names than auxiliary losses. What depends on
the layer's parameters too is `update_from(params, state, sums) -> state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshpar.errors import InputError
from meshpar.model.block_run import (
    HeadSums,
    Sums,
    check_head,
    check_kept,
    check_sums,
    in_parts,
)
from meshpar.model.inputs import Input, Inputs, check_inputs, default_inputs
from meshpar.model.parameter import (
    Parameter,
    Params,
    flat,
    initial_values,
    is_parameter,
)
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes

Stream = Any
"""An array, or a tree of arrays, that flows from block to block."""

NO_BLOCKS = "no_blocks"
"""Name of the one empty group of a model whose head is the whole loss."""

RESIDUAL = ("batch", "residual_seq", "embed")
"""Logical axes of an array of the stream with 3 dims, where nothing declares others."""


def default_axes(num_dims: int) -> LogicalAxes:
    """Logical axes of an array of the stream that a group does not declare."""
    return RESIDUAL if num_dims == 3 else ("batch", *[None] * (num_dims - 1))


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """Blocks of one kind: `block(block_params, stream, scope) -> stream`, repeated.

    Args:
        name: Key of their parameters in the tree.
        num_layers: How many there are.
        block: One of them; its layer is `scope.layer`, counted over all groups. It
            returns `(stream, sums)` where it has auxiliary losses or sums for its
            state: a dict by name.
        enter: `(ends' params, stream, scope) -> stream` before the first block, where
            this group's stream is made from that of the group before.
        stream: Tree of the stream's logical axes, `batch` first in each; None for one
            array of (batch, residual_seq, embed), or of any other rank, whole.
        auxiliary: Name of each auxiliary loss -> its coefficient.
        update_state: `(state, sums) -> state` of one layer, once a step, where the
            group has state that changes; `sums` are its blocks' over the global batch.
        update_from: `(params, state, sums) -> state` in its place, where it reads the
            layer's parameters: whole, and as they were before the step. One all-gather
            of each that it reads where the step splits them over the batch.
        costs: Cost of each layer, in any unit, for stages of even cost
            (`splits=cost`); their matmul FLOPs when absent.
        called: Name of its block in errors; its group's when empty.

    Raises:
        InputError: There are not as many costs as layers, or one is not above 0; or
            both ways to update the state are given.
    """

    name: str
    num_layers: int
    block: Callable[[Params, Stream, Scope], Any]
    enter: Callable[[Params, Stream, Scope], Stream] | None = None
    stream: Any = field(default=None, hash=False)
    auxiliary: Mapping[str, float] = field(default_factory=dict, hash=False)
    update_state: Callable[[Params, Sums], Params] | None = None
    update_from: Callable[[Params, Params, Sums], Params] | None = None
    costs: tuple[float, ...] | None = None
    called: str = ""

    def __post_init__(self) -> None:
        if self.update_state is not None and self.update_from is not None:
            raise InputError(
                f"block group {self.name!r} has update_state and update_from; give one",
                key="model.two_state_updates",
            )
        if self.costs is None:
            return
        object.__setattr__(self, "costs", tuple(self.costs))
        if len(self.costs) != self.num_layers:
            raise InputError(
                f"block group {self.name!r} has {self.num_layers} layers, but "
                f"{len(self.costs)} costs; give one a layer",
                key="model.wrong_number_of_costs",
            )
        if not all(0 < cost < math.inf for cost in self.costs):
            raise InputError(
                f"block group {self.name!r} has costs {self.costs}; each must be a "
                "number above 0",
                key="model.cost_not_positive",
            )

    def run(self, params: Params, stream: Stream, scope: Scope) -> tuple[Stream, Sums]:
        """Return the block's output and its sums, auxiliary losses in fp32.

        It runs in parts of the batch where that hides communication
        (`model.block_run`).

        Raises:
            InputError: It returns other sums than those declared, or a stream of
                another tree, shape or dtype than it was given.
        """
        block = self.called or f"the block of group {self.name!r}"

        def checked(params: Params, stream: Stream, scope: Scope) -> tuple[Any, Sums]:
            result = self.block(params, stream, scope)
            y, sums = check_sums(
                block, result, stream, self.auxiliary, self.changes_state
            )
            check_kept(block, y, stream)
            return y, sums

        return in_parts(checked, params, stream, scope)

    @property
    def changes_state(self) -> bool:
        """True if a step may change the group's state."""
        return self.update_state is not None or self.update_from is not None

    def updated(self, params: Params, state: Params, sums: Sums) -> Params:
        """Return one layer's state after a step."""
        if self.update_from is not None:
            return self.update_from(params, state, sums)
        return state if self.update_state is None else self.update_state(state, sums)

    def weighted(self, sums: Mapping[str, jax.Array]) -> jax.Array | float:
        """Return the sum of the auxiliary losses times their coefficients."""
        return sum(
            coefficient * sums[name] for name, coefficient in self.auxiliary.items()
        )


def check_model(model: Any) -> None:
    """Raise if the argument is no model, or has no blocks.

    Raises:
        InputError: It is none.
    """
    if not isinstance(model, Model):
        raise InputError(
            f"model is a {type(model).__name__}; give a meshpar.Model, such as "
            "meshpar.from_nnx makes of Flax NNX modules",
            key="model.not_a_model",
        )
    if not model.groups:
        raise InputError(
            "the model has groups=(); a model has at least one of blocks",
            key="model.no_groups",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model under the contract of this module.

    What is found by tracing one is kept with it, so that it must stay as it was built:
    `dataclasses.replace` makes another.

    Args:
        parameters: Tree of `Parameter`; block groups under their own names.
        embed: `(params, batch, scope) -> stream`.
        groups: Block groups in the order in which they run.
        head: `(params, stream, batch, scope) -> (loss_sum, weight_sum)`, two scalars;
            or with a dict of further metrics, name -> sum or (sum, weight sum).
        logits: `(params, stream, scope) -> outputs`, for sampling; optional.
        inputs: Name -> `Input` of the arrays of a batch; None where the model does not
            say: a batch then needs nothing but the example first, and where shapes are
            needed without a batch, a language model's are taken.
        per_token: Whether embed and head treat every token by itself, but for its
            position (`Scope.positions`). Then the ranks of a pipeline share them.
        sequence_inputs: Further arrays of a batch that are (batch, seq, ...), where
            they are not declared.
        state: Tree of `Parameter` for what is no parameter: each group's under its
            name, that of the ends beside them.
        constants: Paths, such as `blocks.table`, of those in `state` that a user finds
            among the parameters: integers and booleans.
        build: Name of a group, or `ends` -> key -> all its values at once (of one
            layer): (parameters, state). What it has no entry for is drawn by each
            `Parameter.initial`.
        modules: Name of a group, or `ends` -> what builds its Flax NNX module, where
            that is where they come from.
        update_ends: `(state, sums) -> state` of the ends, once a step, from what the
            head summed over the global batch (`HeadSums.statistics`); None where that
            state is constant.
        build_whole: Key -> all parameters and state, layers stacked first to last, in
            place of `build` (`from_loss`); the key is that of the seed alone.
        name_problems: Path or pattern -> what `lint` reports about its names.
        unflatten: (parameters, state) -> the user's own tree with them (`from_loss`).

    Raises:
        InputError: There is no group, or one has no parameters; or what is declared of
            the inputs are none.
    """

    parameters: dict[str, Any]
    embed: Callable[[Params, Mapping, Scope], Stream]
    groups: tuple[BlockGroup, ...]
    head: Callable[[Params, Stream, Mapping, Scope], tuple[Any, ...]]
    logits: Callable[[Params, Stream, Scope], Any] | None = None
    inputs: Mapping[str, Input] | None = None
    per_token: bool = False
    sequence_inputs: tuple[str, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    build: Mapping[str, Callable[[jax.Array], tuple[Params, Params]]] = field(
        default_factory=dict
    )
    modules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    update_ends: Callable[[Params, Sums], Params] | None = None
    build_whole: Callable[[jax.Array], tuple[Params, Params]] | None = None
    unflatten: Callable[..., Any] | None = None
    name_problems: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_inputs(self.inputs)
        _check_parameters(self.parameters)
        for group in self.groups:
            if group.name not in self.parameters:
                raise InputError(
                    f"block group {group.name!r} has no parameters; the tree holds "
                    f"{', '.join(sorted(self.parameters))}",
                    key="model.group_without_parameters",
                )

    def loss_sums(
        self, ends: Params, stream: Stream, batch: Mapping, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Return the sums of the loss and of its weights, in fp32.

        Raises:
            InputError: The head returns anything else than two scalars.
        """
        return self.head_sums(ends, stream, batch, scope)[:2]

    def head_sums(
        self, ends: Params, stream: Stream, batch: Mapping, scope: Scope
    ) -> HeadSums:
        """Return `loss_sums` and the head's named terms.

        Raises:
            InputError: As for `loss_sums`; or a term is no scalar, or has the name of a
                metric that a step returns itself.
        """
        return check_head(self.head(ends, stream, batch, scope))

    @property
    def has_blocks(self) -> bool:
        """False where the head is the whole loss (`from_loss` without blocks)."""
        return self.groups[0].name != NO_BLOCKS

    @property
    def known_inputs(self) -> Inputs:
        """The declared inputs, or a language model's where none are."""
        return default_inputs() if self.inputs is None else self.inputs

    def seq_dim(self, name: str) -> int | None:
        """Return the dim of the tokens of an array of the batch; None if it has none.

        Raises:
            InputError: The array is not declared.
        """
        if name in self.known_inputs:
            return self.known_inputs[name].dim("seq")
        if name in self.sequence_inputs:
            return 1
        raise InputError(
            "the ranks of the pipeline share the tokens of embed and head "
            f"(per_token=True), but nothing says which dim of batch[{name!r}] has "
            "them; declare it in inputs=, as Input(('batch', 'seq')) if dim 1 does",
            key="model.unknown_token_dim",
        )

    def split(self, params: Params) -> tuple[Params, list[Params]]:
        """The parameters outside the blocks, and those of each block group."""
        names = [group.name for group in self.groups]
        ends = {key: value for key, value in params.items() if key not in names}
        return ends, [params.get(name, {}) for name in names]

    def join(self, ends: Params, groups: list[Params]) -> Params:
        """Return the tree that `split` took apart."""
        named = zip([group.name for group in self.groups], groups, strict=True)
        return {**ends, **dict(named)}

    @property
    def changes_state(self) -> bool:
        """True if a step may change the state of a group or of the ends."""
        of_ends = self.update_ends is not None
        return of_ends or any(group.changes_state for group in self.groups)

    def flat_parameters(self) -> dict[str, Parameter]:
        """Path such as `blocks.mlp.down` -> parameter, in tree order."""
        return flat(self.parameters)

    def init(self, seed: jax.Array | int) -> Params:
        """Initial parameters, each a function of (seed, group, layer) only."""
        return initial_values(self, seed)[0]

    def arranged(self, orders: Mapping[str, tuple[int, ...]]) -> Model:
        """Return the model with the stacked arrays of its groups in other orders."""

        def arrange(tree: dict[str, Any]) -> dict[str, Any]:
            return {
                name: jax.tree.map(
                    lambda one, at=name: replace(one, layer_order=orders[at]),
                    subtree,
                    is_leaf=is_parameter,
                )
                if name in orders
                else subtree
                for name, subtree in tree.items()
            }

        return replace(
            self, parameters=arrange(self.parameters), state=arrange(self.state)
        )

    @property
    def first_layers(self) -> tuple[int, ...]:
        """Index of each group's first layer among all."""
        sizes = [group.num_layers for group in self.groups]
        return tuple(sum(sizes[:at]) for at in range(len(sizes)))

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def num_parameters(self) -> int:
        """Number of parameter values."""
        return sum(
            math.prod(parameter.shape) * (parameter.num_layers or 1)
            for parameter in self.flat_parameters().values()
        )


def _check_parameters(parameters: Any) -> None:
    """Refuse values where the declarations of parameters belong."""
    paths = jax.tree.leaves_with_path(parameters, is_leaf=is_parameter)
    for path, leaf in paths:
        if not is_parameter(leaf):
            raise InputError(
                f"parameters{jax.tree_util.keystr(path)} is a {type(leaf).__name__}: "
                "a model declares each with meshpar.Parameter; values are for "
                "step.init(params=...)",
                key="model.not_a_parameter",
            )
