"""Run a block in parts of the batch, to overlap collectives and matmuls.

Under sequence parallelism every matmul of a block waits for a gather over `tensor`, or
precedes a scatter. Examples are independent, so a block that takes them part by part
can overlap: while one part's tokens are gathered, another's are multiplied. No more
bytes are sent. Reference: Wang et al. 2024, "Domino", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES
from meshpar.model.inputs import Batch
from meshpar.model.scope import Scope
from meshpar.model.sums import Sums
from meshpar.rules.rules import auto_mesh_shape
from meshpar.trace.walk import collective_axes, equations

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
    if not _splits_sequence(scope):
        return 1
    leaves = jax.tree.leaves(stream)
    examples = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(examples) != 1:
        return 1
    num_examples = examples.pop()
    tokens = max(math.prod(leaf.shape[:-1]) for leaf in leaves)
    return platform_named(scope.platform).num_batch_parts(num_examples, tokens)


def _splits_sequence(scope: Scope) -> bool:
    # A user's own pipeline has scopes of its own, without rules.
    rules = getattr(scope, "rules", None)
    if rules is None or "residual_seq" not in rules.table:
        return False
    sizes = auto_mesh_shape()
    return any(sizes.get(axis, 1) > 1 for axis in rules.mesh_axes("residual_seq"))


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
    def of(array: jax.Array) -> jax.Array:
        rows = array.shape[0] // num_parts
        return array[at * rows : (at + 1) * rows]

    return jax.tree.map(of, tree)
