"""Trace a model on no device, for its shapes and errors, or run it on one device.

`loss` runs layers in a plain loop: it is the reference of every layout.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.errors import InputError, whole_number
from meshpar.model.block_run import Sums
from meshpar.model.contract import BlockGroup, Model, Stream, check_model
from meshpar.model.inputs import (
    BATCH_DIM,
    Batch,
    default_inputs,
    input_shapes,
    logical_sizes,
)
from meshpar.model.parameter import Params, is_parameter
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes


def batch_shapes(
    model: Any, examples: int | None = None, **sizes: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of a model, for compiling without data.

    Args:
        model: Whose declared inputs they are. Or two numbers, of examples and of
            tokens, for the inputs of a language model.
        examples: Of the global batch.
        sizes: Size of each other logical axis of the inputs, such as `seq=128`.

    Raises:
        InputError: A size is missing.

    Example:
        >>> from meshpar.models.presets import build
        >>> batch_shapes(build("test"), 8, seq=16)["tokens"].shape
        (8, 16)
    """
    for name, size in {BATCH_DIM: examples, **sizes}.items():
        if size is not None:
            whole_number("examples" if name == BATCH_DIM else name, size)
    if isinstance(model, int):
        return input_shapes(default_inputs(), {BATCH_DIM: model, "seq": examples or 0})
    check_model(model)
    given = {} if examples is None else {BATCH_DIM: examples}
    return input_shapes(model.known_inputs, {**given, **sizes})


def traced_batch(
    model: Model, examples: int, seq: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes of a batch to trace with: `seq` for every size left open."""
    inputs = model.known_inputs
    sizes = dict.fromkeys(logical_sizes(inputs), seq)
    return input_shapes(inputs, {**sizes, BATCH_DIM: examples})


def tracing_scope(
    batch: Any,
    state: Params,
    examples: jax.Array | None = None,
    training: bool = True,
    platform: str = "",
    **fields: Any,
) -> Scope:
    """Return a scope for tracing, with everything that a function may use.

    Without a `platform`, attention runs in no kernel, and in tiles only beyond the
    longest sequence of `Platform.longest_scores`' default.
    """
    if examples is None:
        num_examples = jax.tree.leaves(batch)[0].shape[0]
        examples = jnp.arange(num_examples, dtype=jnp.uint32)
    return Scope(
        batch=Batch(batch),
        state=state,
        examples=examples,
        random=jax.random.key(0),
        training=training,
        platform=platform,
        **fields,
    )


def traced_forward(
    model: Model,
    batch: Any,
    *,
    rules: Any = None,
    head: bool = False,
    logits: bool = False,
    ends_only: bool = False,
    run: Callable[..., Any] = BlockGroup.run,
    **fields: Any,
) -> tuple[Any, ...]:
    """Return a model's forward with one layer of each group, and its arguments' shapes.

    Args:
        model: The model.
        batch: Shapes of a batch.
        rules: Rules of the scope; None outside any mesh.
        head: Whether to run the head too, and return its sums and each group's.
        logits: Whether to run `logits` in its place.
        ends_only: Whether to leave out the blocks.
        run: (group, layer, x, scope) -> (x, sums); `run_on` runs a layer several times.
        fields: Other fields of the scope.
    """

    def once(params: tuple, state: tuple, batch: Any) -> Any:
        (ends, layers), (of_ends, states) = params, state
        outside = tracing_scope(batch, of_ends, rules=rules, **fields)
        x, of_groups = model.embed(ends, outside.batch, outside), []
        between = [] if ends_only else zip(model.groups, layers, states, strict=True)
        for group, layer, of_layer in between:
            x = x if group.enter is None else group.enter(ends, x, outside)
            x, sums = run(group, layer, x, outside.at_layer(0, of_layer))
            of_groups.append(sums)
        if logits and model.logits is not None:
            return model.logits(ends, x, outside)
        if not head:
            return x
        return model.loss_sums(ends, x, outside.batch, outside), of_groups

    return once, one_layer_shapes(model), one_layer_state(model), batch


def run_on(group: BlockGroup, layer: Any, x: Any, scope: Scope) -> tuple[Any, Any]:
    """Run a group's layer on its own results, until each leaf may reach every other.

    The layer is traced once, and called once for each leaf of the stream and once more.
    """
    block, of_layers = jax.jit(lambda layer, x: group.run(layer, x, scope)), []
    for _ in range(min(group.num_layers, 1 + len(jax.tree.leaves(x)))):
        x, sums = block(layer, x)
        of_layers.append(sums)
    return x, of_layers


def traced_streams(model: Model, examples: int, seq: int) -> list[Any]:
    """Return the shapes of each group's stream."""

    def streams(params: tuple, of_ends: Any, batch: Any) -> list[Any]:
        ends, _ = params
        outside = tracing_scope(batch, of_ends)
        found = [model.embed(ends, outside.batch, outside)]
        for group in model.groups[1:]:
            x = found[-1]
            found.append(x if group.enter is None else group.enter(ends, x, outside))
        return found

    state, _ = one_layer_state(model)
    batch = traced_batch(model, examples, seq)
    return jax.eval_shape(streams, one_layer_shapes(model), state, batch)


def one_layer_shapes(model: Model) -> tuple[Params, list[Params]]:
    """Return shapes of the parameters of the ends, and of one layer of each group."""
    return model.split(_shapes(model.parameters))


def one_layer_state(model: Model) -> tuple[Params, list[Params]]:
    """Return shapes of the state of the ends, and of one layer of each group."""
    return model.split(_shapes(model.state))


def _shapes(tree: Params) -> Params:
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype),
        tree,
        is_leaf=is_parameter,
    )


