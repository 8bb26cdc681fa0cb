"""Whether a model's `logits` treats every example by itself, before it runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.token_mixing import surely_mixes
from meshpar.model.tracing import one_layer_shapes, one_layer_state, told_apart
from meshpar.parallel.traced_logits import traced_logits


def check_logits_examples(model: Model, batch: Any, layout: str) -> None:
    """Refuses `logits` that join examples, of which devices have some each.

    Args:
        model: The model, which has `logits`.
        batch: Arrays of a batch that they read, or their shapes.
        layout: What splits the batch, in words.

    Raises:
        InputError: They surely do, and ask for no sums over the global batch.
    """
    params, state = one_layer_shapes(model), one_layer_state(model)
    shapes = told_apart(batch, params, state)
    num = jax.tree.leaves(shapes)[0].shape[0]
    asked: list[str] = []

    def forward(of_examples: list, params: Any, state: Any) -> Any:
        batch, examples = of_examples
        once = traced_logits(model, batch, examples=examples, batch_sums=asked)
        return once(params, state, batch)

    given = {name: (shape, 0) for name, shape in shapes.items()}
    numbers = jax.ShapeDtypeStruct((num,), jnp.uint32), 0
    found = surely_mixes(forward, num, [given, numbers], params, state)
    if found is not None and not asked:
        raise InputError(
            f"layout {layout!r} gives devices some examples each, but logits joins "
            f"those that it has: {found}; give each example's own, take "
            "scope.batch_sum for statistics, or leave the batch whole"
        )
