"""Tracing a model on no device: the shapes it takes, and what to say when it fails."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError, whole_number
from meshpar.model.contract import BlockGroup, Model, check_model
from meshpar.model.inputs import (
    BATCH_DIM,
    Batch,
    default_inputs,
    logical_sizes,
    shapes_of,
)
from meshpar.model.parameter import Params, is_parameter
from meshpar.model.scope import Scope
from meshpar.model.token_mixing import surely_mixes


def batch_shapes(
    model: Any, examples: int | None = None, **sizes: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of a model, for compiling without data.

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
        return shapes_of(default_inputs(), {BATCH_DIM: model, "seq": examples or 0})
    check_model(model)
    given = {} if examples is None else {BATCH_DIM: examples}
    return shapes_of(model.known_inputs, {**given, **sizes})


def traced_batch(
    model: Model, examples: int, seq: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch to trace with: `seq` for every size that nobody gives."""
    inputs = model.known_inputs
    sizes = dict.fromkeys(logical_sizes(inputs), seq)
    return shapes_of(inputs, {**sizes, BATCH_DIM: examples})


def tracing_scope(
    batch: Any, state: Params, examples: jax.Array | None = None, **fields: Any
) -> Scope:
    """A scope for tracing: everything that a function may ask for is there."""
    if examples is None:
        num_examples = jax.tree.leaves(batch)[0].shape[0]
        examples = jnp.arange(num_examples, dtype=jnp.uint32)
    return Scope(
        batch=Batch(batch),
        state=state,
        examples=examples,
        random=jax.random.key(0),
        training=True,
        **fields,
    )


def _run_once(group: BlockGroup, layer: Any, x: Any, scope: Scope) -> tuple[Any, Any]:
    return group.run(layer, x, scope)


def traced_forward(
    model: Model,
    batch: Any,
    *,
    rules: Any = None,
    head: bool = False,
    ends_only: bool = False,
    run: Callable[..., Any] = _run_once,
    **fields: Any,
) -> tuple[Any, ...]:
    """A model's forward with one layer of each group, and the shapes it takes.

    Args:
        model: The model.
        batch: Shapes of a batch.
        rules: What stands in the scope; None outside any mesh.
        head: Whether the head is run too: its sums, and each group's.
        ends_only: Whether the head is given what `embed` makes.
        run: (group, layer, x, scope) -> (x, sums); `run_on` runs a layer several times.
        fields: Of the scope, besides.
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
        if not head:
            return x
        return model.loss_sums(ends, x, outside.batch, outside), of_groups

    return once, one_layer_shapes(model), one_layer_state(model), batch


def run_on(group: BlockGroup, layer: Any, x: Any, scope: Scope) -> tuple[Any, Any]:
    """A group's layer on its own results, until every leaf has been through the others.

    What one layer makes of a leaf the next one may make another of. The layer is traced
    once, and stands in the trace as often as it runs.
    """
    block, of_layers = jax.jit(lambda layer, x: group.run(layer, x, scope)), []
    for _ in range(min(group.num_layers, 1 + len(jax.tree.leaves(x)))):
        x, sums = block(layer, x)
        of_layers.append(sums)
    return x, of_layers


def check_examples_first(model: Model, batch: Any) -> None:
    """Refuses a model that drops out along another dim than the examples.

    Where that dim happens to be as long as there are examples, one layout would take it
    and another not: so it is tried with two and three times as many.

    Args:
        model: The model.
        batch: Arrays of a batch, or their shapes.

    Raises:
        InputError: `Scope.dropout` is given another first dim.
    """
    once, *shapes = traced_forward(model, _times(batch, 1), head=True)
    program = jax.make_jaxpr(once)(*shapes)
    if "random_bits" not in str(program):
        return
    for times in (2, 3):
        once, *shapes = traced_forward(model, _times(batch, times), head=True)
        jax.eval_shape(once, *shapes)


_TIMES, _MANY = 13, 100
"""At least so many times the examples are traced with: as few sizes of a model are.

Examples are told from them by their number, which what divides the batch divides too.
Many of them are traced as they are: NumPy arrays of a model are built as large.
"""


def check_examples_apart(model: Model, batch: Any, layout: str) -> None:
    """Refuses a model that joins examples otherwise than by sums.

    Devices and microbatches have some examples of the batch each: what is not a sum
    over them, such as a mean's difference, a contrastive loss or noise of the batch's
    own shape, would be of these alone.

    Args:
        model: The model.
        batch: Arrays of a batch, or their shapes.
        layout: What splits the batch, in words.

    Raises:
        InputError: It surely joins them; what only may is let through, and so is a
            model that asks for sums over the global batch itself.
    """
    params, state = one_layer_shapes(model), one_layer_state(model)
    shapes = told_apart(batch, params, state)
    num = jax.tree.leaves(shapes)[0].shape[0]
    asked: list[str] = []

    def forward(of_examples: list, params: tuple, state: tuple) -> Any:
        batch, examples = of_examples
        once, *_ = traced_forward(
            model, batch, head=True, examples=examples, batch_sums=asked
        )
        return once(params, state, batch)

    given = {name: (shape, 0) for name, shape in shapes.items()}
    numbers = jax.ShapeDtypeStruct((num,), jnp.uint32), 0
    found = surely_mixes(forward, num, [given, numbers], params, state)
    if found is not None and not asked:
        raise InputError(
            f"layout {layout!r} gives devices or microbatches some examples each, but "
            f"a function of the model joins those that it has: {found}; give sums over "
            "examples alone, take scope.batch_sum for statistics and scope.key for "
            "noise, or leave the batch whole"
        )


def told_apart(batch: Any, *others: Any) -> Any:
    """Shapes of so many times the examples that no other array has a dim as long.

    Args:
        batch: Arrays of a batch, or their shapes, the example first.
        others: Trees of shapes.
    """
    sizes = {size for x in jax.tree.leaves(others) for size in x.shape}
    sizes |= {size for x in dict(batch).values() for size in x.shape[1:]}
    [examples, *_] = [x.shape[0] for x in dict(batch).values()]
    times = itertools.count(_TIMES if examples < _MANY else 1)
    return _times(batch, next(n for n in times if n * examples not in sizes))


def _times(batch: Any, times: int) -> Any:
    """Shapes of so many times the examples."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype),
        dict(batch),
    )


def traced_streams(model: Model, examples: int, seq: int) -> list[Any]:
    """Shapes of each group's stream."""

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
    """Shapes of the parameters of the ends, and of one layer of each group."""
    return model.split(_shapes(model.parameters))


def one_layer_state(model: Model) -> tuple[Params, list[Params]]:
    """Shapes of the state of the ends, and of one layer of each group."""
    return model.split(_shapes(model.state))


def _shapes(tree: Params) -> Params:
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype),
        tree,
        is_leaf=is_parameter,
    )


@contextlib.contextmanager
def tracing(problem: str, way_out: str = "") -> Iterator[None]:
    """Turns a model's failure on a batch of its inputs into an error that says so.

    Args:
        problem: What cannot be done.
        way_out: What to do instead.

    Raises:
        InputError: Its functions raised a `KeyError`, `TypeError` or `ValueError`.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        hint = f"; {way_out}" if way_out else ""
        raise InputError(f"{problem}: {error}{hint}") from error
