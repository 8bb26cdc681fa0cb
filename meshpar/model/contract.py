"""The contract between a model and every parallel strategy.

A model is three functions over a tree of parameters:

    embed(params, batch, scope) -> x
    block(block_params, x, scope) -> x      once per layer, parameters stacked
    head(params, x, batch, scope) -> (loss_sum, weight_sum)

`params` is a nested dict whose top-level keys are the names of the block groups and
whatever else the model has; `embed` and `head` see all but the block groups. The loss
is `sum(loss_sum) / sum(weight_sum)` over the global batch, so that padding, masks,
shards and microbatches cannot change it. A group of blocks may declare auxiliary losses
(router z-loss, load balancing); its block then returns `(x, sums)`, a sum over its
tokens or examples for each, and

    loss = (sum(loss_sum) + sum(coefficient * sums)) / sum(weight_sum)

with `sums` over all layers and the global batch too. What is not a sum over examples,
such as a product of means over a batch, would depend on the microbatches: take it of
each example. `batch` is a dict of arrays with the example
first: `tokens`, `targets` and `weights`, (batch, seq) each, and what else a model
reads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.scope import Batch, Scope
from meshpar.rules.rules import LogicalAxes
from meshpar.rules.sharding import path_name

Params = dict[str, Any]

SEQUENCE_INPUTS = ("tokens", "targets", "weights", "positions")
"""Names of the arrays of a batch that are (batch, seq, ...), where it has them."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What is known of one parameter before it exists.

    Args:
        shape: Global shape, of one layer where the parameter belongs to blocks.
        dtype: Of its initial value, which is rounded to it; how a training step stores
            the parameter is the layout's `param_dtype`.
        logical_axes: A name, or None, for each dim.
        initial: Key -> the initial value, of `shape`.
        num_layers: Layers that the parameter is stacked over, on a leading dim; None
            outside blocks.
        layer_order: The layer at each place of that dim, -1 for a place without one;
            first to last when absent.
    """

    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes
    initial: Callable[[jax.Array], jax.Array]
    num_layers: int | None = None
    layer_order: tuple[int, ...] | None = None

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Global shape with the `layers` dim."""
        return (*self._leading, *self.shape)

    @property
    def stacked_axes(self) -> LogicalAxes:
        """Logical axes with the `layers` dim."""
        return (*(("layers",) if self._leading else ()), *self.logical_axes)

    @property
    def _leading(self) -> tuple[int, ...]:
        if self.num_layers is None:
            return ()
        return (self.num_layers if self.layer_order is None else len(self.layer_order),)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype as JAX wants them."""
        return jax.ShapeDtypeStruct(self.stacked_shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """Blocks of one kind: `block(block_params, x, scope) -> x`, `num_layers` times.

    Args:
        name: Key of their parameters in the tree.
        num_layers: How many there are.
        block: One of them; the layer is `scope.layer`. It returns `(x, sums)` where
            there are auxiliary losses: a dict of a scalar for each.
        auxiliary: Name of each auxiliary loss -> its coefficient.
        costs: Of each layer, in any unit, for stages of even cost (`splits=cost`);
            their matmul FLOPs when absent.

    Raises:
        InputError: There are not as many costs as layers, or one is not above 0.
    """

    name: str
    num_layers: int
    block: Callable[[Params, jax.Array, Scope], jax.Array]
    costs: tuple[float, ...] | None = None
    auxiliary: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.costs is None:
            return
        object.__setattr__(self, "costs", tuple(self.costs))
        if len(self.costs) != self.num_layers:
            raise InputError(
                f"block group {self.name!r} has {self.num_layers} layers, but "
                f"{len(self.costs)} costs; give one a layer"
            )
        if not all(0 < cost < math.inf for cost in self.costs):
            raise InputError(
                f"block group {self.name!r} has costs {self.costs}; each must be a "
                "number above 0"
            )

    def run(
        self, params: Params, x: jax.Array, scope: Scope
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The block's output, and its fp32 sum of each auxiliary loss.

        Raises:
            InputError: It returns other sums than those declared.
        """
        result = self.block(params, x, scope)
        if not self.auxiliary and not isinstance(result, tuple):
            return result, {}
        shapes = None
        if isinstance(result, tuple) and len(result) == 2:
            shapes = {name: jnp.shape(value) for name, value in result[1].items()}
        if not self.auxiliary or shapes != dict.fromkeys(self.auxiliary, ()):
            found = "x alone" if shapes is None else f"x and {shapes}"
            raise InputError(
                f"block group {self.name!r} declares auxiliary losses "
                f"{list(self.auxiliary)}, but its block returns {found}; it must "
                "return (x, sums) with a scalar for each of those, or x if none"
            )
        x, sums = result
        return x, {name: sums[name].astype(jnp.float32) for name in self.auxiliary}

    def weighted(self, sums: Mapping[str, jax.Array]) -> jax.Array | float:
        """The sums of the auxiliary losses times their coefficients."""
        return sum(
            coefficient * sums[name] for name, coefficient in self.auxiliary.items()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model under the contract of this module.

    Args:
        parameters: Tree of `Parameter`; block groups under their own names.
        embed: `(params, batch, scope) -> x` of shape (batch, seq, embed).
        groups: Block groups in the order in which they run.
        head: `(params, x, batch, scope) -> (loss_sum, weight_sum)`, two scalars.
        logits: `(params, x, scope) -> (batch, seq, vocab)`, for sampling; optional.
        per_token: Whether embed and head treat every token by itself, but for its
            position (`Scope.positions`). Then the ranks of a pipeline share them.
        sequence_inputs: Names of the arrays of a batch, of those that it has, that are
            (batch, seq, ...) and so shared with the tokens; embed and head see others
            whole, whatever their size.
    """

    parameters: dict[str, Any]
    embed: Callable[[Params, Batch, Scope], jax.Array]
    groups: tuple[BlockGroup, ...]
    head: Callable[[Params, jax.Array, Batch, Scope], tuple[jax.Array, jax.Array]]
    logits: Callable[[Params, jax.Array, Scope], jax.Array] | None = None
    per_token: bool = False
    sequence_inputs: tuple[str, ...] = SEQUENCE_INPUTS

    def __post_init__(self) -> None:
        for group in self.groups:
            if group.name not in self.parameters:
                raise InputError(
                    f"block group {group.name!r} has no parameters; the tree holds "
                    f"{', '.join(sorted(self.parameters))}"
                )

    def split(self, params: Params) -> tuple[Params, list[Params]]:
        """The parameters outside the blocks, and those of each block group."""
        names = [group.name for group in self.groups]
        ends = {key: value for key, value in params.items() if key not in names}
        return ends, [params[name] for name in names]

    def join(self, ends: Params, groups: list[Params]) -> Params:
        """Undoes `split`."""
        named = zip([group.name for group in self.groups], groups, strict=True)
        return {**ends, **dict(named)}

    def flat_parameters(self) -> dict[str, Parameter]:
        """Path such as `blocks.mlp.down` -> parameter, in tree order."""
        leaves = jax.tree.leaves_with_path(self.parameters, is_leaf=is_parameter)
        return {path_name(path): leaf for path, leaf in leaves}

    def init(self, seed: jax.Array | int) -> Params:
        """Initial values, each a function of (seed, path, layer index) only."""
        return jax.tree.map_with_path(
            lambda path, parameter: _initial_value(path_name(path), parameter, seed),
            self.parameters,
            is_leaf=is_parameter,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameter values."""
        return sum(
            math.prod(parameter.shape) * (parameter.num_layers or 1)
            for parameter in self.flat_parameters().values()
        )


def loss(
    model: Model, params: Params, batch: Batch, scope: Scope | None = None
) -> jax.Array:
    """The mean loss on one device, without any layout: what every layout must equal."""
    scope = scope or Scope(batch=batch)
    x, auxiliary = _run(model, params, batch, scope)
    loss_sum, weight_sum = model.head(model.split(params)[0], x, batch, scope)
    return (loss_sum + auxiliary) / weight_sum


def forward(model: Model, params: Params, batch: Batch, scope: Scope) -> jax.Array:
    """The last block's output, layers in a plain loop."""
    return _run(model, params, batch, scope)[0]


def _run(
    model: Model, params: Params, batch: Batch, scope: Scope
) -> tuple[jax.Array, jax.Array | float]:
    """The last block's output, and the weighted sum of the auxiliary losses."""
    ends, groups = model.split(params)
    x, auxiliary = model.embed(ends, batch, scope), 0.0
    first = 0
    for group, stacked in zip(model.groups, groups, strict=True):
        for layer in range(group.num_layers):
            one_layer = jax.tree.map(lambda value, at=layer: value[at], stacked)
            at = scope.at_layer(jnp.asarray(first + layer))
            x, sums = group.run(one_layer, x, at)
            auxiliary += group.weighted(sums)
        first += group.num_layers
    return x, auxiliary


def is_parameter(node: object) -> bool:
    """Whether a node of the parameter tree is a `Parameter`."""
    return isinstance(node, Parameter)


def batch_shapes(examples: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of tokens, for compiling without data."""
    shape = (examples, seq)
    return {
        "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
        "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
        "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
    }


def _initial_value(path: str, parameter: Parameter, seed: jax.Array | int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    if parameter.num_layers is None:
        return parameter.initial(key).astype(parameter.dtype)
    order = parameter.layer_order or tuple(range(parameter.num_layers))
    layers = jnp.asarray(order, jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers.astype(jnp.uint32))
    values = jax.vmap(parameter.initial)(keys).astype(parameter.dtype)
    if min(order) >= 0:
        return values
    filled = (layers >= 0).reshape(-1, *(1,) * len(parameter.shape))
    return jnp.where(filled, values, 0)