@contextlib.contextmanager
def tracing(problem: str, way_out: str = "") -> Iterator[None]:
    """Turn a model's failure while it is traced into an `InputError`.

    Args:
        problem: The problem, in words.
        way_out: Advice on what to do instead.

    Raises:
        InputError: Its functions raised a `KeyError`, `TypeError` or `ValueError`.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        hint = f"; {way_out}" if way_out else ""
        key = error.key if isinstance(error, InputError) else "model.untraceable"
        raise InputError(f"{problem}: {error}{hint}", key=key) from error


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An array that a model lays out by name."""

    logical_axes: LogicalAxes
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def traced_activations(model: Model, examples: int, seq: int) -> tuple[Activation, ...]:
    """Return every activation that `model` constrains, once each, and the batch.

    They depend on no layout, and are cached.

    Args:
        model: The model; one layer of each group of blocks is traced.
        examples: Examples in the batch.
        seq: Tokens of an example.

    Raises:
        InputError: The model cannot be traced on such a batch.
    """
    recorder = _Recorder()
    with tracing(f"the model cannot be traced on a batch of shape {(examples, seq)}"):
        batch = traced_batch(model, examples, seq)
        once, *shapes = traced_forward(model, batch, rules=recorder, head=True)
        jax.eval_shape(once, *shapes)
    batch_dim = Activation(logical_axes=("batch",), shape=(examples,))
    return tuple(dict.fromkeys([batch_dim, *recorder.activations]))


class _Recorder:
    """Stand-in for `Rules` that records the arrays that a traced model constrains."""

    def __init__(self) -> None:
        self.activations: list[Activation] = []
        self.table: dict[str, tuple[str, ...]] = {}

    def constrain(
        self, x: jax.Array | jax.ShapeDtypeStruct, logical_axes: LogicalAxes
    ) -> Any:
        self.activations.append(Activation(logical_axes=logical_axes, shape=x.shape))
        return x

    def spec(
        self, logical_axes: LogicalAxes, shape: tuple[int, ...], **_: Any
    ) -> PartitionSpec:
        self.constrain(jax.ShapeDtypeStruct(shape, jnp.float32), logical_axes)
        return PartitionSpec(*(None for _ in logical_axes))


def loss(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> jax.Array:
    """Return the mean loss on one device, without any layout."""
    return loss_and_state(model, params, batch, scope, state)[0]


def loss_and_state(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> tuple[jax.Array, Params]:
    """Return the mean loss, and the state after the step."""
    batch, state = Batch(batch), state or {}
    scope = replace(scope or Scope(), batch=batch)
    x, sums = _run(model, params, batch, scope, state)
    ends, groups = model.split(params)
    of_ends, of_groups = model.split(state)
    found = model.head_sums(ends, x, batch, replace(scope, state=of_ends))
    total, weight_sum = found.loss, found.weight
    for group, layers in zip(model.groups, sums, strict=True):
        total += sum((group.weighted(of_layer) for of_layer in layers), 0.0)
    each = zip(model.groups, groups, of_groups, sums, strict=True)
    new = [_updated(*of_group) for of_group in each]
    state = {**state, **{k: v for k, v in model.join({}, new).items() if k in state}}
    if model.update_ends is not None and found.statistics:
        state = {**state, **model.update_ends(of_ends, found.statistics)}
    return total / weight_sum, state


def forward(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> Stream:
    """Return the last block's output, layers in a plain loop."""
    scope = replace(scope or Scope(), batch=Batch(batch))
    return _run(model, params, Batch(batch), scope, state or {})[0]


def _run(
    model: Model, params: Params, batch: Batch, scope: Scope, state: Params
) -> tuple[Stream, list[list[Sums]]]:
    """Return the last block's output, and the sums of every layer of every group."""
    ends, groups = model.split(params)
    of_ends, of_groups = model.split(state)
    outside = replace(scope, state=of_ends)
    x, sums, layer = model.embed(ends, batch, outside), [], 0
    for group, stacked, states in zip(model.groups, groups, of_groups, strict=True):
        if group.enter is not None:
            x = group.enter(ends, x, outside)
        found = []
        for index in range(group.num_layers):
            at = scope.at_layer(jnp.asarray(layer), _layer(states, index))
            x, of_layer = group.run(_layer(stacked, index), x, at)
            found.append(of_layer)
            layer += 1
        sums.append(found)
    return x, sums


def _layer(tree: Params, index: int) -> Params:
    return jax.tree.map(lambda value: value[index], tree)


def _updated(
    group: BlockGroup, params: Params, state: Params, sums: list[Sums]
) -> Params:
    if not group.changes_state:
        return state
    layers = []
    for index, of_layer in enumerate(sums):
        own = {k: v for k, v in of_layer.items() if k not in group.auxiliary}
        layers.append(group.updated(_layer(params, index), _layer(state, index), own))
    return jax.tree.map(lambda *values: jnp.stack(values), *layers)
