"""A block in parts of the batch: one part's collectives run beside another's matmuls.

Under sequence parallelism every matmul of a block waits for a gather over `tensor`, or
is waited for by a scatter. The examples of a device know nothing of one another, so a
block that takes them part by part has work that waits for neither: while one part's
tokens are gathered the compiler's scheduler multiplies another's. No bytes more are
sent. Reference: Wang et al. 2024, "Domino", section 3.
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
    """`run`, in parts of the batch where that hides communication; as it is elsewhere.

    Args:
        run: The block of one group.
        params: Of one layer.
        stream: Arrays with the example first, this device's.
        scope: Where the block runs; its platform and rules decide.

    Returns:
        The stream, and sums over all examples.
    """
    parts = num_parts_of(stream, scope)
    if parts == 1 or _asks_for_whole_batch(run, params, stream, scope):
        return run(params, stream, scope)
    found = [
        run(params, _part(stream, at, parts), _scope_of(scope, at, parts))
        for at in range(parts)
    ]
    streams, sums = zip(*found, strict=True)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *streams)
    return joined, jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *sums)


def num_parts_of(stream: Any, scope: Scope) -> int:
    """In how many parts a block takes its examples; 1 for all at once.

    As many as the platform has use for, the examples divide into and leave each part
    its tokens, where the residual stream's sequence is split over mesh axes at work.
    Of a stream whose sequence is also split over `context`, a device has its part.
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
    """Whether the block needs other examples: no part has a sum over the batch.

    By `Scope.batch_sum`, or by a collective of its own over a mesh axis that splits the
    batch, of which every part would have another value.
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


def _scope_of(scope: Scope, at: int, num_parts: int) -> Scope:
    return replace(
        scope,
        batch=Batch(_part(dict(scope.batch), at, num_parts)),
        examples=_part(scope.examples, at, num_parts),
    )


def _part(tree: Any, at: int, num_parts: int) -> Any:
    def of(array: jax.Array) -> jax.Array:
        rows = array.shape[0] // num_parts
        return array[at * rows : (at + 1) * rows]

    return jax.tree.map(of, tree)
