"""Run a block, in parts of the batch if that overlaps, and check what it returns.

Under sequence parallelism every matmul of a block waits for a gather over `tensor`, or
precedes a scatter. Examples are independent, so a block that takes them part by part
can overlap: while one part's tokens are gathered, another's are multiplied. No more
bytes are sent. Reference: Wang et al. 2024, "Domino", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES
from meshpar.model.inputs import Batch
from meshpar.model.scope import Scope
from meshpar.trace.walk import collective_axes, equations

METRICS = ("loss", "loss_sum", "weight_sum", "grad_norm", "skipped")
"""Names of a step's metrics, which no term of a head may have."""

PERPLEXITY = "perplexity"
"""Term of a head whose metric is the exponential of its mean."""

Terms = dict[str, tuple[jax.Array, jax.Array]]
"""Name of a metric -> its sum over examples, and the sum of its weights."""

Sums = dict[str, jax.Array]
"""Name to fp32 scalar (auxiliary losses) or array of any shape (state)."""


def is_pair(result: Any, stream: Any) -> bool:
    """Return True if a result is (stream, sums), not a stream that is itself a pair."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return False
    if not isinstance(result[1], Mapping):
        return False
    return jax.tree.structure(result) != jax.tree.structure(stream)


def check_sums(
    block: str,
    result: Any,
    stream: Any,
    auxiliary: Mapping[str, float],
    keeps_state: bool,
) -> tuple[Any, Sums]:
    """Return a block's result as (stream, sums), with the sums that are declared.

    Args:
        block: Name of the block in errors.
        result: Value that the block returned.
        stream: Stream that it was given.
        auxiliary: The auxiliary losses that are declared.
        keeps_state: Whether it may return other sums too, for its state.

    Raises:
        InputError: It returns other sums than those declared.
    """
    pair = is_pair(result, stream)
    if not pair and not auxiliary:
        return result, {}
    shapes = {k: _shape(v) for k, v in result[1].items()} if pair else {}
    wrong = any(shapes.get(name) != () for name in auxiliary)
    if wrong or not (keeps_state or set(shapes) == set(auxiliary)):
        found = f"x and {shapes}" if pair else "x alone"
        raise InputError(
            f"{block} returns {found}, but the auxiliary losses declared are "
            f"{list(auxiliary)}; it must return (x, sums) with a scalar for each of "
            "those, or x if none; other sums need update_state",
            key="model.wrong_sums",
        )
    stream, sums = result
    return stream, {
        name: jnp.asarray(sums[name], jnp.float32)
        if name in auxiliary
        else jax.tree.map(jnp.asarray, sums[name])
        for name in sorted(sums)
    }


def check_kept(block: str, y: Any, x: Any) -> None:
    """Raise if a block changes the tree, a shape or a dtype of its stream.

    Args:
        block: Name of the block in errors.
        y: Stream after the block.
        x: Stream before the block.

    Raises:
        InputError: They differ.
    """
    found, wanted = (
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{jnp.shape(x)}", stream)
        for stream in (y, x)
    )
    if found != wanted:
        raise InputError(
            f"{block} maps {wanted} to {found}; blocks must keep shape and dtype of "
            "all that their stream holds, so that they can follow one another",
            key="model.stream_changed",
        )


class HeadSums(NamedTuple):
    """Sums of a head: fp32 scalars, and arrays that its state is made of.

    Args:
        loss: Sum of the loss.
        weight: Sum of the weights.
        terms: Name of a metric -> its sum and the sum of its weights.
        statistics: Name -> array that is summed for the state (`Model.update_ends`).
    """

    loss: jax.Array
    weight: jax.Array
    terms: Terms
    statistics: Sums = {}  # noqa: RUF012, never changed

    def differentiated(self) -> tuple[tuple[jax.Array, jax.Array], tuple[Terms, Sums]]:
        """Return the sums that have a gradient, and those that have none."""
        return (self.loss, self.weight), (self.terms, self.statistics)


def check_head(found: Any, head: str = "head") -> HeadSums:
    """Return the sums of a head's loss and weights, and of its named terms, in fp32.

    Args:
        found: Value that the head returned.
        head: Name of the head in errors.

    Raises:
        InputError: They are not two scalars of real numbers, and a dict of such.
    """
    if isinstance(found, HeadSums):
        return found
    pair = list(found) if isinstance(found, tuple | list) else [found]
    terms: Mapping[str, Any] = {}
    if len(pair) == 3 and isinstance(pair[2], Mapping):
        *pair, terms = pair
    shapes = [_shape(value) for value in pair]
    if shapes != [(), ()]:
        raise InputError(
            f"{head} returns arrays of shapes {shapes}; it must return two scalars: "
            "the sum of the loss over the examples and the sum of their weights, and "
            "may return a dict of named sums",
            key="model.head_not_scalars",
        )
    _check_real(pair, head)
    loss_sum, weight_sum = (jnp.asarray(value, jnp.float32) for value in pair)
    named = {
        name: _term(name, terms[name], weight_sum, head)
        for name in sorted(terms, key=str)
    }
    return HeadSums(loss_sum, weight_sum, named)


def _check_real(values: Sequence[Any], head: str) -> None:
    for value in values:
        if jnp.iscomplexobj(value):
            raise InputError(
                f"{head} returns a {jnp.result_type(value)} scalar; a loss and its "
                "weights are real: take .real or jnp.abs of it",
                key="model.complex_loss",
            )


def _term(
    name: Any, value: Any, weight_sum: jax.Array, head: str
) -> tuple[jax.Array, jax.Array]:
    """Return a term's sum and the sum of its weights, those of the loss by default."""
    if not isinstance(name, str) or name in METRICS or name.startswith("auxiliary."):
        raise InputError(
            f"{head} returns a term named {name!r}; name it by another text than "
            f"{', '.join(METRICS)} and auxiliary.NAME, which a step returns itself",
            key="model.term_name_taken",
        )
    pair = tuple(value) if isinstance(value, tuple | list) else (value, weight_sum)
    shapes = [_shape(part) for part in pair]
    if shapes != [(), ()]:
        raise InputError(
            f"{head} returns arrays of shapes {shapes} as term {name!r}; it must be a "
            "scalar, the sum over the examples, or two: that sum and the sum of its "
            "weights",
            key="model.term_not_scalar",
        )
    _check_real(pair, head)
    total, weight = (jnp.asarray(part, jnp.float32) for part in pair)
    return lax.stop_gradient(total), lax.stop_gradient(weight)


def _shape(value: Any) -> Any:
    """Return the shape of an array or a number; of anything else the type's name."""
    try:
        jnp.result_type(value)  # NumPy gives a dict the shape ()
        return jnp.shape(value)
    except TypeError:
        return type(value).__name__


Run = Callable[[Any, Any, Scope], tuple[Any, Sums]]
"""(parameters, stream, scope) -> (stream, sums)."""


def in_parts(run: Run, params: Any, stream: Any, scope: Scope) -> tuple[Any, Sums]:
    """Run a block, in parts of the batch if that hides communication.

    Args:
        run: The block of one group.
        params: Parameters of one layer.
        stream: This device's arrays, the example first.
        scope: Scope of the block; its platform and rules decide.

    Returns:
        The stream, and sums over all examples.
    """
    parts = num_batch_parts(stream, scope)
    if parts == 1 or _asks_for_whole_batch(run, params, stream, scope):
        return run(params, stream, scope)
    found = [
        run(
            params,
            _part(stream, at, parts),
            replace(
                scope,
                batch=Batch(_part(dict(scope.batch), at, parts)),
                examples=_part(scope.examples, at, parts),
            ),
        )
        for at in range(parts)
    ]
    streams, sums = zip(*found, strict=True)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *streams)
    return joined, jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)


def num_batch_parts(stream: Any, scope: Scope) -> int:
    """Return the number of parts in which a block takes its examples.

    1 unless the sequence of the residual stream is split. Otherwise as many as the
    platform can overlap, if they divide the examples and leave enough tokens each.
    """
    # A user's own pipeline has scopes of its own, without rules.
    if not getattr(scope, "sequence_axes", ()):
        return 1
    leaves = jax.tree.leaves(stream)
    examples = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(examples) != 1:
        return 1
    num_examples = examples.pop()
    tokens = max(math.prod(leaf.shape[:-1]) for leaf in leaves)
    return platform_named(scope.platform).num_batch_parts(num_examples, tokens)


def _asks_for_whole_batch(run: Run, params: Any, stream: Any, scope: Scope) -> bool:
    """Return True if the block reduces over the batch, so that parts would differ.

    It does so by `Scope.batch_sum`, or by a collective over a mesh axis that splits the
    batch.
    """
    asked: list[str] = []
    seen = replace(scope, batch_sums=asked)
    traced = jax.make_jaxpr(lambda params, stream: run(params, stream, seen))(
        params, stream
    )
    return bool(asked) or any(
        axis in BATCH_AXES
        for equation in equations(traced.jaxpr)
        for axis in collective_axes(equation)
    )


def _part(tree: Any, at: int, num_parts: int) -> Any:
    def part_rows(array: jax.Array) -> jax.Array:
        rows = array.shape[0] // num_parts
        return array[at * rows : (at + 1) * rows]

    return jax.tree.map(part_rows, tree)
